package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/e2e/cluster"
)

// TestE2ETwoFamilies begins a cluster with ranges of both IP families. Two machines
// have addresses of both, so that they reach each other's pods by host routes; the
// third one has IPv4 alone, and its pods' IPv6 goes through the tunnel.
func TestE2ETwoFamilies(t *testing.T) {
	e := startBare(t, 1, func(c *cluster.Config) {
		c.Agents, c.Only4, c.Subnet6 = 2, 1, netip.MustParsePrefix("fd00:90::/64")
		c.InitArgs = []string{"--cluster-cidr", "10.244.0.0/14,fd00:10:244::/48", "--service-cidr", "10.96.0.0/16,fd00:10:96::/112"}
	})
	e.ready(3)
	server, both, four := e.Nodes()[0], e.Nodes()[1], e.Nodes()[2]
	for _, n := range e.Nodes() {
		node, err := e.api.CoreV1().Nodes().Get(t.Context(), n.Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if p := node.Spec.PodCIDRs; len(p) != 2 || !strings.HasPrefix(p[1], "fd00:10:244:") || p[0] != node.Spec.PodCIDR {
			t.Errorf("%s has the pod ranges %v", n.Name, p)
		}
		var own []string
		for _, a := range node.Status.Addresses {
			if a.Type == corev1.NodeInternalIP {
				own = append(own, a.Address)
			}
		}
		want := []string{n.Addr.String()}
		if n.Addr6.IsValid() {
			want = append(want, n.Addr6.String())
		}
		if !slices.Equal(own, want) {
			t.Errorf("%s has the addresses %v, want %v", n.Name, own, want)
		}
	}

	ns := e.namespace("families")
	web := on(both.Name, pod("web"))
	web.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 8080, HostPort: 8081}}
	e.create(ns, web)
	e.create(ns, on(server.Name, pod("near", "sleep")))
	far := on(four.Name, pod("far", "sleep"))
	for name, path := range map[string]string{"IPS": "status.podIPs", "HOSTS": "status.hostIPs"} {
		far.Spec.Containers[0].Env = append(far.Spec.Containers[0].Env, corev1.EnvVar{Name: name, ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{FieldPath: path}}})
	}
	e.create(ns, far)
	addrs := map[string][2]string{}
	for _, name := range []string{"web", "near", "far"} {
		st := e.podReady(ns, name).Status
		if len(st.PodIPs) != 2 || st.PodIP != st.PodIPs[0].IP || !netip.MustParseAddr(st.PodIPs[1].IP).Is6() {
			t.Fatalf("%s has the addresses %v", name, st.PodIPs)
		}
		addrs[name] = [2]string{st.PodIPs[0].IP, st.PodIPs[1].IP}
		if want := map[string]int{"web": 2, "near": 2, "far": 1}[name]; len(st.HostIPs) != want {
			t.Errorf("%s is on a machine with the addresses %v, want %d", name, st.HostIPs, want)
		}
	}
	env := e.ctl("-n", ns, "exec", "far", "--", "/hello", "env")
	mustContain(t, "the environment", env, "IPS="+addrs["far"][0]+","+addrs["far"][1]+"\n", "HOSTS="+four.Addr.String()+"\n")

	// From pod to pod both see the other's own address.
	sees := func(from, url, source string) {
		t.Helper()
		e.eventually(from+" is answered at "+url, func(context.Context) error {
			out, errs, code := e.run("clusterctl", "", "-n", ns, "exec", from, "--", "/hello", "fetch", url)
			switch {
			case code != 0:
				return errors.New(errs)
			case answerer(out) != "web" || source != "" && !strings.Contains(out, "; you come from "+source+"\n"):
				return fmt.Errorf("the answer: %s", out)
			}
			return nil
		})
	}
	for i, host := range addrs["web"] {
		for _, from := range []string{"near", "far"} {
			sees(from, "http://"+net.JoinHostPort(host, "8080")+"/", addrs[from][i])
		}
	}
	sees("near", "http://["+both.Addr6.String()+"]:8081/", "") // its hostPort
	e.answers("the host port by IPv6", "http://["+both.Addr6.String()+"]:8081/", []string{server.Name, both.Name}, "web")

	t.Run("services", func(t *testing.T) { familiesOfServices(t, e, ns, sees) })
	t.Run("policies", func(t *testing.T) {
		to := [2]string{addrs["web"][0] + ":8080", "[" + addrs["web"][1] + "]:8080"}
		e.ctlIn("apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p, namespace: "+ns+"}\nspec: {podSelector: {matchLabels: {app: web}}, ingress: [{from: [{ipBlock: {cidr: \"fd00:10:244::/48\", except: ["+
			addrs["far"][1]+"/128]}}], ports: [{port: 8080}]}]}", "apply", "-f", "-")
		e.reaches(false, ns, "near", to[0])
		e.reaches(true, ns, "near", to[1])
		e.reaches(false, ns, "far", to[1])
		e.ctlIn("apiVersion: networking.k8s.io/v1\nkind: NetworkPolicy\nmetadata: {name: p, namespace: "+ns+"}\nspec: {podSelector: {matchLabels: {app: web}}, ingress: [{from: [{podSelector: {matchLabels: {app: far}}}]}]}", "apply", "-f", "-")
		for _, addr := range to {
			e.reaches(true, ns, "far", addr)
			e.reaches(false, ns, "near", addr)
		}
		e.ctl("-n", ns, "delete", "networkpolicy", "p")
		e.reaches(true, ns, "near", to[1])
	})
}

func familiesOfServices(t *testing.T, e *env, ns string, sees func(from, url, source string)) {
	services := e.api.CoreV1().Services(ns)
	nodes := []string{e.Nodes()[0].Name, e.Nodes()[2].Name}
	is := func(s *corev1.Service, policy corev1.IPFamilyPolicy, families ...corev1.IPFamily) {
		t.Helper()
		ok := *s.Spec.IPFamilyPolicy == policy && slices.Equal(s.Spec.IPFamilies, families) && len(s.Spec.ClusterIPs) == len(families) && s.Spec.ClusterIP == s.Spec.ClusterIPs[0]
		for i, ip := range s.Spec.ClusterIPs {
			ok = ok && netip.MustParseAddr(ip).Is4() == (families[i] == corev1.IPv4Protocol)
		}
		if !ok {
			t.Fatalf("%s: %v %v %v, want %s %v", s.Name, *s.Spec.IPFamilyPolicy, s.Spec.IPFamilies, s.Spec.ClusterIPs, policy, families)
		}
	}
	const v4, v6 = corev1.IPv4Protocol, corev1.IPv6Protocol
	dual := e.service(ns, "dual", func(s *corev1.ServiceSpec) {
		s.Type, s.IPFamilyPolicy = corev1.ServiceTypeNodePort, ptr.To(corev1.IPFamilyPolicyRequireDualStack)
	})
	is(dual, corev1.IPFamilyPolicyRequireDualStack, v4, v6)
	only6 := e.service(ns, "six", func(s *corev1.ServiceSpec) { s.IPFamilies = []corev1.IPFamily{v6} })
	is(only6, corev1.IPFamilyPolicySingleStack, v6)
	plain := e.service(ns, "plain", nil)
	is(plain, corev1.IPFamilyPolicySingleStack, v4)
	e.service(ns, "headless", func(s *corev1.ServiceSpec) {
		s.ClusterIP, s.IPFamilyPolicy = "None", ptr.To(corev1.IPFamilyPolicyPreferDualStack)
	})
	e.eventually("endpoints of both families", func(ctx context.Context) error {
		list, err := e.api.DiscoveryV1().EndpointSlices(ns).List(ctx, metav1.ListOptions{LabelSelector: discoveryv1.LabelServiceName + "=dual"})
		if err != nil {
			return err
		}
		kinds := map[discoveryv1.AddressType]int{}
		for _, s := range list.Items {
			kinds[s.AddressType] += len(s.Endpoints)
		}
		if kinds[discoveryv1.AddressTypeIPv4] != 1 || kinds[discoveryv1.AddressTypeIPv6] != 1 {
			return fmt.Errorf("endpoints: %v", kinds)
		}
		return nil
	})
	for _, ip := range append(slices.Clone(dual.Spec.ClusterIPs), only6.Spec.ClusterIP) {
		for _, from := range []string{"near", "far"} {
			sees(from, "http://"+net.JoinHostPort(ip, "80")+"/", "")
		}
		e.answers("from nodes by "+ip, "http://"+net.JoinHostPort(ip, "80")+"/", nodes, "web")
	}
	port := strconv.Itoa(int(dual.Spec.Ports[0].NodePort))
	for _, host := range []string{e.Nodes()[0].Addr6.String(), e.Nodes()[1].Addr6.String(), e.Nodes()[2].Addr.String()} {
		e.answers("by the node port at "+host, "http://"+net.JoinHostPort(host, port)+"/", nodes[:1], "web")
	}

	// Names.
	e.resolves(ns, "far", "host", "dual", dual.Spec.ClusterIPs[0]+" "+dual.Spec.ClusterIPs[1])
	e.resolves(ns, "near", "host", "six", only6.Spec.ClusterIP)
	e.resolves(ns, "near", "addr", only6.Spec.ClusterIP, "six."+ns+".svc.cluster.local.")
	pod := e.get(ns, "web").Status
	e.resolves(ns, "far", "host", "headless", pod.PodIPs[0].IP+" "+pod.PodIPs[1].IP)
	dns, err := e.api.CoreV1().Services("kube-system").Get(t.Context(), "kube-dns", metav1.GetOptions{})
	if err != nil || len(dns.Spec.ClusterIPs) != 2 {
		t.Fatalf("kube-dns: %v %v", dns.Spec.ClusterIPs, err)
	}
	e.eventually("the name server answers at "+dns.Spec.ClusterIPs[1], func(ctx context.Context) error {
		r := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (conn net.Conn, err error) {
			err = e.Do(nodes[1], func() (err error) {
				conn, err = (&net.Dialer{}).DialContext(ctx, network, net.JoinHostPort(dns.Spec.ClusterIPs[1], "53"))
				return err
			})
			return conn, err
		}}
		got, err := r.LookupHost(ctx, "six."+ns+".svc.cluster.local.")
		if err == nil && !slices.Equal(got, []string{only6.Spec.ClusterIP}) {
			err = fmt.Errorf("it says %v", got)
		}
		return err
	})

	// A second address comes and goes; the first one stays.
	patch := func(spec map[string]any) (*corev1.Service, error) {
		b, err := json.Marshal(map[string]any{"spec": spec})
		if err != nil {
			t.Fatal(err)
		}
		return services.Patch(t.Context(), "plain", types.MergePatchType, b, metav1.PatchOptions{})
	}
	wider, err := patch(map[string]any{"ipFamilyPolicy": "PreferDualStack"})
	if err != nil {
		t.Fatal(err)
	}
	is(wider, corev1.IPFamilyPolicyPreferDualStack, v4, v6)
	sees("near", "http://["+wider.Spec.ClusterIPs[1]+"]/", "")
	narrow, err := patch(map[string]any{"ipFamilyPolicy": "SingleStack"})
	if err != nil {
		t.Fatal(err)
	}
	is(narrow, corev1.IPFamilyPolicySingleStack, v4)
	again := e.service(ns, "again", func(s *corev1.ServiceSpec) { s.ClusterIP = wider.Spec.ClusterIPs[1] })
	is(again, corev1.IPFamilyPolicySingleStack, v6)
	if _, err := patch(map[string]any{"ipFamilies": []string{"IPv6"}}); err == nil || !strings.Contains(err.Error(), "spec.ipFamilies[0]") && !strings.Contains(err.Error(), "spec.clusterIPs[0]") {
		t.Errorf("another first family: %v", err)
	}
	cidr, err := e.api.NetworkingV1().ServiceCIDRs().Get(t.Context(), "kubernetes", metav1.GetOptions{})
	if err != nil || len(cidr.Spec.CIDRs) != 2 {
		t.Errorf("the ServiceCIDR of the cluster: %v %v", cidr.Spec.CIDRs, err)
	}
}
