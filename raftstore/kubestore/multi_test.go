package kubestore

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

const counterKey = "/pods/ns/counter"

// openOn is the storage of pods as one member's API server has it.
func openOn(t *testing.T, store Store, cached bool) storage.Interface {
	t.Helper()
	codec := testCodecs.LegacyCodec(schema.GroupVersion{Group: "example.apiserver.k8s.io", Version: "v1"})
	keyFunc := func(obj runtime.Object) (string, error) { return storage.NamespaceKeyFunc("/pods/", obj) }
	s, destroy, err := NewDecorator(Config{Store: store, Cache: cached})(
		storagebackend.NewDefaultConfig("", codec).ForResource(podsGR), "/pods/", keyFunc, newPod, newPodList, podAttrs, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(destroy)
	eventually(t, "the storage is ready", func() bool { return s.ReadinessCheck() == nil })
	return s
}

// Whatever one member's API server has acknowledged, the next request at any
// other sees, with and without the cache.
func TestMultiReadAfterWriteElsewhere(t *testing.T) {
	for _, cached := range []bool{false, true} {
		t.Run(fmt.Sprintf("cached=%v", cached), func(t *testing.T) {
			members := raftstoretest.New(t, 3, nil)
			var servers []storage.Interface
			for _, id := range members.IDs() {
				servers = append(servers, openOn(t, members.Store(id), cached))
			}
			for i := range 30 {
				writer, reader := servers[i%3], servers[(i+1)%3]
				pod := &example.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("pod-%d", i), Namespace: "ns"}}
				key := "/pods/ns/" + pod.Name
				created := &example.Pod{}
				if err := writer.Create(t.Context(), key, pod, created, 0); err != nil {
					t.Fatal(err)
				}
				if err := reader.Get(t.Context(), key, storage.GetOptions{}, &example.Pod{}); err != nil {
					t.Fatalf("get %s elsewhere: %v", key, err)
				}
				list := &example.PodList{}
				if err := reader.GetList(t.Context(), "/pods/", storage.ListOptions{Predicate: storage.Everything, Recursive: true}, list); err != nil || len(list.Items) != i+1 {
					t.Fatalf("list elsewhere: %d pods, want %d: %v", len(list.Items), i+1, err)
				}
				at := storage.GetOptions{ResourceVersion: created.ResourceVersion}
				if err := reader.Get(t.Context(), key, at, &example.Pod{}); err != nil {
					t.Fatalf("get %s at %s elsewhere: %v", key, at.ResourceVersion, err)
				}
			}
		})
	}
}

// Three API servers count one object up, each from its own cached state of
// the object; the leader is killed meanwhile. No acknowledged step may be lost, none
// may count twice, and a watch sees every step once and in order.
func TestMultiUpdatesSurviveLeader(t *testing.T) {
	const steps = 40
	members := raftstoretest.New(t, 3, func(c *raftstore.Config) { c.LeaderWait = raftstoretest.Timeout })
	victim := members.LeaderID()
	var watcher storage.Interface
	servers := map[string]storage.Interface{}
	for _, id := range members.IDs() {
		servers[id] = openOn(t, members.Store(id), false)
		if id != victim {
			watcher = servers[id]
		}
	}
	pod := &example.Pod{ObjectMeta: metav1.ObjectMeta{Name: "counter", Namespace: "ns", Labels: map[string]string{"n": "0"}}}
	if err := servers[victim].Create(t.Context(), counterKey, pod, nil, 0); err != nil {
		t.Fatal(err)
	}
	w, err := watcher.Watch(t.Context(), "/pods/", storage.ListOptions{Predicate: storage.Everything, Recursive: true})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()

	var mu sync.Mutex
	acknowledged, unknown := 0, 0
	var wg sync.WaitGroup
	for id, s := range servers {
		wg.Go(func() {
			for i := range steps {
				if id == victim && i == steps/2 {
					members.Kill(id)
					return
				}
				err := countUp(t.Context(), s)
				mu.Lock()
				switch {
				case err == nil:
					acknowledged++
				case apierrors.IsTimeout(err):
					unknown++
				case !apierrors.IsServiceUnavailable(err) || id != victim:
					t.Errorf("%s: %v", id, err)
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()

	last := &example.Pod{}
	if err := watcher.Get(t.Context(), counterKey, storage.GetOptions{}, last); err != nil {
		t.Fatal(err)
	}
	total := count(t, last)
	if total < acknowledged || total > acknowledged+unknown {
		t.Errorf("counted to %d with %d steps acknowledged and %d unknown", total, acknowledged, unknown)
	}
	if min := 2 * steps; acknowledged+unknown < min {
		t.Errorf("only %d steps were tried to the end, want %d", acknowledged+unknown, min)
	}
	// The watch begins with the state of some moment after it was asked for.
	e := next(t, w)
	for want := count(t, e.Object); ; want, e = want+1, next(t, w) {
		if e.Type != watch.Added && e.Type != watch.Modified {
			t.Fatalf("watch: %s %v", e.Type, e.Object)
		}
		if got := count(t, e.Object); got != want {
			t.Fatalf("watch saw %d, want %d", got, want)
		}
		if want == total {
			break
		}
	}
}

// countUp adds one. Each step is written by its own transaction, so a repeated
// try of kubestore's loop must start from what is there.
func countUp(ctx context.Context, s storage.Interface) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	return s.GuaranteedUpdate(ctx, counterKey, &example.Pod{}, false, nil,
		func(in runtime.Object, _ storage.ResponseMeta) (runtime.Object, *uint64, error) {
			pod := in.(*example.Pod)
			n, err := strconv.Atoi(pod.Labels["n"])
			if err != nil {
				return nil, nil, errors.New("the counter is no number")
			}
			pod.Labels = map[string]string{"n": strconv.Itoa(n + 1)}
			return pod, nil, nil
		}, nil)
}

func count(t *testing.T, obj runtime.Object) int {
	t.Helper()
	n, err := strconv.Atoi(obj.(*example.Pod).Labels["n"])
	if err != nil {
		t.Fatal(err)
	}
	return n
}
