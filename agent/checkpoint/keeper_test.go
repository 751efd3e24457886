package checkpoint

import (
	"context"
	"net/http"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

// fakeAgent has the pods of its map.
type fakeAgent struct {
	mu       sync.Mutex
	pods     map[types.UID]*Pod
	unread   map[types.UID]bool
	started  []string
	listed   chan struct{}
	forgot   []types.UID
	isolated int
}

func (a *fakeAgent) Record(uid types.UID) (*Pod, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.pods[uid], !a.unread[uid]
}

func (a *fakeAgent) Node() *v1.Node {
	return &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "n1", UID: "u"}}
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
	k = NewKeeper(t.Context(), Config{Store: s, Gate: NewGate(), NodeName: "n1", After: 30 * time.Second})
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
		time.Sleep(time.Minute)
		k.PodChanged("uid-a")
		uids := func() []types.UID {
			out, err := k.cfg.Store.UIDs()
			must(t, err)
			return out
		}
		a.change(func() { a.pods["uid-a"], a.pods["uid-b"] = withSecret(t, "a"), withSecret(t, "b") })
		time.Sleep(time.Minute)
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
		k.Gate().refused.Store(false)
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
		if u, err := ReadUnconfirmed(dir); err != nil || len(u.Pods) != 1 {
			t.Errorf("confirmed before the API's list: %v, %v", u, err)
		}
		close(a.listed)
		time.Sleep(2 * time.Second)
		if u, err := ReadUnconfirmed(dir); err != nil || len(u.Pods) != 0 {
			t.Error(u, err)
		}
		if got := uids(); len(got) > 0 {
			t.Errorf("the record of a pod that is no more stays: %v", got)
		}
	})
}
