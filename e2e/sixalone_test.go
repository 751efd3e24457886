package e2e

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/netsetup/overlay"
)

// segment6 is segment for machines with addresses of IPv6 alone.
func segment6() netip.Prefix {
	n, _ := strconv.Atoi(lane)
	return netip.MustParsePrefix(fmt.Sprintf("fd90:0:0:%x::/64", 2*n))
}

// ownPod is the pod of a machine in TestE2ESixAlone.
func ownPod(node string) string { return "web-" + node }

// sixAlone is a cluster whose machines have no address of IPv4, and its pods.
type sixAlone struct {
	*env
	t     *testing.T
	ns    string
	nodes []string
	pods  []string          // one of each node
	addrs map[string]string // by pod
	web   *corev1.Service   // all pods
}

// TestE2ESixAlone: three servers and, behind a router, an agent, whose machines have no
// address of IPv4 but on the loopback, form a cluster without a setting. What is asked of
// any cluster works there, also after the loss of machines.
func TestE2ESixAlone(t *testing.T) {
	e := startBare(t, 3, func(c *cluster.Config) { c.Agents, c.Far, c.Subnet = 1, 1, segment6() })
	s := &sixAlone{env: e, t: t, ns: "six", addrs: map[string]string{}}
	for _, n := range e.Nodes() {
		out, err := e.Exec(t.Context(), n.Name, "ip", "-4", "-o", "addr").Output()
		if err != nil || strings.Count(string(out), "\n") != 1 || !strings.Contains(string(out), " lo ") {
			t.Fatalf("%s has addresses of IPv4: %s (%v)", n.Name, out, err)
		}
		s.nodes, s.pods = append(s.nodes, n.Name), append(s.pods, ownPod(n.Name))
	}
	e.ready(4)
	e.namespace(s.ns)
	for _, n := range s.nodes {
		p := on(n, pod(ownPod(n)))
		p.Labels = map[string]string{"app": "web", "pod": p.Name}
		p.Spec.Containers[0].ReadinessProbe = &corev1.Probe{ProbeHandler: corev1.ProbeHandler{HTTPGet: &corev1.HTTPGetAction{Path: "/healthz", Port: intstr.FromInt32(8080)}}, PeriodSeconds: 1}
		if n == "a1" {
			p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: 8080, HostPort: 8081}}
		}
		e.create(s.ns, p)
	}
	s.web = e.service(s.ns, "web", func(s *corev1.ServiceSpec) { s.Type = corev1.ServiceTypeNodePort })
	s.ranges()
	for _, p := range s.pods {
		s.addrs[p] = e.podReady(s.ns, p).Status.PodIP
	}
	for _, part := range []struct {
		what string
		do   func(*sixAlone)
	}{
		{"services", (*sixAlone).services},
		{"names", (*sixAlone).names},
		{"policies", (*sixAlone).policies},
		{"streams", (*sixAlone).streams},
		{"the other family is refused", (*sixAlone).refuses},
		{"an agent is lost", (*sixAlone).agentLost},
		{"the leader is lost", (*sixAlone).leaderLost},
		{"an Ingress", (*sixAlone).ingress},
	} {
		if !t.Run(part.what, func(t *testing.T) {
			mine := *s.env
			mine.t = t
			one := *s
			one.env, one.t = &mine, t
			part.do(&one)
		}) {
			return // what comes next stands on it
		}
	}
}

// ranges looks at what was chosen.
func (s *sixAlone) ranges() {
	first := s.Nodes()[0]
	out, err := os.ReadFile(filepath.Join(filepath.Dir(first.Data), first.Name+".out"))
	if err != nil {
		s.t.Fatal(err)
	}
	mustContain(s.t, "what init says", string(out), "# Addresses of pods: fd00:10:244::/48, of Services: fd00:10:96::/112; this node's: "+first.Addr.String()+"\n",
		"\nclusterd join '["+first.Addr.String()+"]:6443' --token ")
	if want := "https://[" + first.Addr.String() + "]:6443"; s.config.Host != want {
		s.t.Errorf("the kubeconfig leads to %s, want %s", s.config.Host, want)
	}
	for _, n := range s.Nodes() {
		node, err := s.api.CoreV1().Nodes().Get(s.t.Context(), n.Name, metav1.GetOptions{})
		if err != nil {
			s.t.Fatal(err)
		}
		if p := node.Spec.PodCIDRs; len(p) != 1 || !strings.HasPrefix(p[0], "fd00:10:244:") || p[0] != node.Spec.PodCIDR {
			s.t.Errorf("%s has the pod ranges %v", n.Name, p)
		}
		var own []string
		for _, a := range node.Status.Addresses {
			if a.Type == corev1.NodeInternalIP {
				own = append(own, a.Address)
			}
		}
		if !slices.Equal(own, []string{n.Addr.String()}) {
			s.t.Errorf("%s has the addresses %v, want %s", n.Name, own, n.Addr)
		}
	}
}

// exec runs the hello program in a pod until it does what is wanted.
func (s *sixAlone) exec(pod string, is func(out string) error, args ...string) {
	s.t.Helper()
	s.eventually(fmt.Sprintf("%q in %s", args, pod), func(context.Context) error {
		out, errs, code := s.run("clusterctl", "", append([]string{"-n", s.ns, "exec", pod, "--", "/hello"}, args...)...)
		if code != 0 {
			return errors.New(errs)
		}
		return is(out)
	})
}

func (s *sixAlone) services() {
	// From pod to pod, over the host route and over the tunnel, both see the other's own
	// address.
	for _, way := range [][2]string{{"web-n1", "web-n2"}, {"web-a1", "web-n3"}} {
		s.exec(way[0], func(out string) error {
			if answerer(out) != way[1] || !strings.Contains(out, "; you come from "+s.addrs[way[0]]+"\n") {
				return errors.New(out)
			}
			return nil
		}, "fetch", "http://["+s.addrs[way[1]]+"]:8080/")
	}
	s.must(s.Do("n1", func() error {
		link, err := netlink.LinkByName(overlay.DefaultTunnel)
		if err == nil && link.Attrs().Statistics.TxPackets == 0 {
			err = errors.New("nothing went through the tunnel to the agent")
		}
		return err
	}))
	for _, p := range []string{"web-n1", "web-a1"} {
		s.exec(p, func(out string) error {
			if !slices.Contains(s.pods, answerer(out)) {
				return errors.New(out)
			}
			return nil
		}, "fetch", "http://web/")
	}
	s.answers("all pods by the Service's address", "http://["+s.web.Spec.ClusterIP+"]/", []string{"n1", "a1"}, s.pods...)
	port := strconv.Itoa(int(s.web.Spec.Ports[0].NodePort))
	for _, n := range []cluster.Node{s.Nodes()[1], s.Nodes()[3]} {
		s.answers("all pods by a port of "+n.Name, "http://"+net.JoinHostPort(n.Addr.String(), port)+"/", []string{"n1"}, s.pods...)
	}
	s.answers("the host port", "http://"+net.JoinHostPort(s.Nodes()[3].Addr.String(), "8081")+"/", []string{"n1"}, "web-a1")
	s.exec("web-a1", func(out string) error {
		if !strings.Contains(out, `"kind":"Status"`) && !strings.Contains(out, "v1.") {
			return errors.New(out)
		}
		return nil
	}, "api", "/version")
	// The world sees the node's address.
	host := segment6().Addr().Next().String()
	l, err := net.Listen("tcp", net.JoinHostPort(host, "0"))
	if err != nil {
		s.t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.RemoteAddr) })}
	go func() { _ = srv.Serve(l) }() // until it is closed
	defer func() { _ = srv.Close() }()
	for _, n := range s.Nodes()[2:] {
		s.exec(ownPod(n.Name), func(out string) error {
			if from, err := netip.ParseAddrPort(strings.TrimSpace(out)); err != nil || from.Addr() != n.Addr {
				return fmt.Errorf("the world sees %q, want %s", out, n.Addr)
			}
			return nil
		}, "fetch", "http://"+l.Addr().String()+"/")
	}
}

func (s *sixAlone) names() {
	s.service(s.ns, "each", func(s *corev1.ServiceSpec) { s.ClusterIP = corev1.ClusterIPNone })
	all := make([]string, 0, len(s.addrs))
	for _, a := range s.addrs {
		all = append(all, a)
	}
	slices.Sort(all)
	const p = "web-a1"
	s.exec(p, func(out string) error {
		for _, word := range []string{"nameserver fd00:10:96::a\n", "search six.svc.cluster.local svc.cluster.local cluster.local"} {
			if !strings.Contains(out, word) {
				return errors.New(out)
			}
		}
		return nil
	}, "cat", "/etc/resolv.conf")
	s.resolves(s.ns, p, "host", "each", strings.Join(all, " "))
	s.resolves(s.ns, p, "addr", s.web.Spec.ClusterIP, "web.six.svc.cluster.local.")
	s.resolves(s.ns, p, "host", "kubernetes.default", "fd00:10:96::1")
	s.resolves(s.ns, "web-n2", "host", "web", s.web.Spec.ClusterIP)
}

func (s *sixAlone) policies() {
	guarded := "[" + s.addrs["web-n1"] + "]:8080"
	s.ctlIn(fmt.Sprintf(`apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: p, namespace: %s}
spec:
  podSelector: {matchLabels: {pod: web-n1}}
  ingress:
  - ports: [{port: 8080}]
    from:
    - podSelector: {matchLabels: {pod: web-a1}}
    - ipBlock: {cidr: "fd00:10:244::/48", except: ["%s/128", "%s/128"]}
`, s.ns, s.addrs["web-n2"], s.addrs["web-a1"]), "apply", "-f", "-")
	s.reaches(false, s.ns, "web-n2", guarded)
	s.reaches(true, s.ns, "web-n3", guarded) // by its address
	s.reaches(true, s.ns, "web-a1", guarded) // by its label
	s.podReady(s.ns, "web-n1")               // its probes are let through
	s.ctl("-n", s.ns, "delete", "networkpolicy", "p")
	s.reaches(true, s.ns, "web-n2", guarded)
}

func (s *sixAlone) streams() {
	for _, p := range []string{"web-n3", "web-a1"} {
		s.eventuallyHas([]string{"-n", s.ns, "logs", p}, "serving on :8080")
		url, end := s.forward(s.ns, "pod/"+p, ":8080")
		s.eventually(p+" answers by the forwarded port", func(context.Context) error {
			page, err := fromHost(url)
			if err == nil && answerer(page) != p {
				err = errors.New(page)
			}
			return err
		})
		end()
	}
	// Each node says that the ways to all others are well.
	s.eventually("the network is well", func(context.Context) error {
		out, errs, code := s.run("clusterctl", "", "net", "doctor")
		if code != 0 || strings.Count(out, " ms") != 12 {
			return fmt.Errorf("exit %d: %s%s", code, out, errs)
		}
		return nil
	})
}

// forward opens a port of the loopback for a pod or Service. end closes it.
func (e *env) forward(ns, target, port string) (url string, end func()) {
	e.t.Helper()
	ctx, cancel := context.WithTimeout(e.t.Context(), testTimeout)
	cmd := exec.CommandContext(ctx, e.Bin("clusterctl"), "-n", ns, "port-forward", target, port, "--address=127.0.0.1")
	cmd.Env = append(os.Environ(), "KUBECONFIG="+e.kubeconfig())
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		cancel()
		e.t.Fatal(err)
	}
	end = func() {
		cancel()
		_ = cmd.Wait() // it was killed
	}
	var local int
	if _, err := fmt.Fscanf(out, "Forwarding from 127.0.0.1:%d -> 8080", &local); err != nil {
		end()
		e.t.Fatalf("port-forward: %v %s", err, said.String())
	}
	return fmt.Sprintf("http://127.0.0.1:%d/", local), end
}

// refuses begins and joins with settings of IPv4.
func (s *sixAlone) refuses() {
	token := strings.Fields(s.ctl("token", "create", "--role", "agent"))
	own := "[" + s.Nodes()[0].Addr.String() + "]:6443"
	for what, tc := range map[string]struct {
		args []string
		want string
	}{
		"ranges of IPv4":       {[]string{"init", "--cluster-cidr", "10.244.0.0/14", "--service-cidr", "10.96.0.0/16"}, "--cluster-cidr 10.244.0.0/14, --service-cidr 10.96.0.0/16: the nodes' addresses are of IPv6"},
		"an IPv4 address":      {[]string{"join", own, "--token", token[len(token)-1], "--advertise", "127.0.0.1"}, "the address 127.0.0.1: the nodes of this cluster have addresses of IPv6"},
		"a server's, of IPv4":  {[]string{"join", "192.0.2.7", "--token", token[len(token)-1]}, "--advertise: the server 192.0.2.7:6443 is reached by IPv4 alone"},
		"ranges of IPv6 alone": {[]string{"init", "--advertise", "127.0.0.1", "--cluster-cidr", "fd00:10:244::/48"}, "--advertise 127.0.0.1"},
	} {
		data := filepath.Join(s.t.TempDir(), "data")
		cmd := s.Exec(s.t.Context(), "n2", s.Bin("clusterd"), append(tc.args, "--data", data, "--name", "other", "--port", "7443", "--prepare")...)
		out, err := cmd.CombinedOutput()
		if err == nil || !strings.Contains(string(out), tc.want) {
			s.t.Errorf("%s: %v: %s, want %q", what, err, out, tc.want)
		}
		if _, err := os.Stat(data); err == nil {
			s.t.Errorf("%s: the data directory is left", what)
		}
	}
	if out := s.ctl("members"); strings.Contains(out, "other") {
		s.t.Errorf("who was refused is a member:\n%s", out)
	}
}

// nodeIs waits until a node is Ready, or is not.
func (s *sixAlone) nodeIs(name string, ready bool) {
	s.t.Helper()
	s.eventually(fmt.Sprintf("%s is Ready: %t", name, ready), func(ctx context.Context) error {
		n, err := s.api.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
		if err == nil && nodeReady(n) != ready {
			err = fmt.Errorf("%+v", n.Status.Conditions)
		}
		return err
	})
}

// lose switches a machine off and waits until the others go on without it; back undoes
// it, and waits until all pods answer again.
func (s *sixAlone) lose(node string) (back func()) {
	s.t.Helper()
	s.must(errors.Join(s.PowerOff(node), s.Partition(node))) // its kernel is this one, and would answer on
	s.use(s.other(node, "a1"))
	s.nodeIs(node, false)
	rest := slices.DeleteFunc(slices.Clone(s.nodes), func(n string) bool { return n == node })
	pods := slices.DeleteFunc(slices.Clone(s.pods), func(p string) bool { return p == ownPod(node) })
	s.answers("the others' pods by the Service's address", "http://["+s.web.Spec.ClusterIP+"]/", rest[:2], pods...)
	return func() {
		s.t.Helper()
		s.must(errors.Join(s.Heal(node), s.Start(s.t.Context(), node)))
		s.nodeIs(node, true)
		s.answers("all pods again", "http://["+s.web.Spec.ClusterIP+"]/", []string{node, s.other(node)}, s.pods...)
	}
}

func (s *sixAlone) agentLost() { s.lose("a1")() }

func (s *sixAlone) leaderLost() {
	leader := s.leader()
	vip := balancedOn(s.t, s.env, s.ns, leader)
	back := s.lose(leader)
	took := vip.moves(s.env, []string{ownPod(leader)})
	s.t.Logf("the host is answered by %s over another machine, after %s more", vip.vip, took)
	s.eventually("the others write", func(ctx context.Context) error {
		_, err := s.api.CoreV1().ConfigMaps(s.ns).Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{GenerateName: "after-"}}, metav1.CreateOptions{})
		return err
	})
	s.eventually("another one leads", func(context.Context) error {
		if s.leader() == leader {
			return errors.New(leader + " leads, which has no power")
		}
		return nil
	})
	back()
	s.eventuallyHas([]string{"-n", s.ns, "get", "pod", ownPod(leader)}, "1/1")
}

// ingress asks the proxies, at an address of the pool that leaderLost made.
func (s *sixAlone) ingress() {
	s.ctlIn(`apiVersion: networking.k8s.io/v1
kind: Ingress
metadata: {name: web, namespace: `+s.ns+`}
spec: {rules: [{host: plain.example, http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: web, port: {number: 80}}}}]}}]}`, "apply", "-f", "-")
	var vip string
	s.eventually("the Ingress has an address", func(ctx context.Context) error {
		i, err := s.api.NetworkingV1().Ingresses(s.ns).Get(ctx, "web", metav1.GetOptions{})
		if err == nil && len(i.Status.LoadBalancer.Ingress) != 1 {
			err = fmt.Errorf("%+v", i.Status)
		}
		if err == nil {
			vip = i.Status.LoadBalancer.Ingress[0].IP
		}
		return err
	})
	wayIn{e: s.env, vip: vip}.says("http://plain.example/", http.StatusOK, "I am pod web-")
}
