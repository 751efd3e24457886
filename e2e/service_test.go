package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/util/retry"

	"github.com/clusterd/clusterd/features"
	"github.com/clusterd/clusterd/netsetup/lb"
	"github.com/clusterd/clusterd/netsetup/nft"
)

// fetch gets a page from a node's network, over a connection of its own.
func (e *env) fetch(node, url string) (string, error) {
	t := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, network, addr string) (conn net.Conn, err error) {
		err = e.Do(node, func() (err error) {
			conn, err = (&net.Dialer{}).DialContext(ctx, network, addr)
			return err
		})
		return conn, err
	}}
	resp, err := (&http.Client{Timeout: 5 * time.Second, Transport: t}).Get(url)
	if err != nil {
		return "", err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err == nil && resp.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", resp.Status, b)
	}
	return string(b), err
}

// answerer is the pod that made a page.
func answerer(page string) string {
	_, after, _ := strings.Cut(page, "I am pod ")
	name, _, _ := strings.Cut(after, " ")
	return name
}

func (e *env) service(ns, name string, change func(*corev1.ServiceSpec)) *corev1.Service {
	e.t.Helper()
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: corev1.ServiceSpec{
		Selector: map[string]string{"app": "web"}, Ports: []corev1.ServicePort{{Port: 80, TargetPort: intstr.FromInt32(8080)}},
	}}
	if change != nil {
		change(&s.Spec)
	}
	all := e.api.CoreV1().Services(ns)
	return made(e, func(ctx context.Context) (*corev1.Service, error) { return all.Create(ctx, s, metav1.CreateOptions{}) },
		func(ctx context.Context) (*corev1.Service, error) { return all.Get(ctx, name, metav1.GetOptions{}) })
}

// answers waits until exactly these pods answer from each of the nodes.
func (e *env) answers(what, url string, nodes []string, pods ...string) {
	e.t.Helper()
	e.eventually(what, func(context.Context) error {
		for _, node := range nodes {
			seen := map[string]int{}
			for range 12 * len(pods) {
				page, err := e.fetch(node, url)
				if err != nil {
					return fmt.Errorf("from %s: %w", node, err)
				}
				seen[answerer(page)]++
			}
			for _, p := range pods {
				if seen[p] == 0 {
					return fmt.Errorf("from %s: %s did not answer: %v", node, p, seen)
				}
			}
			if len(seen) != len(pods) {
				return fmt.Errorf("from %s: %v answered, want %v alone", node, seen, pods)
			}
		}
		return nil
	})
}

// TestE2EService sends real connections by Services through a cluster.
func TestE2EService(t *testing.T) {
	e := start(t)
	ns := e.namespace("svc")
	e.createDeployment(ns, deployment("web", 3))
	pods := e.podsReady(ns, "app=web", 3)
	var names, nodes []string
	where := map[string]string{}
	for _, p := range pods {
		names, where[p.Spec.NodeName] = append(names, p.Name), p.Name
	}
	for _, n := range e.Nodes() {
		nodes = append(nodes, n.Name)
	}
	web := e.service(ns, "web", nil)
	url := "http://" + web.Spec.ClusterIP + "/"
	t.Run("every node and pod reaches every endpoint", func(t *testing.T) {
		features.Shows(t, 296, 297)
		e.answers("all pods answer by the cluster address", url, nodes, names...)
		for _, p := range pods { // itself among them
			seen := map[string]bool{}
			for i := 0; i < 30 && len(seen) < 3; i++ {
				if page := e.hello(ns, p.Name, "fetch", url); page != "" {
					seen[answerer(page)] = true
				}
			}
			if len(seen) != 3 {
				t.Errorf("from %s only %v answered", p.Name, seen)
			}
		}
	})
	t.Run("the API's own Service", func(t *testing.T) {
		features.Conforms(t, 211, 251)
		for _, p := range pods {
			mustContain(t, "environment", e.ctl("-n", ns, "exec", p.Name, "--", "/hello", "env"), "KUBERNETES_SERVICE_HOST=10.96.0.1", "KUBERNETES_SERVICE_PORT=443")
			e.eventually("the API answers "+p.Name, func(context.Context) error {
				_, errs, code := e.run("clusterctl", "", "-n", ns, "exec", p.Name, "--", "/hello", "dial", "10.96.0.1:443")
				if code != 0 {
					return errors.New(errs)
				}
				return nil
			})
		}
		e.eventually("three servers are behind it", func(ctx context.Context) error {
			s, err := e.api.DiscoveryV1().EndpointSlices("default").Get(ctx, "kubernetes", metav1.GetOptions{})
			if err == nil && len(s.Endpoints) != 3 {
				err = fmt.Errorf("%+v", s.Endpoints)
			}
			return err
		})
	})
	t.Run("no endpoints: refused at once", func(t *testing.T) {
		empty := e.service(ns, "empty", func(s *corev1.ServiceSpec) { s.Selector = map[string]string{"app": "absent"} })
		e.eventually("a refusal", func(context.Context) error {
			_, err := e.fetch("n2", "http://"+empty.Spec.ClusterIP+"/")
			if err == nil || !strings.Contains(err.Error(), "refused") {
				return fmt.Errorf("got %w", err)
			}
			return nil
		})
	})
	t.Run("affinity", func(t *testing.T) {
		features.Conforms(t, 248, 253)
		s := e.service(ns, "sticky", func(s *corev1.ServiceSpec) { s.SessionAffinity = corev1.ServiceAffinityClientIP })
		e.eventually("one pod answers a client always", func(context.Context) error {
			seen := map[string]int{}
			for range 20 {
				page, err := e.fetch("n1", "http://"+s.Spec.ClusterIP+"/")
				if err != nil {
					return err
				}
				seen[answerer(page)]++
			}
			if len(seen) != 1 {
				return fmt.Errorf("%v", seen)
			}
			return nil
		})
		e.must(retry.RetryOnConflict(retry.DefaultBackoff, func() error { // a controller may write between
			s, err := e.api.CoreV1().Services(ns).Get(t.Context(), s.Name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			s.Spec.SessionAffinity, s.Spec.SessionAffinityConfig = corev1.ServiceAffinityNone, nil
			_, err = e.api.CoreV1().Services(ns).Update(t.Context(), s, metav1.UpdateOptions{})
			return err
		}))
		e.answers("all answer after affinity ended", "http://"+s.Spec.ClusterIP+"/", []string{"n1"}, names...)
	})
	t.Run("node ports, and the client's address", func(t *testing.T) {
		features.Conforms(t, 246)
		np := e.service(ns, "np", func(s *corev1.ServiceSpec) { s.Type = corev1.ServiceTypeNodePort })
		for _, n := range e.Nodes() {
			e.answers("a node port of "+n.Name, fmt.Sprintf("http://%s:%d/", n.Addr, np.Spec.Ports[0].NodePort), []string{"n1"}, names...)
		}
		local := e.service(ns, "local", func(s *corev1.ServiceSpec) {
			s.Type, s.ExternalTrafficPolicy = corev1.ServiceTypeNodePort, corev1.ServiceExternalTrafficPolicyLocal
		})
		from, to := e.Nodes()[0], e.Nodes()[1]
		e.eventually("the near pod with the client's address", func(context.Context) error {
			for range 6 {
				page, err := e.fetch(from.Name, fmt.Sprintf("http://%s:%d/", to.Addr, local.Spec.Ports[0].NodePort))
				if err != nil {
					return err
				}
				if answerer(page) != where[to.Name] || !strings.Contains(page, "you come from "+from.Addr.String()) {
					return errors.New(page)
				}
			}
			return nil
		})
	})
	t.Run("a load balancer's address, on one node", func(t *testing.T) {
		first := e.Nodes()[0].Addr.As4()
		net24 := fmt.Sprintf("%d.%d.%d.", first[0], first[1], first[2])
		vip := net24 + "250"
		e.ctl("-n", "kube-system", "create", "configmap", "clusterd-load-balancer", "--from-literal=addresses="+vip+"-"+net24+"251")
		balanced := e.service(ns, "lb", func(s *corev1.ServiceSpec) { s.Type = corev1.ServiceTypeLoadBalancer })
		e.eventually("its status", func(ctx context.Context) error {
			s, err := e.api.CoreV1().Services(ns).Get(ctx, balanced.Name, metav1.GetOptions{})
			if err == nil && (len(s.Status.LoadBalancer.Ingress) != 1 || s.Status.LoadBalancer.Ingress[0].IP != vip) {
				err = fmt.Errorf("%+v", s.Status)
			}
			return err
		})
		e.answers("all pods by it", "http://"+vip+"/", nodes, names...)
		// Nodes translate it by themselves: who has it tells the address list.
		e.eventually("one node has it", func(ctx context.Context) error {
			var has []string
			for _, n := range nodes {
				out, err := e.Exec(ctx, n, "ip", "-o", "addr").CombinedOutput()
				if err != nil {
					return err
				}
				if strings.Contains(string(out), " "+vip+"/32 ") {
					has = append(has, n)
				}
			}
			if len(has) != 1 {
				return fmt.Errorf("%v have it", has)
			}
			return nil
		})
	})
	t.Run("ingress", func(t *testing.T) {
		first := e.Nodes()[0].Addr.As4()
		ingress(t, e, fmt.Sprintf("%d.%d.%d.251", first[0], first[1], first[2]))
		t.Run("gateway", func(t *testing.T) {
			mine := *e
			mine.t = t
			gateways(t, &mine, fmt.Sprintf("%d.%d.%d.251", first[0], first[1], first[2]))
		})
	})
	t.Run("rules that were deleted come back", func(t *testing.T) {
		e.ctl("-n", ns, "get", "pods") // the cluster answers before
		if err := e.Do("n2", func() error {
			tables, err := nft.OpenTables()
			if err != nil {
				return err
			}
			return errors.Join(tables.Delete(nft.Table{Name: lb.TableName}), tables.Close())
		}); err != nil {
			t.Fatal(err)
		}
		e.answers("all again", url, []string{"n2"}, names...)
	})
	t.Run("clusterd is killed under open connections", func(t *testing.T) {
		var conn net.Conn
		if err := e.Do("n3", func() (err error) { conn, err = net.Dial("tcp", web.Spec.ClusterIP+":80"); return err }); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		if err := e.Kill("n3"); err != nil {
			t.Fatal(err)
		}
		e.eventually("a new connection while clusterd is away", func(context.Context) error { _, err := e.fetch("n3", url); return err })
		if err := e.Start(t.Context(), "n3"); err != nil {
			t.Fatal(err)
		}
		e.eventually("n3 is Ready", func(ctx context.Context) error {
			n, err := e.api.CoreV1().Nodes().Get(ctx, "n3", metav1.GetOptions{})
			if err == nil && !nodeReady(n) {
				err = errors.New("not Ready")
			}
			return err
		})
		_ = conn.SetDeadline(time.Now().Add(testTimeout))
		if _, err := fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: web\r\nConnection: close\r\n\r\n"); err != nil {
			t.Error(err)
		}
		b, err := io.ReadAll(conn)
		if err != nil || !strings.Contains(string(b), "I am pod ") {
			t.Errorf("the old connection: %v %q", err, b)
		}
		e.answers("all by n3", url, []string{"n3"}, names...)
	})
	t.Run("a node dies: its endpoints are left out", func(t *testing.T) {
		lost := e.other(e.leader(), "n1")
		if err := e.PowerOff(lost); err != nil {
			t.Fatal(err)
		}
		var left, living []string
		for _, p := range pods {
			if p.Spec.NodeName != lost {
				left = append(left, p.Name)
			}
		}
		for _, n := range nodes {
			if n != lost {
				living = append(living, n)
			}
		}
		e.answers("the others alone", url, living, left...)
		e.eventually("two API servers", func(ctx context.Context) error {
			s, err := e.api.DiscoveryV1().EndpointSlices("default").Get(ctx, "kubernetes", metav1.GetOptions{})
			if err == nil && len(s.Endpoints) != 2 {
				err = fmt.Errorf("%+v", s.Endpoints)
			}
			return err
		})
		for _, p := range pods {
			if p.Spec.NodeName != lost {
				for _, api := range []string{"10.96.0.1:443", "kubernetes.default.svc.cluster.local:443", "kubernetes.default:443"} {
					e.reaches(true, ns, p.Name, api) // its node may still be about to leave the lost one out
				}
			}
		}
	})
}
