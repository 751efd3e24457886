package netpol

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/clusterd/clusterd/netsetup/policy"
)

// lastRules is an Enforcer that remembers what it was given last.
type lastRules struct {
	mu   sync.Mutex
	last []policy.Group
}

func (l *lastRules) Set(g []policy.Group) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.last = g
	return nil
}

func (*lastRules) Run(context.Context) {}

func (l *lastRules) isolates(addr string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.ContainsFunc(l.last, func(g policy.Group) bool { return slices.Contains(g.Addrs, netip.MustParseAddr(addr)) })
}

// running runs a manager of node n1 on an API that has the policy and those pods.
func running(t *testing.T, cfg Config, pods ...*v1.Pod) (*Manager, *fake.Clientset) {
	api := fake.NewClientset(
		&v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "a"}},
		np("closed", networkingv1.NetworkPolicySpec{PolicyTypes: ingress}),
	)
	for _, p := range pods {
		if err := api.Tracker().Add(p); err != nil {
			t.Fatal(err)
		}
	}
	cfg.NodeName, cfg.Client = "n1", api
	m, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	t.Cleanup(func() { cancel(); wg.Wait() })
	wg.Go(func() { _ = m.Run(ctx) })
	time.Sleep(time.Second) // of the bubble
	return m, api
}

// TestPoliciesHoldUntilTheEnd: a pod that the API has no more, or that somebody
// says has ended, keeps its policies as long as it has its addresses.
func TestPoliciesHoldUntilTheEnd(t *testing.T) {
	for name, change := range map[string]func(*fake.Clientset, *v1.Pod) error{
		"deleted by force": func(api *fake.Clientset, p *v1.Pod) error {
			return api.CoreV1().Pods(p.Namespace).Delete(t.Context(), p.Name, metav1.DeleteOptions{})
		},
		"ended by another's word": func(api *fake.Clientset, p *v1.Pod) error {
			p = p.DeepCopy()
			p.Status.Phase = v1.PodFailed
			_, err := api.CoreV1().Pods(p.Namespace).UpdateStatus(t.Context(), p, metav1.UpdateOptions{})
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var mu sync.Mutex
				attached := map[types.UID]bool{"web": true}
				rules, web := &lastRules{}, pod("a", "web", "n1", "10.244.0.7")
				m, api := running(t, Config{Enforcer: rules, Attached: func(uid types.UID) bool {
					mu.Lock()
					defer mu.Unlock()
					return attached[uid]
				}}, web, pod("a", "former", "n1", "10.244.0.8"))
				if !rules.isolates("10.244.0.7") {
					t.Fatal("the policy is not in force")
				}
				if err := change(api, web); err != nil {
					t.Fatal(err)
				}
				if err := api.CoreV1().Pods("a").Delete(t.Context(), "former", metav1.DeleteOptions{}); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Minute)
				if !rules.isolates("10.244.0.7") {
					t.Error("the policy is gone while the pod runs")
				}
				if rules.isolates("10.244.0.8") {
					t.Error("the policy is in force for an address that no pod has")
				}
				mu.Lock()
				delete(attached, "web")
				mu.Unlock()
				m.Release("web")
				time.Sleep(time.Second)
				if rules.isolates("10.244.0.7") {
					t.Error("the policy is in force for an address that was given back")
				}
			})
		})
	}
}

// TestGuardWantsThePod: a pod that the watch does not show has labels that are not
// known, and does not start; one of the node itself does.
func TestGuardWantsThePod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, api := running(t, Config{Enforcer: noRules{}, Static: func(uid types.UID) bool { return uid == "static" }})
		addrs := []netip.Addr{netip.MustParseAddr("10.244.0.7")}
		if err := m.Guard(t.Context(), "late", addrs); err == nil || !strings.Contains(err.Error(), "the watch of pods has not shown this one") {
			t.Errorf("a pod that is not known: %v", err)
		}
		if err := m.Guard(t.Context(), "static", addrs); err != nil {
			t.Errorf("a static pod: %v", err)
		}
		if _, err := api.CoreV1().Pods("a").Create(t.Context(), pod("a", "late", "n1", ""), metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
		if err := m.Guard(t.Context(), "late", addrs); err != nil {
			t.Errorf("once it is known: %v", err)
		}
	})
}
