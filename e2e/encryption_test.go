package e2e

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	ours "github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/netsetup/netnstest"
	"github.com/clusterd/clusterd/netsetup/overlay"
)

// TestE2ENoWireGuard: a cluster is to encrypt what pods send, and the kernel cannot.
// No node takes pods, and each says why.
func TestE2ENoWireGuard(t *testing.T) {
	need(t)
	if kernelHasWireGuard(t) {
		t.Skip("this kernel has WireGuard: TestE2EWireGuard shows what passes")
	}
	e := startBare(t, 2, func(c *cluster.Config) { c.InitArgs = []string{"--pod-encryption", "wireguard"} })
	const why = "this kernel has no WireGuard"
	e.eventually("each node says why it takes no pods", func(ctx context.Context) error {
		list, err := e.api.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		if len(list.Items) != 2 {
			return fmt.Errorf("%d nodes", len(list.Items))
		}
		for _, n := range list.Items {
			if nodeReady(&n) {
				return fmt.Errorf("%s is Ready", n.Name)
			}
			if _, has := n.Annotations[ours.WireGuard]; has {
				return fmt.Errorf("%s has a key: %v", n.Name, n.Annotations)
			}
			if !strings.Contains(fmt.Sprint(n.Status.Conditions), why) {
				return fmt.Errorf("%s does not say why: %+v", n.Name, n.Status.Conditions)
			}
			events, err := e.api.CoreV1().Events("").List(ctx, metav1.ListOptions{FieldSelector: "reason=NoWireGuard,involvedObject.name=" + n.Name})
			if err != nil {
				return err
			}
			if len(events.Items) == 0 || events.Items[0].Type != corev1.EventTypeWarning || !strings.Contains(events.Items[0].Message, "modprobe wireguard") {
				return errors.New("no event NoWireGuard of " + n.Name)
			}
		}
		return nil
	})
	// The second node has it from the cluster, not from a flag.
	for _, n := range e.Nodes() {
		config, err := os.ReadFile(filepath.Join(n.Data, "config.yaml"))
		if err != nil || !strings.Contains(string(config), "podEncryption: wireguard\n") {
			t.Errorf("%s: %v: %s", n.Name, err, config)
		}
	}
}

// kernelHasWireGuard makes an interface of WireGuard's in a namespace of its own.
func kernelHasWireGuard(t *testing.T) bool {
	t.Helper()
	var has bool
	netnstest.New(t).Do(func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name = "probe"
		err := netlink.LinkAdd(&netlink.Wireguard{LinkAttrs: attrs})
		has = err == nil
		if errors.Is(err, unix.EOPNOTSUPP) {
			err = nil
		}
		return err
	})
	return has
}

// wire counts the frames on a node's interface: those to WireGuard's port, those
// between addresses of pods, and those with the texts that must and must not be seen.
type wire struct {
	mu                           sync.Mutex
	tunnel, pods, plain, control int
}

const (
	secretText  = "marker-of-the-plain-text"
	controlText = "in-clear-on-purpose"
)

func (w *wire) look(f []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(f) > 38 && f[12] == 8 && f[13] == 0 {
		pods := netip.MustParsePrefix("10.42.0.0/16")
		from, to := netip.AddrFrom4([4]byte(f[26:30])), netip.AddrFrom4([4]byte(f[30:34]))
		if f[23] == unix.IPPROTO_UDP && binary.BigEndian.Uint16(f[36:]) == overlay.DefaultWireGuardPort {
			w.tunnel++
		}
		if pods.Contains(from) || pods.Contains(to) {
			w.pods++
		}
	}
	if bytes.Contains(f, []byte(secretText)) {
		w.plain++
	}
	if bytes.Contains(f, []byte(controlText)) {
		w.control++
	}
}

func (w *wire) read(of *int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return *of
}

// TestE2EWireGuard: a server and an agent encrypt what their pods send. Services,
// names, ports of nodes and policies work across them as in clear; on the wire
// there is no packet of a pod's. It goes on when a key changes and while clusterd is
// dead.
func TestE2EWireGuard(t *testing.T) {
	need(t)
	if !kernelHasWireGuard(t) {
		t.Skip("needs a kernel with WireGuard: make test-vm VM_TESTS=TestE2EWireGuard")
	}
	e := startBare(t, 1, func(c *cluster.Config) {
		c.Agents = 1
		c.InitArgs = []string{"--pod-encryption", "wireguard", "--wireguard-key-age", "1m"}
	})
	e.ready(2)
	near, far := e.Nodes()[0], e.Nodes()[1]
	seen := &wire{}
	netnstest.Capture(t, func(fn func() error) {
		if err := e.Do(near.Name, fn); err != nil {
			t.Fatal(err)
		}
	}, "eth0", seen.look)

	ns := e.namespace("encrypted")
	web := on(far.Name, pod("web"))
	web.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "MESSAGE", Value: secretText}}
	e.create(ns, web)
	e.create(ns, on(near.Name, pod("near", "sleep")))
	e.create(ns, on(far.Name, pod("far", "sleep")))
	svc := e.service(ns, "web", func(s *corev1.ServiceSpec) { s.Type = corev1.ServiceTypeNodePort })
	addr := e.podReady(ns, "web").Status.PodIP + ":8080"
	e.podReady(ns, "near")
	e.podReady(ns, "far")
	fetches := func(when, url string) {
		t.Helper()
		// An emulated machine takes minutes to start a clusterd.
		e.within(3*testTimeout, when+": the page of "+url, func(context.Context) error {
			out, errs, code := e.run("clusterctl", "", "-n", ns, "exec", "near", "--", "/hello", "fetch", url)
			if code != 0 || !strings.Contains(out, secretText) {
				return fmt.Errorf("exit %d: %s%s", code, out, errs)
			}
			return nil
		})
	}
	fetches("by address", "http://"+addr+"/")
	fetches("by name", "http://web."+ns+"/")
	e.answers("by the cluster address of both nodes", "http://"+svc.Spec.ClusterIP+"/", []string{near.Name, far.Name}, "web")
	// A port of a node, asked on that node: what clients send to another node's address
	// is theirs to encrypt.
	for _, n := range []cluster.Node{near, far} {
		e.answers("by a port of "+n.Name, "http://"+n.Addr.String()+":"+strconv.Itoa(int(svc.Spec.Ports[0].NodePort))+"/", []string{n.Name}, "web")
	}
	from := metav1.LabelSelector{MatchLabels: map[string]string{"app": "far"}}
	_, err := e.api.NetworkingV1().NetworkPolicies(ns).Create(t.Context(), &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: networkingv1.NetworkPolicySpec{
		PodSelector: metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}},
		Ingress:     []networkingv1.NetworkPolicyIngressRule{{From: []networkingv1.NetworkPolicyPeer{{PodSelector: &from}}}},
	}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	e.reaches(false, ns, "near", addr)
	e.reaches(true, ns, "far", addr)
	e.ctl("-n", ns, "delete", "networkpolicy", "p")
	e.reaches(true, ns, "near", addr)

	e.eventually("net doctor names the tunnel", func(context.Context) error {
		if out, errs, code := e.run("clusterctl", "", "net", "doctor"); code != 0 || !strings.Contains(out, "wireguard") {
			return fmt.Errorf("exit %d: %s%s", code, out, errs)
		}
		return nil
	})

	// The key of n1 changes in time; what its pods send goes on.
	key := func(ctx context.Context) string {
		n, err := e.api.CoreV1().Nodes().Get(ctx, near.Name, metav1.GetOptions{})
		if err != nil {
			return ""
		}
		return n.Annotations[ours.WireGuard]
	}
	first := key(t.Context())
	e.eventually("n1 has another key", func(ctx context.Context) error {
		if now := key(ctx); now == "" || now == first {
			return errors.New("its key is still " + now)
		}
		return nil
	})
	fetches("after a change of the key", "http://"+addr+"/")

	// The tunnel is the kernel's: it carries while no clusterd runs on the agent.
	if err := e.Kill(far.Name); err != nil {
		t.Fatal(err)
	}
	before := seen.read(&seen.tunnel)
	fetches("clusterd of the agent is dead", "http://"+addr+"/")
	if now := seen.read(&seen.tunnel); now == before {
		t.Error("no packet went through the tunnel")
	}
	if err := e.Start(t.Context(), far.Name); err != nil {
		t.Fatal(err)
	}
	fetches("clusterd of the agent is back", "http://"+addr+"/")

	// What is sent in clear is seen; of the pods nothing was.
	e.eventually("the capture sees what is sent in clear", func(context.Context) error {
		err := e.Do(near.Name, func() error {
			conn, err := net.Dial("udp", net.JoinHostPort(far.Addr.String(), "9000"))
			if err != nil {
				return err
			}
			defer func() { _ = conn.Close() }()
			_, _ = conn.Write([]byte(controlText)) // refused by the one before: no matter
			return nil
		})
		if err == nil && seen.read(&seen.control) == 0 {
			err = errors.New("nothing is seen")
		}
		return err
	})
	if n := seen.read(&seen.plain); n > 0 {
		t.Errorf("the text of a page was seen %d times on the wire", n)
	}
	if n := seen.read(&seen.pods); n > 0 {
		t.Errorf("%d frames of pods' addresses were seen on the wire", n)
	}
}
