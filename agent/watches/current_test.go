package watches

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/client-go/tools/cache"
)

func node(name, version string) v1.Node {
	return v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, ResourceVersion: version}}
}

// TestReached: what is older than the API's, or was deleted there, is the past; what is
// newer, also where it is not listed, is not.
func TestReached(t *testing.T) {
	list := &v1.NodeList{ListMeta: metav1.ListMeta{ResourceVersion: "100"}, Items: []v1.Node{node("a", "9"), node("b", "95")}}
	for name, tt := range map[string]struct {
		held    []v1.Node
		version string // of the store
		want    bool
	}{
		"the same":             {[]v1.Node{node("a", "9"), node("b", "95")}, "95", true},
		"newer":                {[]v1.Node{node("a", "101"), node("b", "95")}, "95", true},
		"older":                {[]v1.Node{node("a", "9"), node("b", "94")}, "94", false},
		"less":                 {[]v1.Node{node("a", "9")}, "9", false},
		"none":                 {nil, "", false},
		"one was deleted":      {[]v1.Node{node("a", "9"), node("b", "95"), node("c", "50")}, "95", false},
		"one is made since":    {[]v1.Node{node("a", "9"), node("b", "95"), node("c", "101")}, "95", true},
		"one is deleted since": {[]v1.Node{node("a", "9")}, "102", true},
	} {
		held := cache.NewStore(cache.MetaNamespaceKeyFunc)
		for i := range tt.held {
			if err := held.Add(&tt.held[i]); err != nil {
				t.Fatal(err)
			}
		}
		held.Bookmark(tt.version)
		m, err := markOf(held, runtime.Object(list))
		if err != nil {
			t.Fatal(err)
		}
		if got := m.reached(held); got != tt.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// The bug: what was written since was waited for as well, so that who writes Services
// all the time kept all nodes from ever being current; and each look listed everything.
func TestCurrentWhileThingsAreWritten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		client := fake.NewClientset()
		var written, lists atomic.Int64
		written.Store(100)
		client.PrependReactor("list", "nodes", func(clienttesting.Action) (bool, runtime.Object, error) {
			now := fmt.Sprint(written.Load())
			lists.Add(1)
			return true, &v1.NodeList{ListMeta: metav1.ListMeta{ResourceVersion: now}, Items: []v1.Node{node("a", now)}}, nil
		})
		w, err := New(client)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		defer wg.Wait()
		defer cancel()
		wg.Go(func() { // the watch is always one write behind
			for ctx.Err() == nil {
				n := node("a", fmt.Sprint(written.Add(1)-1))
				if err := w.Nodes.GetStore().Add(&n); err != nil {
					t.Error(err)
				}
				time.Sleep(20 * time.Millisecond)
			}
		})
		limit, stop := context.WithTimeout(ctx, 10*time.Second)
		defer stop()
		if err := w.Current(limit); err != nil {
			t.Error(err)
		}
		if n := lists.Load(); n != 1 {
			t.Errorf("Nodes were listed %d times, want once", n)
		}
	})
}

// A watch that has not come back is named, at the end of the time given.
func TestNotCurrent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, err := New(fake.NewClientset(&v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: "s", ResourceVersion: "7"}}))
		if err != nil {
			t.Fatal(err)
		}
		limit, stop := context.WithTimeout(t.Context(), time.Second)
		defer stop()
		if err := w.Current(limit); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "watch of Services") {
			t.Errorf("%v", err)
		}
	})
}
