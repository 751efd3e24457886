package checkpoint

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"github.com/clusterd/clusterd/agent/node"
)

// fakeAgent has the pods of its map.
type fakeAgent struct {
	mu       sync.Mutex
	pods     map[types.UID]*Pod
	unread   map[types.UID]bool
	started  []string
	listed   chan struct{}
	forgot   []types.UID
	works    map[types.UID]bool // beside pods
	isolated int
}

func (a *fakeAgent) Record(uid types.UID) (*Pod, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.pods[uid], !a.unread[uid]
}

func (a *fakeAgent) Works(uid types.UID) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.pods[uid] != nil || a.works[uid]
}

func (a *fakeAgent) Node() *v1.Node {
	return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "u", ResourceVersion: "700"}}
}

func (a *fakeAgent) Start(pods []*v1.Pod, _ *v1.Node) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.isolated++
	for _, p := range pods {
		a.started = append(a.started, p.Name)
	}
}

func (a *fakeAgent) Listed() <-chan struct{} { return a.listed }

func (a *fakeAgent) Forget(uid types.UID) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.forgot = append(a.forgot, uid)
}

// runKeeper runs a Keeper over a directory; stop ends it.
func runKeeper(t *testing.T, dir string, a *fakeAgent) (k *Keeper, stop func()) {
	t.Helper()
	s := open(t, dir, key)
	if _, c, _ := s.Load(); c == nil { // without it nothing starts
		must(t, errors.Join(s.PutCluster(&Cluster{Node: a.Node()}), s.PutContact(time.Now())))
	}
	k = NewKeeper(t.Context(), Config{Store: s, Gate: NewGate("n1"), NodeName: "n1", After: 30 * time.Second})
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { _ = k.Run(ctx, a) })
	return k, func() { cancel(); wg.Wait() }
}

func (a *fakeAgent) change(fn func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	fn()
}

// TestKeeper: what runs is on record within seconds, and what has ended is not; the next
// process starts it after 30 s without an API, once, and the list of the API ends that.
func TestKeeper(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir := t.TempDir()
		a := &fakeAgent{pods: map[types.UID]*Pod{}, unread: map[types.UID]bool{}, listed: make(chan struct{})}
		k, stop := runKeeper(t, dir, a)
		answered := &http.Response{StatusCode: http.StatusOK}
		k.Gate().note(answered, nil)
		time.Sleep(10 * time.Second)
		k.PodChanged("uid-a")
		uids := func() []types.UID {
			out, err := k.cfg.Store.UIDs()
			must(t, err)
			return out
		}
		a.change(func() { a.pods["uid-a"], a.pods["uid-b"] = withSecret(t, "a"), withSecret(t, "b") })
		time.Sleep(10 * time.Second)
		if got := uids(); len(got) > 0 {
			t.Fatalf("%v were written before the API's list was seen", got)
		}
		close(a.listed)
		a.change(func() { a.unread["uid-b"] = true })
		k.PodChanged("uid-b")
		time.Sleep(2 * time.Second)
		if got := uids(); !slices.Equal(got, []types.UID{"uid-a"}) {
			t.Fatalf("on record: %v", got)
		}
		a.change(func() { a.unread["uid-b"] = false })
		time.Sleep(readAgain + 2*time.Second)
		if got := uids(); !slices.Equal(got, []types.UID{"uid-a", "uid-b"}) {
			t.Fatalf("on record: %v", got)
		}
		a.change(func() { delete(a.pods, "uid-b") })
		k.PodChanged("uid-b")
		time.Sleep(2 * time.Second)
		if got := uids(); !slices.Equal(got, []types.UID{"uid-a"}) || !slices.Equal(a.forgot, []types.UID{"uid-b"}) {
			t.Fatalf("on record: %v, forgotten %v", got, a.forgot)
		}
		stop()

		a = &fakeAgent{pods: map[types.UID]*Pod{}, unread: map[types.UID]bool{}, listed: make(chan struct{})}
		k, stop = runKeeper(t, dir, a)
		defer stop()
		time.Sleep(29 * time.Second)
		a.change(func() {
			if a.isolated > 0 {
				t.Error("isolated too soon")
			}
		})
		// A refusal is no reason to start what others may run.
		k.Gate().note(&http.Response{StatusCode: http.StatusForbidden}, nil)
		time.Sleep(20 * time.Second)
		a.change(func() {
			if a.isolated > 0 {
				t.Error("isolated while the API refuses the node")
			}
		})
		k.Gate().note(nil, errors.New("no route to host"))
		time.Sleep(time.Minute)
		a.change(func() {
			if a.isolated != 1 || !slices.Equal(a.started, []string{"a"}) {
				t.Errorf("isolated %d times, started %v", a.isolated, a.started)
			}
		})
		if u, err := ReadUnconfirmed(dir); err != nil || !slices.Equal(u.Pods, []types.UID{"uid-a"}) {
			t.Error(u, err)
		}
		k.Gate().note(answered, nil)
		time.Sleep(time.Minute)
		if u, err := ReadUnconfirmed(dir); err != nil || len(u.Pods) != 1 || closed(k.Gate().Live()) {
			t.Errorf("confirmed before the API's list: %v, %v", u, err)
		}
		close(a.listed)
		time.Sleep(2 * time.Second)
		if !closed(k.Gate().Live()) {
			t.Error("not live after the API's list")
		}
		if u, err := ReadUnconfirmed(dir); err != nil || len(u.Pods) != 0 {
			t.Error(u, err)
		}
		if got := uids(); len(got) > 0 {
			t.Errorf("the record of a pod that is no more stays: %v", got)
		}
	})
}

func newFakeAgent() *fakeAgent {
	return &fakeAgent{pods: map[types.UID]*Pod{}, unread: map[types.UID]bool{}, works: map[types.UID]bool{}, listed: make(chan struct{})}
}

func onRecord(t *testing.T, k *Keeper) []types.UID {
	t.Helper()
	out, err := k.cfg.Store.UIDs()
	must(t, err)
	return out
}

// TestKeeperWaitsWhileTheAPIAnswers: no pods are started while the node's Lease is renewed, whatever
// becomes of its lists; they are when that ends and the API has not listed the node's pods.
func TestKeeperWaitsWhileTheAPIAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, a := t.TempDir(), newFakeAgent()
		must(t, open(t, dir, key).PutPod(withSecret(t, "a")))
		k, stop := runKeeper(t, dir, a)
		defer stop()
		isolated := func() (n int) { a.change(func() { n = a.isolated }); return n }
		for range 30 {
			time.Sleep(10 * time.Second)
			k.Gate().note(&http.Response{StatusCode: http.StatusOK}, nil)
		}
		time.Sleep(25 * time.Second)
		if n := isolated(); n > 0 {
			t.Fatal("isolated while the API answers")
		}
		time.Sleep(10 * time.Second)
		if n := isolated(); n != 1 {
			t.Fatalf("isolated %d times after the API was there and went", n)
		}
	})
}

// TestKeeperNeedsTheCluster: without the record of policies no pod is started.
func TestKeeperNeedsTheCluster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, a := t.TempDir(), newFakeAgent()
		s := open(t, dir, key)
		must(t, s.PutPod(withSecret(t, "a")))
		k := NewKeeper(t.Context(), Config{Store: s, Gate: NewGate("n1"), NodeName: "n1", After: 30 * time.Second})
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		must(t, k.Run(ctx, a))
		if a.isolated > 0 {
			t.Error("pods were started")
		}
	})
}

// TestKeeperIsolated: what ends without the API loses its record then, and not when the API is back;
// what was not started keeps its own, and nothing is known of the cluster that could be written.
func TestKeeperIsolated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, a := t.TempDir(), newFakeAgent()
		s := open(t, dir, key)
		for _, name := range []string{"ends", "runs", "held"} {
			must(t, s.PutPod(withSecret(t, name)))
		}
		a.pods["uid-runs"], a.works["uid-ends"] = withSecret(t, "runs"), true
		a.pods["uid-runs"].Pod.Status.Reason = "NewlyKnown"
		k, stop := runKeeper(t, dir, a)
		defer stop()
		time.Sleep(time.Minute)
		k.changed = true
		for _, uid := range []types.UID{"uid-ends", "uid-runs", "uid-held"} {
			k.PodChanged(uid)
		}
		time.Sleep(time.Minute)
		if got := onRecord(t, k); !slices.Equal(got, []types.UID{"uid-held", "uid-runs"}) || len(a.forgot) > 0 {
			t.Errorf("on record: %v; forgotten: %v", got, a.forgot)
		}
		pods, cluster, faults := k.cfg.Store.Load()
		if len(faults) > 0 || len(pods) != 2 || pods[1].Pod.Status.Reason != "NewlyKnown" || cluster.Lists != nil {
			t.Errorf("%v, %+v, %v", pods, cluster, faults)
		}
		close(a.listed)
		time.Sleep(10 * time.Second)
		if got := onRecord(t, k); !slices.Equal(got, []types.UID{"uid-runs"}) {
			t.Errorf("on record: %v", got)
		}
	})
}

// TestKeeperRemovesFirst: records of what ended are gone before those of what runs are written, and
// one whose end the API is about to hear does not come back by a write that was under way.
func TestKeeperRemovesFirst(t *testing.T) {
	a := newFakeAgent()
	k := NewKeeper(t.Context(), Config{Store: open(t, t.TempDir(), key), Gate: NewGate("n1"), NodeName: "n1", After: time.Minute})
	must(t, k.cfg.Store.PutPod(withSecret(t, "gone")))
	k.PodChanged("uid-gone")
	for i := range 3 * roundSize {
		p := withSecret(t, string(rune('A'+i)))
		a.pods[p.Pod.UID] = p
		k.PodChanged(p.Pod.UID)
	}
	more, _, err := k.keepPods(a, true)
	must(t, err)
	if got := onRecord(t, k); !more || len(got) != roundSize || slices.Contains(got, "uid-gone") {
		t.Errorf("after a round: %v, more %v", got, more)
	}
	k.PodChanged("uid-A")
	a.pods["uid-A"] = nil
	for more {
		more, _, err = k.keepPods(a, true)
		must(t, err)
	}
	if got := onRecord(t, k); len(got) != 3*roundSize-1 {
		t.Errorf("after all: %v", got)
	}
	must(t, k.Ended("uid-B"))
	must(t, k.keepPod(a.pods["uid-B"]))
	if got := onRecord(t, k); slices.Contains(got, "uid-B") {
		t.Error("the record of a pod that has ended is there again")
	}
}

// TestKeeperKeepsWhatPoliciesSelect: a record has no policy without the pods and namespaces that it
// selects: no pod could start by it.
func TestKeeperKeepsWhatPoliciesSelect(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := NewKeeper(t.Context(), Config{Store: open(t, t.TempDir(), key), Gate: NewGate("n1"), NodeName: "n1", After: time.Minute})
		factory := informers.NewSharedInformerFactory(fake.NewClientset(), 0)
		policies, pods, spaces := factory.Networking().V1().NetworkPolicies().Informer(), factory.Core().V1().Pods().Informer(), factory.Core().V1().Namespaces().Informer()
		must(t, k.Follow("NetworkPolicy", policies, false))
		must(t, k.Follow("Pod", pods, true))
		must(t, k.Follow("Namespace", spaces, true))
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		defer wg.Wait()
		defer cancel()
		keep := func() bool {
			time.Sleep(time.Second)
			complete, err := k.keepCluster(newFakeAgent())
			must(t, err)
			return complete
		}
		wg.Go(func() { policies.RunWithContext(ctx) })
		if !keep() {
			t.Error("without a policy pods are waited for")
		}
		must(t, policies.GetStore().Add(&networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "default"}}))
		if keep() {
			t.Error("a policy is kept without the pods that it selects")
		}
		wg.Go(func() { pods.RunWithContext(ctx) })
		wg.Go(func() { spaces.RunWithContext(ctx) })
		if !keep() {
			t.Error("a policy and what it selects are not kept")
		}
	})
}

// TestRecordedNodeIsNotWritten: what others have written of the node while it was isolated is there
// after its return: the API takes no status that is made of a record.
func TestRecordedNodeIsNotWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := NewKeeper(t.Context(), Config{Store: open(t, t.TempDir(), key), Gate: NewGate("n1"), NodeName: "n1", After: time.Minute})
		old := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "u", ResourceVersion: "700", Labels: map[string]string{"a": "1"}}}
		old.Status.VolumesAttached = []v1.AttachedVolume{{Name: "v"}}
		old.Spec.Unschedulable = true
		a := &nodeAgent{newFakeAgent(), old}
		if complete, err := k.keepCluster(a); err != nil || !complete {
			t.Fatal(complete, err)
		}
		_, cluster, _ := k.cfg.Store.Load()
		live := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "u", ResourceVersion: "800", Labels: map[string]string{"a": "2"}}}
		api := fake.NewClientset(live)
		raw, err := json.Marshal(cluster.Node)
		must(t, err)
		var gets, conflicts int
		api.PrependReactor("get", "nodes", func(k8stesting.Action) (bool, kruntime.Object, error) {
			if gets++; gets > 1 {
				return false, nil, nil
			}
			n := &v1.Node{} // isolated
			return true, n, json.Unmarshal(raw, n)
		})
		api.PrependReactor("update", "nodes", func(act k8stesting.Action) (bool, kruntime.Object, error) {
			o := act.(k8stesting.UpdateAction).GetObject().(*v1.Node)
			if o.ResourceVersion != "" && o.ResourceVersion != "800" { // the API takes one without a version as it is
				conflicts++
				return true, nil, apierrors.NewConflict(v1.Resource("nodes"), "n1", errors.New("the object has been modified"))
			}
			return false, nil, nil
		})
		n := node.New(node.Config{Name: "n1", Client: api, DataDir: t.TempDir(), Annotations: map[string]string{"of": "the new program"}})
		n.Recall(cluster.Node)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		must(t, n.Run(ctx))
		got, err := api.CoreV1().Nodes().Get(t.Context(), "n1", metav1.GetOptions{})
		if err != nil || got.Labels["a"] != "2" || got.Spec.Unschedulable || len(got.Status.VolumesAttached) > 0 || len(got.Status.Conditions) == 0 || got.Annotations["of"] == "" || conflicts == 0 {
			t.Errorf("%d conflicts, %+v, %v", conflicts, got, err)
		}
	})
}

type nodeAgent struct {
	*fakeAgent
	node *v1.Node
}

func (a *nodeAgent) Node() *v1.Node { return a.node }

// TestKeeperMaxAge: a node that has had no API for too long, or for a time that is not known, starts
// nothing; a clock that was put back does not count. The time is noted while there is an API.
func TestKeeperMaxAge(t *testing.T) {
	for what, c := range map[string]struct {
		last  time.Duration // since the API was there; 0: it is not on record
		limit time.Duration
		want  int
	}{
		"lately":            {time.Hour, 24 * time.Hour, 1},
		"too long ago":      {25 * time.Hour, 24 * time.Hour, 0},
		"no limit":          {25 * time.Hour, 0, 1},
		"it is not known":   {0, 24 * time.Hour, 0},
		"the clock is 1970": {-24 * time.Hour, 24 * time.Hour, 1},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				a, s := newFakeAgent(), open(t, t.TempDir(), key)
				must(t, errors.Join(s.PutPod(withSecret(t, "a")), s.PutCluster(&Cluster{Node: a.Node()})))
				if c.last != 0 {
					must(t, s.PutContact(time.Now().Add(-c.last)))
				}
				k := NewKeeper(t.Context(), Config{Store: s, Gate: NewGate("n1"), NodeName: "n1", After: 30 * time.Second, MaxAge: c.limit})
				ctx, cancel := context.WithCancel(t.Context())
				var wg sync.WaitGroup
				defer wg.Wait()
				defer cancel()
				wg.Go(func() { _ = k.Run(ctx, a) })
				time.Sleep(time.Minute)
				a.change(func() {
					if a.isolated != c.want {
						t.Errorf("isolated %d times", a.isolated)
					}
				})
				close(a.listed)
				time.Sleep(time.Hour)
				if at, err := s.Contact(); err != nil || time.Since(at) != time.Hour {
					t.Errorf("had an API at %s, %v", at, err)
				}
				noted := time.Now()
				k.Gate().note(&http.Response{StatusCode: http.StatusOK}, nil)
				time.Sleep(2 * contactEvery)
				if at, err := s.Contact(); err != nil || !at.Equal(noted) {
					t.Errorf("had an API at %s, %v", at, err)
				}
			})
		})
	}
}

// TestKeeperWritesTheClusterSeldom: the cluster's record is written for what it says, not for versions
// and annotations of policies, and for policies that change all the time not all the time.
func TestKeeperWritesTheClusterSeldom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dir, a := t.TempDir(), newFakeAgent()
		close(a.listed)
		k := NewKeeper(t.Context(), Config{Store: open(t, dir, key), Gate: NewGate("n1"), NodeName: "n1", After: time.Minute})
		policy := &networkingv1.NetworkPolicy{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "default", Generation: 1, ResourceVersion: "1"}}
		api := fake.NewClientset(policy)
		policies := informers.NewSharedInformerFactory(api, 0).Networking().V1().NetworkPolicies().Informer()
		must(t, k.Follow("NetworkPolicy", policies, false))
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		defer wg.Wait()
		defer cancel()
		wg.Go(func() { policies.RunWithContext(ctx) })
		wg.Go(func() { _ = k.Run(ctx, a) })
		var last []byte
		// writes counts those of two minutes in which something changes each second
		writes := func(change func(i int)) (n int) {
			for i := range 120 {
				change(i)
				_, err := api.NetworkingV1().NetworkPolicies("default").Update(ctx, policy, metav1.UpdateOptions{})
				must(t, err)
				time.Sleep(time.Second)
				b, err := os.ReadFile(filepath.Join(dir, clusterFile))
				if err == nil && !bytes.Equal(b, last) { // the nonce is another each time
					n++
				}
				last = b
			}
			return n
		}
		time.Sleep(2 * time.Minute)
		last, _ = os.ReadFile(filepath.Join(dir, clusterFile))
		if len(last) == 0 {
			t.Fatal("no record")
		}
		if n := writes(func(i int) { policy.ResourceVersion = fmt.Sprint(100 + i) }); n > 0 {
			t.Errorf("%d writes for new versions alone", n)
		}
		if n := writes(func(i int) {
			policy.ResourceVersion, policy.Annotations = fmt.Sprint(300+i), map[string]string{"i": fmt.Sprint(i)}
		}); n > 3 {
			t.Errorf("%d writes for annotations", n)
		}
		time.Sleep(time.Minute)
		n := writes(func(i int) {
			policy.ResourceVersion, policy.Generation = fmt.Sprint(500+i), int64(2+i)
			policy.Spec.PodSelector.MatchLabels = map[string]string{"i": fmt.Sprint(i)}
		})
		if n < 6 || n > 13 {
			t.Errorf("%d writes in two minutes for a policy that changes each second", n)
		}
	})
}
