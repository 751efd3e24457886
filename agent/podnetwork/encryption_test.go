package podnetwork

import (
	"context"
	"errors"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/netsetup/netnstest"
	"github.com/clusterd/clusterd/netsetup/overlay"
	"github.com/clusterd/clusterd/netsetup/wireguard"
)

func keyed(n *v1.Node, age time.Duration, text string) *v1.Node {
	n.CreationTimestamp = metav1.NewTime(time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC).Add(-age))
	if text != "" {
		n.Annotations = map[string]string{names.WireGuard: text}
	}
	return n
}

// TestKeysOf: who has which key, whatever nodes say of themselves.
func TestKeysOf(t *testing.T) {
	text := func(n byte) string {
		return wireguard.Public{Key: wireguard.Key{n, 31: 64}, Port: 8475}.String()
	}
	nodes := []*v1.Node{
		keyed(node("thief", "10.42.5.0/24", "192.0.2.5"), time.Minute, text(2)),
		keyed(node("mine-too", "10.42.6.0/24", "192.0.2.6"), 9*time.Hour, text(1)),
		keyed(node("b", "10.42.2.0/24", "192.0.2.2"), time.Hour, text(2)),
		keyed(node("none", "10.42.3.0/24", "192.0.2.3"), time.Hour, ""),
		keyed(node("odd", "10.42.4.0/24", "192.0.2.4"), time.Hour, "8475 nonsense"),
		keyed(node("me", "10.42.1.0/24", "192.0.2.1"), time.Minute, text(1)),
	}
	keys := keysOf("me", nodes)
	for name, want := range map[string]string{
		"me": "", "b": "", "thief": "WireGuard key of b", "mine-too": "WireGuard key of me", "none": "has no WireGuard key", "odd": "of no use",
	} {
		k := keys[name]
		if (k.Key != wireguard.Key{}) != (want == "") || !strings.Contains(k.fault, want) || (want == "") != (k.fault == "") {
			t.Errorf("%s: %+v, want %q", name, k, want)
		}
	}
	for _, o := range makePlan("me", nil, nodes, keys).others {
		if isB := o.Ranges[0] == netip.MustParsePrefix("10.42.2.0/24"); (o.Key != wireguard.Key{}) != isB || (o.Port == 8475) != isB {
			t.Errorf("%+v", o)
		}
	}
	plain := keys.inClear()
	for _, o := range makePlan("me", nil, nodes, plain).others {
		if o.Key != (wireguard.Key{}) {
			t.Errorf("in clear: %+v", o)
		}
	}
	if plain["b"].fault == "" || plain["none"].fault != "" {
		t.Errorf("in clear: %+v", plain)
	}
}

// TestRootEncryptionKey: the node tells its key once the kernel can do with it, and
// takes it back where it cannot: then it gives pods no network and says why.
func TestRootEncryptionKey(t *testing.T) {
	netnstest.NeedRoot(t)
	ns, dir := netnstest.New(t), t.TempDir()
	self := keyed(node("n1", "10.42.1.0/24", "192.0.2.1"), 0, "8475 former")
	client := fake.NewClientset(self)
	var told []string
	var n *Network
	var err error
	ns.Do(func() error {
		n, err = New(Config{
			NodeName: "n1", NodeIPs: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, Client: client, Dir: dir, Encrypt: true,
			PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.42.0.0/16")},
			Blocked:  func(reason, why string) { told = append(told, reason+": "+why) },
		})
		return err
	})
	defer n.close()
	now := func() string {
		node, err := client.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return node.Annotations[names.WireGuard]
	}
	apply := func() error {
		node, err := client.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{})
		if err == nil {
			ns.Do(func() error { err = n.apply(context.WithoutCancel(t.Context()), []*v1.Node{node}); return nil })
		}
		return err
	}
	err = apply()
	key, kerr := wireguard.EnsureKey(filepath.Join(dir, keyFile), 0, time.Now())
	if kerr != nil {
		t.Fatal(kerr)
	}
	if errors.Is(err, overlay.ErrNoWireGuard) {
		_ = apply() // told once
		ready, why := n.Ready()
		if now() != "" || ready || !strings.Contains(why, "no WireGuard") || len(told) != 1 || !strings.HasPrefix(told[0], "NoWireGuard: ") {
			t.Errorf("annotation %q, ready %t: %q, told %q", now(), ready, why, told)
		}
		return
	}
	want := wireguard.Public{Key: key.Key.PublicKey(), Port: overlay.DefaultWireGuardPort}.String()
	if ready, why := n.Ready(); err != nil || now() != want || !ready || len(told) > 0 {
		t.Errorf("%v, annotation %q, ready %t: %q, told %q", err, now(), ready, why, told)
	}
}
