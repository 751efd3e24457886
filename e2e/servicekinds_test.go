package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/rest"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/e2e/cluster/clustertest"
	"github.com/clusterd/clusterd/features"
)

// served is what the subtests of TestE2EServiceKinds share: a pod of app=web on each of
// three nodes, of which n1 and n2 are in one zone.
type served struct {
	*env
	ns   string
	pods map[string]*corev1.Pod // by node
	host string                 // the address of the machine that the nodes' segment ends at
}

func (s *served) nodes() (out []string) {
	for _, n := range s.Nodes() {
		out = append(out, n.Name)
	}
	return out
}

func (s *served) names() (out []string) {
	for _, n := range s.nodes() {
		out = append(out, s.pods[n].Name)
	}
	return out
}

// addr is the address with that last number of the nodes' segment.
func (s *served) addr(last int) string {
	a := s.Nodes()[0].Addr.As4()
	return fmt.Sprintf("%d.%d.%d.%d", a[0], a[1], a[2], last)
}

// inPod runs the hello program in the pod of a node.
func (s *served) inPod(node string, args ...string) (string, error) {
	out, errs, code := s.run("clusterctl", "", append([]string{"-n", s.ns, "exec", s.pods[node].Name, "--", "/hello"}, args...)...)
	if code != 0 {
		return "", fmt.Errorf("in %s: %s", s.pods[node].Name, errs)
	}
	return out, nil
}

// ask sends a datagram from a node's network.
func (s *served) ask(node, addr string) (string, error) {
	var conn net.Conn
	if err := s.Do(node, func() (err error) { conn, err = net.Dial("udp", addr); return err }); err != nil {
		return "", err
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(time.Second))
	if _, err := conn.Write([]byte("?")); err != nil {
		return "", err
	}
	b := make([]byte, 512)
	n, err := conn.Read(b)
	return string(b[:n]), err
}

// change patches a Service.
func (s *served) change(name, patch string) {
	s.t.Helper()
	if _, err := s.api.CoreV1().Services(s.ns).Patch(s.t.Context(), name, types.MergePatchType, []byte(patch), metav1.PatchOptions{}); err != nil {
		s.t.Fatal(err)
	}
}

// refusedFrom waits until a node's connections are refused.
func (s *served) refusedFrom(node, url string) {
	s.t.Helper()
	s.eventually(url+" is refused", func(context.Context) error {
		if page, err := s.fetch(node, url); err == nil || !strings.Contains(err.Error(), "refused") {
			return fmt.Errorf("got %q, %w", page, err)
		}
		return nil
	})
}

// lone is a ready pod on a node, for Services of its own.
func (s *served) lone(node, name string, change func(*corev1.Pod)) *corev1.Pod {
	s.t.Helper()
	p := on(node, pod(name))
	if change != nil {
		change(p)
	}
	s.create(s.ns, p)
	return p
}

// balanced waits for the address of a Service of type LoadBalancer.
func (s *served) balanced(name string) string {
	s.t.Helper()
	var vip string
	s.eventually(name+" has an address", func(ctx context.Context) error {
		got, err := s.api.CoreV1().Services(s.ns).Get(ctx, name, metav1.GetOptions{})
		if err != nil || len(got.Status.LoadBalancer.Ingress) != 1 {
			return errors.Join(err, fmt.Errorf("%+v", got.Status))
		}
		vip = got.Status.LoadBalancer.Ingress[0].IP
		return nil
	})
	return vip
}

// TestE2EServiceKinds shows what Services can be asked for beside the plain ones, each with
// real packets.
func TestE2EServiceKinds(t *testing.T) {
	e := start(t)
	s := &served{env: e, ns: e.namespace("kinds"), pods: map[string]*corev1.Pod{}}
	s.host = s.addr(1)
	zones := map[string]string{"n1": "a", "n2": "a", "n3": "b"}
	for node, zone := range zones {
		e.ctl("label", "node", node, corev1.LabelTopologyZone+"="+zone)
		p := on(node, pod("web-"+node))
		p.Labels = map[string]string{"app": "web"}
		p.Spec.Containers[0].Ports = []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}}
		e.create(s.ns, p)
	}
	e.ctl("-n", "kube-system", "create", "configmap", "clusterd-load-balancer", "--from-literal=addresses="+s.addr(200)+"-"+s.addr(210))
	for node := range zones {
		s.pods[node] = e.podReady(s.ns, "web-"+node)
	}
	for _, tt := range []struct {
		name     string
		shows    []int // rows of docs/FEATURES.md
		conforms []int // rows of docs/CONFORMANCE.md
		run      func(*served)
	}{
		{"pods and nodes reach every pod", nil, []int{232, 233, 234, 235}, everyPod},
		{"the API by its name", []int{299}, []int{217}, apiByName},
		{"one port of TCP and of UDP", nil, []int{255}, bothProtocols},
		{"external addresses", nil, nil, externalAddresses},
		{"internalTrafficPolicy Local", nil, nil, internalLocal},
		{"trafficDistribution", nil, nil, distribution},
		{"publishNotReadyAddresses", nil, nil, notReady},
		{"loadBalancerSourceRanges", nil, nil, sourceRanges},
		{"a load balancer with the policy Local", nil, nil, balancedLocal},
		{"an endpoint that ends", nil, nil, ending},
		{"by the API server's proxy", nil, []int{236, 237}, proxied},
		{"port-forward to a Service", nil, nil, forwarded},
		{"bandwidth of a pod", nil, nil, bandwidth},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			features.Shows(t, tt.shows...)
			features.Conforms(t, tt.conforms...)
			mine, own := *s, *s.env
			own.t = t
			mine.env = &own
			tt.run(&mine)
		})
	}
}

func everyPod(s *served) {
	for _, from := range s.nodes() {
		for _, to := range s.nodes() {
			at, want := net.JoinHostPort(s.pods[to].Status.PodIP, "8080"), "I am pod "+s.pods[to].Name+" "
			for how, ask := range map[string]func() (string, error){
				"pod, HTTP":  func() (string, error) { return s.inPod(from, "fetch", "http://"+at+"/") },
				"pod, UDP":   func() (string, error) { return s.inPod(from, "ask", at) },
				"node, HTTP": func() (string, error) { return s.fetch(from, "http://"+at+"/") },
				"node, UDP":  func() (string, error) { return s.ask(from, at) },
			} {
				s.eventually(fmt.Sprintf("%s answers %s (%s)", to, from, how), func(context.Context) error {
					got, err := ask()
					if err == nil && !strings.Contains(got, want) {
						err = fmt.Errorf("got %q, want %q", got, want)
					}
					return err
				})
			}
		}
	}
}

func apiByName(s *served) {
	for _, node := range s.nodes() {
		for _, how := range [][]string{nil, {"tcp"}} {
			for _, name := range []string{"kubernetes.default", "kubernetes.default.svc.cluster.local."} {
				s.eventually(name+" is known", func(context.Context) error {
					got, err := s.inPod(node, append([]string{"lookup", "host", name}, how...)...)
					if err == nil && strings.TrimSpace(got) != "10.96.0.1" {
						err = fmt.Errorf("it is %q", got)
					}
					return err
				})
			}
		}
		s.eventually("the API answers", func(context.Context) error {
			_, err := s.inPod(node, "dial", "kubernetes.default.svc:443")
			return err
		})
	}
}

func bothProtocols(s *served) {
	svc := s.service(s.ns, "both", func(spec *corev1.ServiceSpec) {
		spec.Ports = []corev1.ServicePort{
			{Name: "tcp", Port: 80, TargetPort: intstr.FromInt32(8080)},
			{Name: "udp", Port: 80, TargetPort: intstr.FromInt32(8080), Protocol: corev1.ProtocolUDP},
		}
	})
	url, at := "http://"+svc.Spec.ClusterIP+"/", svc.Spec.ClusterIP+":80"
	s.answers("by TCP", url, s.nodes(), s.names()...)
	for _, node := range s.nodes() {
		s.eventually("all answer by UDP from "+node, func(context.Context) error {
			seen := map[string]bool{}
			for range 60 {
				got, err := s.ask(node, at)
				if err != nil {
					return err
				}
				seen[answerer(got)] = true
			}
			if len(seen) != 3 {
				return fmt.Errorf("%v", seen)
			}
			return nil
		})
		s.eventually("a pod is answered by UDP", func(context.Context) error {
			_, err := s.inPod(node, "ask", at)
			return err
		})
	}
	s.change("both", `{"spec":{"ports":[{"name":"tcp","port":80,"targetPort":8080}]}}`)
	s.eventually("UDP has ended", func(context.Context) error {
		if got, err := s.ask("n1", at); err == nil {
			return errors.New(got)
		}
		return nil
	})
	s.answers("by TCP still", url, s.nodes(), s.names()...)
}

func externalAddresses(s *served) {
	outer := s.addr(240) // no machine has it
	s.service(s.ns, "outer", func(spec *corev1.ServiceSpec) { spec.ExternalIPs = []string{outer} })
	s.answers("by the external address", "http://"+outer+"/", s.nodes(), s.names()...)
	s.eventually("a pod is answered by it", func(context.Context) error {
		_, err := s.inPod("n2", "fetch", "http://"+outer+"/")
		return err
	})
	_, err := s.api.CoreV1().Services(s.ns).Create(s.t.Context(), &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "dns"}, Spec: corev1.ServiceSpec{
		Ports: []corev1.ServicePort{{Port: 53, Protocol: corev1.ProtocolUDP}}, ExternalIPs: []string{"10.96.0.10"},
	}}, metav1.CreateOptions{})
	if !apierrors.IsInvalid(err) {
		s.t.Errorf("a Service takes the address of cluster DNS: %v", err)
	}
}

func internalLocal(s *served) {
	svc := s.service(s.ns, "near", func(spec *corev1.ServiceSpec) {
		spec.InternalTrafficPolicy = ptr.To(corev1.ServiceInternalTrafficPolicyLocal)
	})
	for _, node := range s.nodes() {
		s.answers("the pod of "+node+" alone", "http://"+svc.Spec.ClusterIP+"/", []string{node}, s.pods[node].Name)
	}
}

func distribution(s *served) {
	for value, want := range map[string]map[string][]string{
		corev1.ServiceTrafficDistributionPreferSameZone: {"n1": {"n1", "n2"}, "n2": {"n1", "n2"}, "n3": {"n3"}},
		corev1.ServiceTrafficDistributionPreferSameNode: {"n1": {"n1"}, "n2": {"n2"}, "n3": {"n3"}},
	} {
		svc := s.service(s.ns, strings.ToLower(value), func(spec *corev1.ServiceSpec) { spec.TrafficDistribution = &value })
		for from, to := range want {
			var names []string
			for _, node := range to {
				names = append(names, s.pods[node].Name)
			}
			s.answers(value+" from "+from, "http://"+svc.Spec.ClusterIP+"/", []string{from}, names...)
		}
	}
}

func notReady(s *served) {
	s.lone("n2", "unready", func(p *corev1.Pod) {
		p.Spec.Containers[0].ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{Exec: &corev1.ExecAction{Command: []string{"/hello", "exit", "1"}}}}
	})
	s.podIs(s.ns, "unready", "running and not ready", func(p *corev1.Pod) error {
		if p.Status.Phase != corev1.PodRunning || podReady(p) {
			return errors.New("not yet")
		}
		return nil
	})
	selects := func(publish bool) func(*corev1.ServiceSpec) {
		return func(spec *corev1.ServiceSpec) {
			spec.Selector, spec.PublishNotReadyAddresses = map[string]string{"app": "unready"}, publish
		}
	}
	s.answers("one that is not ready", "http://"+s.service(s.ns, "published", selects(true)).Spec.ClusterIP+"/", []string{"n1", "n2"}, "unready")
	s.refusedFrom("n1", "http://"+s.service(s.ns, "unpublished", selects(false)).Spec.ClusterIP+"/")
}

func sourceRanges(s *served) {
	s.service(s.ns, "ranged", func(spec *corev1.ServiceSpec) {
		// With space around it, which the API lets pass.
		spec.Type, spec.LoadBalancerSourceRanges = corev1.ServiceTypeLoadBalancer, []string{" " + s.host + "/32 "}
	})
	url := "http://" + s.balanced("ranged") + "/"
	let := func(what string, in bool) {
		s.t.Helper()
		s.eventually(what, func(context.Context) error {
			page, err := fromHost(url)
			if in != (err == nil) || in && answerer(page) == "" {
				return fmt.Errorf("got %q, %w", page, err)
			}
			return nil
		})
	}
	let("the host is let in", true)
	s.change("ranged", `{"spec":{"loadBalancerSourceRanges":[" 192.0.2.0/24"]}}`)
	let("the host is kept out", false)
	s.change("ranged", `{"spec":{"loadBalancerSourceRanges":null}}`)
	let("everybody is let in", true)
}

func balancedLocal(s *served) {
	s.lone("n3", "alone", nil)
	s.podReady(s.ns, "alone")
	svc := s.service(s.ns, "alone", func(spec *corev1.ServiceSpec) {
		spec.Selector = map[string]string{"app": "alone"}
		spec.Type, spec.ExternalTrafficPolicy = corev1.ServiceTypeLoadBalancer, corev1.ServiceExternalTrafficPolicyLocal
	})
	vip := s.balanced("alone")
	s.eventually("the pod sees the client's address", func(context.Context) error {
		page, err := fromHost("http://" + vip + "/")
		if err == nil && (answerer(page) != "alone" || !strings.Contains(page, "you come from "+s.host)) {
			err = errors.New(page)
		}
		return err
	})
	s.eventually("the node with the endpoint has the address, for a time", func(ctx context.Context) error {
		for _, node := range s.nodes() {
			out, err := s.Exec(ctx, node, "ip", "-o", "addr").CombinedOutput()
			if err != nil {
				return err
			}
			if has := strings.Contains(string(out), " "+vip+"/32 "); has != (node == "n3") {
				return fmt.Errorf("%s has it: %t", node, has)
			}
			for line := range strings.Lines(string(out)) {
				if strings.Contains(line, " "+vip+"/32 ") && strings.Contains(line, "valid_lft forever") {
					return errors.New(line)
				}
			}
		}
		return nil
	})
	for i, node := range s.nodes() {
		want := http.StatusServiceUnavailable
		if node == "n3" {
			want = http.StatusOK
		}
		url := fmt.Sprintf("http://%s:%d/healthz", s.Nodes()[i].Addr, svc.Spec.HealthCheckNodePort)
		s.eventually(fmt.Sprintf("the health of the Service on %s is %d", node, want), func(ctx context.Context) error {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
			if err != nil {
				return err
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				return err
			}
			_ = resp.Body.Close()
			if resp.StatusCode != want {
				err = errors.New(resp.Status)
			}
			return err
		})
	}
}

func ending(s *served) {
	s.lone("n1", "ends", func(p *corev1.Pod) {
		p.Spec.TerminationGracePeriodSeconds = ptr.To[int64](120)
		p.Spec.Containers[0].Lifecycle = &corev1.Lifecycle{PreStop: &corev1.LifecycleHandler{Exec: &corev1.ExecAction{Command: []string{"/hello", "sleep"}}}}
	})
	s.podReady(s.ns, "ends")
	svc := s.service(s.ns, "ends", func(spec *corev1.ServiceSpec) { spec.Selector = map[string]string{"app": "ends"} })
	url := "http://" + svc.Spec.ClusterIP + "/"
	s.answers("the pod", url, []string{"n2"}, "ends")
	if err := s.api.CoreV1().Pods(s.ns).Delete(s.t.Context(), "ends", metav1.DeleteOptions{}); err != nil {
		s.t.Fatal(err)
	}
	s.eventually("its endpoint ends", func(ctx context.Context) error {
		list, err := s.api.DiscoveryV1().EndpointSlices(s.ns).List(ctx, metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=ends"})
		if err != nil {
			return err
		}
		for _, slice := range list.Items {
			for _, e := range slice.Endpoints {
				if ptr.Deref(e.Conditions.Terminating, false) && ptr.Deref(e.Conditions.Serving, false) && !ptr.Deref(e.Conditions.Ready, true) {
					return nil
				}
			}
		}
		return fmt.Errorf("%+v", list.Items)
	})
	s.eventually("the last endpoint answers while it ends", func(context.Context) error {
		for range 10 {
			if page, err := s.fetch("n2", url); err != nil || answerer(page) != "ends" {
				return fmt.Errorf("%q, %v", page, err)
			}
		}
		return nil
	})
	if err := s.api.CoreV1().Pods(s.ns).Delete(s.t.Context(), "ends", metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}); err != nil && !apierrors.IsNotFound(err) {
		s.t.Fatal(err)
	}
	s.refusedFrom("n2", url)
}

func proxied(s *served) {
	s.service(s.ns, "proxied", func(spec *corev1.ServiceSpec) {
		spec.Ports = []corev1.ServicePort{{Name: "web", Port: 80, TargetPort: intstr.FromString("http")}}
	})
	base := "/api/v1/namespaces/" + s.ns
	client := s.api.CoreV1().RESTClient()
	s.answers("its endpoints", "http://"+s.clusterIP("proxied")+"/", []string{"n1"}, s.names()...)
	for _, at := range []string{
		"/services/proxied/proxy", "/services/proxied:80/proxy", "/services/proxied:web/proxy", "/services/http:proxied:web/proxy",
		"/pods/web-n2:8080/proxy", "/pods/http:web-n3:8080/proxy",
	} {
		s.eventually(at+" answers", func(ctx context.Context) error {
			page, err := client.Get().AbsPath(base + at + "/").DoRaw(ctx)
			if err == nil && !slices.Contains(s.names(), answerer(string(page))) {
				err = errors.New(string(page))
			}
			return err
		})
		for _, method := range []string{http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete} {
			s.passes(method, base+at+"/method/")
			s.passes(method, base+at+"/method/some/path")
		}
	}
}

func (s *served) clusterIP(name string) string {
	s.t.Helper()
	svc, err := s.api.CoreV1().Services(s.ns).Get(s.t.Context(), name, metav1.GetOptions{})
	if err != nil {
		s.t.Fatal(err)
	}
	return svc.Spec.ClusterIP
}

// passes sends a request by the API server's proxy to the program's /method.
func (s *served) passes(method, path string) {
	s.t.Helper()
	client, err := rest.HTTPClientFor(s.config)
	if err != nil {
		s.t.Fatal(err)
	}
	s.eventually(method+" "+path, func(ctx context.Context) error {
		req, err := http.NewRequestWithContext(ctx, method, s.config.Host+path, nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err != nil {
			return err
		}
		defer func() { _ = resp.Body.Close() }()
		b, err := io.ReadAll(resp.Body)
		_, inner, _ := strings.Cut(path, "/proxy")
		if err != nil || resp.StatusCode >= http.StatusInternalServerError { // the pod was not reached in time
			return fmt.Errorf("%s %q, %v", resp.Status, b, err)
		}
		if want := method + " " + inner + "\n"; resp.StatusCode != http.StatusOK || resp.Header.Get("X-Method") != method || method != http.MethodHead && string(b) != want {
			s.t.Errorf("%s %s: %s %q, want %q", method, path, resp.Status, b, want)
		}
		return nil
	})
}

func forwarded(s *served) {
	s.service(s.ns, "forwarded", nil)
	url, end := s.forward(s.ns, "svc/forwarded", ":80")
	defer end()
	s.eventually("a pod answers by the forwarded port", func(context.Context) error {
		page, err := fromHost(url)
		if err != nil || !slices.Contains(s.names(), answerer(page)) {
			return fmt.Errorf("%q, %w", page, err)
		}
		return nil
	})
}

func bandwidth(s *served) {
	s.lone("n3", "bounded", func(p *corev1.Pod) {
		p.Annotations = map[string]string{"kubernetes.io/ingress-bandwidth": "7M", "kubernetes.io/egress-bandwidth": "9M"}
	})
	s.podReady(s.ns, "bounded")
	s.eventually("one of the node's interfaces sends no more than 875000 bytes a second", func(context.Context) error {
		return s.Do("n3", func() error {
			links, err := clustertest.Dump(netlink.LinkList)
			if err != nil {
				return err
			}
			var rates []uint64
			for _, link := range links {
				queues, err := clustertest.Dump(func() ([]netlink.Qdisc, error) { return netlink.QdiscList(link) })
				if err != nil {
					return err // it may be another pod's, which has ended
				}
				for _, q := range queues {
					if tbf, ok := q.(*netlink.Tbf); ok {
						rates = append(rates, tbf.Rate)
					}
				}
			}
			if !slices.Contains(rates, 7_000_000/8) {
				return fmt.Errorf("bounds are %v", rates)
			}
			return nil
		})
	})
}
