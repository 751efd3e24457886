package kubestore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
)

// Many objects go at once, with and without the cache: each as it was seen or
// not at all. A watcher gets each with its last state, under versions that
// ascend.
func TestDeleteEach(t *testing.T) {
	for _, cached := range []bool{false, true} {
		t.Run(fmt.Sprint("cached=", cached), func(t *testing.T) {
			f := newFixture(t, setup{cached: cached})
			deleter, ok := f.storage.(interface {
				DeleteEach(context.Context, []string, []uint64) ([]bool, error)
			})
			if !ok {
				t.Fatalf("%T cannot delete many", f.storage)
			}
			const n = 20
			var keys []string
			var versions []uint64
			var last uint64
			for i := range n {
				key := fmt.Sprintf("/pods/ns/p%02d", i)
				pod := &example.Pod{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("p%02d", i), Namespace: "ns", Labels: map[string]string{"i": fmt.Sprint(i)}}}
				out := &example.Pod{}
				if err := f.storage.Create(f.ctx, key, pod, out, 0); err != nil {
					t.Fatal(err)
				}
				version, err := storage.APIObjectVersioner{}.ObjectResourceVersion(out)
				if err != nil {
					t.Fatal(err)
				}
				keys, versions, last = append(keys, key), append(versions, version), version
			}
			versions[3]++ // as if it had changed since
			predicate := storage.Everything
			predicate.GetAttrs = podAttrs
			w, err := f.storage.Watch(f.ctx, "/pods/ns/", storage.ListOptions{ResourceVersion: fmt.Sprint(last), Recursive: true, Predicate: predicate})
			if err != nil {
				t.Fatal(err)
			}
			defer w.Stop()
			deleted, err := deleter.DeleteEach(f.ctx, keys, versions)
			if err != nil {
				t.Fatal(err)
			}
			for i, gone := range deleted {
				if gone == (i == 3) {
					t.Errorf("%s deleted: %t", keys[i], gone)
				}
			}
			for i := range n {
				if i == 3 {
					continue
				}
				e := <-w.ResultChan()
				if shared, ok := e.Object.(runtime.CacheableObject); ok {
					e.Object = shared.GetObject()
				}
				pod, isPod := e.Object.(*example.Pod)
				if !isPod || e.Type != watch.Deleted || pod.Name != fmt.Sprintf("p%02d", i) || pod.Labels["i"] != fmt.Sprint(i) {
					t.Fatalf("event %d: %+v", i, e)
				}
				version, _ := storage.APIObjectVersioner{}.ObjectResourceVersion(pod)
				if version <= last {
					t.Errorf("%s went at %d after %d", pod.Name, version, last)
				}
				last = version
			}
			again, err := deleter.DeleteEach(f.ctx, keys, versions)
			if err != nil || slices.Contains(again, true) {
				t.Errorf("a second time: %v, %v", again, err)
			}
		})
	}
}

func TestDeleteEachRefuses(t *testing.T) {
	f := newFixture(t, setup{})
	for what, tc := range map[string]struct {
		keys     []string
		versions []uint64
	}{
		"another resource's key": {[]string{"/secrets/ns/s"}, []uint64{1}},
		"too few versions":       {[]string{"/pods/ns/a"}, nil},
		"keys that descend":      {[]string{"/pods/ns/b", "/pods/ns/a"}, []uint64{1, 1}},
		"version 0":              {[]string{"/pods/ns/a"}, []uint64{0}},
	} {
		if _, err := f.raw.DeleteEach(f.ctx, tc.keys, tc.versions); err == nil {
			t.Errorf("%s: no error", what)
		}
	}
	refused := errors.New("no more for now")
	f.raw.reserve = func(context.Context, string, int64) (func(), error) { return nil, refused }
	if _, err := f.raw.DeleteEach(f.ctx, []string{"/pods/ns/a"}, []uint64{1}); !errors.Is(err, refused) {
		t.Errorf("beyond the budget: %v", err)
	}
	if _, err := f.raw.DeleteEach(f.ctx, nil, nil); err != nil {
		t.Errorf("nothing: %v", err)
	}
}
