package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/features"
)

// TestE2EPodNetwork shows names and policies between pods of three nodes.
func TestE2EPodNetwork(t *testing.T) {
	e := start(t)
	t.Run("names", func(t *testing.T) { names(t, e) })
	t.Run("policies", func(t *testing.T) { policies(t, e) })
}

// on puts a pod on a node.
func on(node string, p *corev1.Pod) *corev1.Pod {
	p.Spec.NodeSelector = map[string]string{corev1.LabelHostname: node}
	return p
}

// lookup asks from inside a pod, through its resolv.conf.
func (e *env) lookup(ns, pod, kind, name string) (string, error) {
	out, errs, code := e.run("clusterctl", "", "-n", ns, "exec", pod, "--", "/hello", "lookup", kind, name)
	if code != 0 {
		return "", fmt.Errorf("lookup %s %s: %s", kind, name, errs)
	}
	return strings.Join(strings.Fields(out), " "), nil
}

func (e *env) resolves(ns, pod, kind, name, want string) {
	e.t.Helper()
	e.eventually(name+" is "+want, func(context.Context) error {
		got, err := e.lookup(ns, pod, kind, name)
		if err == nil && got != want {
			err = fmt.Errorf("it is %q", got)
		}
		return err
	})
}

func names(t *testing.T, e *env) {
	ns := e.namespace("names")
	var askers []string
	for _, n := range e.Nodes() {
		p := on(n.Name, pod("ask-"+n.Name, "sleep"))
		askers = append(askers, p.Name)
		e.create(ns, p)
	}
	host := on("n1", pod("host", "sleep"))
	host.Spec.HostNetwork, host.Spec.DNSPolicy = true, corev1.DNSClusterFirstWithHostNet
	e.create(ns, host)
	db := on("n2", pod("db-0"))
	db.Spec.Hostname, db.Spec.Subdomain = "db-0", "db"
	e.create(ns, db)
	e.ctlIn(fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: web, namespace: %[1]s}
spec: {selector: {app: db-0}, ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: db, namespace: %[1]s}
spec: {clusterIP: None, selector: {app: db-0}, ports: [{name: http, port: 8080}]}
---
apiVersion: v1
kind: Service
metadata: {name: alias, namespace: %[1]s}
spec: {type: ExternalName, externalName: web.%[1]s.svc.cluster.local}
`, ns), "apply", "-f", "-")
	ip := e.podReady(ns, "db-0").Status.PodIP
	web, err := e.api.CoreV1().Services(ns).Get(t.Context(), "web", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	// The Service by which programs find the servers must not lead questions away
	// from them: it is there before anything is asked.
	e.eventually("the Service kube-dns", func(ctx context.Context) error {
		s, err := e.api.CoreV1().Services("kube-system").Get(ctx, "kube-dns", metav1.GetOptions{})
		if err == nil && s.Spec.ClusterIP != "10.96.0.10" {
			err = fmt.Errorf("%+v", s.Spec)
		}
		return err
	})
	for _, name := range append(slices.Clone(askers), "host") {
		e.podReady(ns, name)
		e.resolves(ns, name, "host", "kube-dns.kube-system", "10.96.0.10")
		e.ctl("-n", ns, "exec", name, "--", "/hello", "dial", "10.96.0.10:53")
		features.Shows(t, 288, 299)
		conf := e.ctl("-n", ns, "exec", name, "--", "/hello", "cat", "/etc/resolv.conf")
		mustContain(t, "resolv.conf of "+name, conf, "nameserver 10.96.0.10", "search names.svc.cluster.local svc.cluster.local cluster.local", "ndots:5")
		// Short, partial and whole names.
		for _, n := range []string{"web", "web.names", "web.names.svc", "web.names.svc.cluster.local", "web.names.svc.cluster.local."} {
			e.resolves(ns, name, "host", n, web.Spec.ClusterIP)
		}
	}
	ask := askers[0]
	t.Run("headless, host names, ports, addresses", func(t *testing.T) {
		features.Conforms(t, 214, 215, 216, 218)
		e.resolves(ns, ask, "host", "db", ip)
		e.resolves(ns, ask, "host", "db-0.db", ip)
		e.resolves(ns, ask, "srv", "_http._tcp.web.names.svc.cluster.local", "80 web.names.svc.cluster.local.")
		e.resolves(ns, ask, "srv", "_http._tcp.db.names.svc.cluster.local", "8080 db-0.db.names.svc.cluster.local.")
		e.resolves(ns, ask, "addr", web.Spec.ClusterIP, "web.names.svc.cluster.local.")
		e.resolves(ns, ask, "addr", ip, "db-0.db.names.svc.cluster.local.")
		e.resolves(ns, ask, "host", strings.ReplaceAll(ip, ".", "-")+".names.pod.cluster.local", ip)
		e.eventually("a name that does not exist has no host", func(context.Context) error {
			out, err := e.lookup(ns, ask, "host", "nosuch.names.svc.cluster.local")
			if err == nil {
				t.Fatalf("a name that does not exist is %q", out)
			}
			if !strings.Contains(err.Error(), "no such host") {
				return err
			}
			return nil
		})
	})
	t.Run("an alias, that becomes a Service", func(t *testing.T) {
		features.Conforms(t, 213)
		e.resolves(ns, ask, "cname", "alias.names.svc.cluster.local", "web.names.svc.cluster.local.")
		e.resolves(ns, ask, "host", "alias", web.Spec.ClusterIP)
		e.ctl("-n", ns, "patch", "service", "alias", "-p", `{"spec":{"externalName":"db.names.svc.cluster.local"}}`)
		e.resolves(ns, ask, "host", "alias", ip)
		e.ctl("-n", ns, "patch", "service", "alias", "-p", `{"spec":{"type":"ClusterIP","externalName":null,"ports":[{"name":"http","port":80}]}}`)
		s, err := e.api.CoreV1().Services(ns).Get(t.Context(), "alias", metav1.GetOptions{})
		if err != nil || s.Spec.ClusterIP == "" {
			t.Fatalf("%v, %v", s, err)
		}
		e.resolves(ns, ask, "host", "alias", s.Spec.ClusterIP)
	})
	t.Run("an endpoint that goes is no longer named", func(t *testing.T) {
		if _, err := e.api.DiscoveryV1().EndpointSlices(ns).Create(t.Context(), &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Name: "db-own", Labels: map[string]string{discoveryv1.LabelServiceName: "db"}},
			AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints:   []discoveryv1.Endpoint{{Addresses: []string{"192.0.2.7"}, Hostname: ptr.To("far")}},
			Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To[int32](8080), Protocol: ptr.To(corev1.ProtocolTCP)}},
		}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		e.resolves(ns, ask, "host", "far.db", "192.0.2.7")
		e.ctl("-n", ns, "delete", "endpointslice", "db-own")
		e.resolves(ns, ask, "host", "db", netip.MustParseAddr(ip).String())
	})
}
