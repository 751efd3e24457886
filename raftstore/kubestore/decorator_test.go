package kubestore

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

func TestDecoratorChoosesTheCache(t *testing.T) {
	store := openStore(t, nil)
	codec := testCodecs.LegacyCodec(schema.GroupVersion{Group: "example.apiserver.k8s.io", Version: "v1"})
	for _, tt := range []struct {
		resource schema.GroupResource
		cache    bool
		want     string
	}{
		{podsGR, true, "cached"},
		{podsGR, false, "raw"},
		{schema.GroupResource{Resource: "events"}, true, "raw"},
		{schema.GroupResource{Group: "events.k8s.io", Resource: "events"}, true, "raw"},
	} {
		t.Run(fmt.Sprintf("%s, cache %v", tt.resource, tt.cache), func(t *testing.T) {
			config := storagebackend.NewDefaultConfig("", codec).ForResource(tt.resource)
			config.EventsHistoryWindow = 0 // ours must do
			keyFunc := func(obj runtime.Object) (string, error) { return storage.NamespaceKeyFunc("/things", obj) }
			s, destroy, err := NewDecorator(Config{Store: store, Cache: tt.cache})(
				config, "/things", keyFunc, newPod, newPodList, podAttrs, nil, nil)
			if err != nil {
				t.Fatal(err)
			}
			defer destroy()
			destroy() // subresources share a storage and destroy it again
			got := "raw"
			if _, ok := s.(*resuming); ok {
				got = "cached"
			}
			if got != tt.want {
				t.Errorf("storage is %s, want %s", got, tt.want)
			}
		})
	}
}

func TestNewRefusesWhatCannotWork(t *testing.T) {
	good := Options{Store: openStore(t, nil), Codec: &breakableCodec{}, ResourcePrefix: "/pods"}
	for name, spoil := range map[string]func(*Options){
		"no store":        func(o *Options) { o.Store = nil },
		"no codec":        func(o *Options) { o.Codec = nil },
		"no folder":       func(o *Options) { o.ResourcePrefix = "" },
		"root folder":     func(o *Options) { o.ResourcePrefix = "/" },
		"relative folder": func(o *Options) { o.ResourcePrefix = "pods" },
	} {
		o := good
		spoil(&o)
		if _, err := New(o); err == nil {
			t.Errorf("%s: accepted", name)
		}
	}
	if _, err := New(good); err != nil {
		t.Error(err)
	}
}

// The real store forgets its history by size; what is asked of the forgotten
// part must end in 410, and a chunked list must be able to go on.
func TestForgottenHistory(t *testing.T) {
	s := openStore(t, func(c *raftstore.Config) { c.HistoryBytes = 1 << 10 })
	raw, err := New(Options{Store: s, ResourcePrefix: "/pods", GroupResource: podsGR, Codec: testCodecs.LegacyCodec(schema.GroupVersion{Group: "example.apiserver.k8s.io", Version: "v1"}), NewFunc: newPod})
	if err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	for _, name := range []string{"a", "b", "c"} {
		pod := &example.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns"}}
		if err := raw.Create(ctx, "/pods/ns/"+name, pod, nil, 0); err != nil {
			t.Fatal(err)
		}
	}
	page := func(rv, token string, match metav1.ResourceVersionMatch) (*example.PodList, error) {
		list := &example.PodList{}
		pred := storage.Everything
		pred.Limit, pred.Continue = 1, token
		return list, raw.GetList(ctx, "/pods", storage.ListOptions{ResourceVersion: rv, ResourceVersionMatch: match, Predicate: pred, Recursive: true}, list)
	}
	first, err := page("", "", "")
	if err != nil {
		t.Fatal(err)
	}
	if first.RemainingItemCount == nil || *first.RemainingItemCount != 2 {
		t.Errorf("remaining item count %v, want 2", first.RemainingItemCount)
	}
	old, err := raw.Versioner().ParseResourceVersion(first.ResourceVersion)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the history has moved on", func() bool {
		op := mvcc.Op{Type: mvcc.OpPut, Key: "elsewhere", Value: make([]byte, 1<<10)}
		if _, err := s.Txn(ctx, mvcc.Txn{Ops: []mvcc.Op{op}}); err != nil {
			t.Fatal(err)
		}
		return s.OldestRevision() > int64(old)
	})
	if _, err := page(first.ResourceVersion, "", metav1.ResourceVersionMatchExact); !apierrors.IsResourceExpired(err) {
		t.Errorf("list of a forgotten revision: %v", err)
	}
	_, err = page("", first.Continue, "")
	var status apierrors.APIStatus
	if !apierrors.IsResourceExpired(err) || !errors.As(err, &status) || status.Status().ListMeta.Continue == "" {
		t.Fatalf("chunk of a forgotten revision: %v", err)
	}
	var names []string
	for token := status.Status().ListMeta.Continue; token != ""; {
		list, err := page("", token, "")
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, list.Items[0].Name)
		token = list.Continue
	}
	if !slices.Equal(names, []string{"b", "c"}) {
		t.Errorf("the rest of the list is %v", names)
	}
	w, err := raw.Watch(ctx, "/pods", storage.ListOptions{ResourceVersion: first.ResourceVersion, Predicate: storage.Everything, Recursive: true})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	if e := next(t, w); e.Type != watch.Error || e.Object.(*metav1.Status).Reason != metav1.StatusReasonExpired {
		t.Errorf("watch of a forgotten revision: %v %v", e.Type, e.Object)
	}
	if _, open := <-w.ResultChan(); open {
		t.Error("the watch goes on after its error")
	}
}

// A consistent list of a quiet resource through the cache must not wait for
// the cache's own periodic question how far the store is.
func TestCachedListFollowsOtherResources(t *testing.T) {
	f := newFixture(t, setup{cached: true})
	asked := uint64(1)
	for try := 0; try < 5 && asked > 0; try++ { // a cache that is not there in three seconds has the store listed
		rev, before := f.increaseRV(f.ctx, t), f.store.lists.Load()
		list := &example.PodList{}
		if err := f.storage.GetList(f.ctx, "/pods/", storage.ListOptions{Predicate: storage.Everything, Recursive: true}, list); err != nil {
			t.Fatal(err)
		}
		if got := list.ResourceVersion; got != fmt.Sprint(rev) {
			t.Errorf("list at resource version %s, want %d", got, rev)
		}
		asked = f.store.lists.Load() - before
	}
	if asked > 0 {
		t.Errorf("the store was listed, so the cache did not answer")
	}
}

func next(t *testing.T, w watch.Interface) watch.Event {
	t.Helper()
	select {
	case e := <-w.ResultChan():
		return e
	case <-time.After(time.Minute):
		t.Fatal("no event")
	}
	return watch.Event{}
}

// A cache that starts late, as after a restart, lets a client go on from the
// revision it had: every change once and in order, then bookmarks. What the
// store has forgotten too is refused with what it still has.
func TestWatchResumesBeforeTheCache(t *testing.T) {
	store := openStore(t, func(c *raftstore.Config) { c.HistoryBytes = 64 << 10 })
	raw := openOn(t, store, false)
	create := func(name string) int {
		t.Helper()
		created := &example.Pod{}
		pod := &example.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "ns"}}
		if err := raw.Create(t.Context(), "/pods/ns/"+name, pod, created, 0); err != nil {
			t.Fatal(err)
		}
		rev, err := strconv.Atoi(created.ResourceVersion)
		if err != nil {
			t.Fatal(err)
		}
		return rev
	}
	before := create("before")
	first, second := create("first"), create("second")
	cached := openOn(t, store, true)
	everything := storage.Everything
	everything.AllowWatchBookmarks = true
	w, err := cached.Watch(t.Context(), "/pods/", storage.ListOptions{ResourceVersion: fmt.Sprint(before), Predicate: everything, Recursive: true})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	want := []int{first, second, create("third")}
	nextChange := func() watch.Event { // bookmarks may come at any time
		for {
			if e := next(t, w); e.Type != watch.Bookmark {
				return e
			}
		}
	}
	for _, rev := range want {
		e := nextChange()
		pod, ok := e.Object.(*example.Pod)
		if !ok || e.Type != watch.Added || pod.ResourceVersion != fmt.Sprint(rev) {
			t.Fatalf("got %s %v, want revision %d", e.Type, e.Object, rev)
		}
	}
	res, err := store.Txn(t.Context(), mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "elsewhere"}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := cached.(*resuming).raw.RequestWatchProgress(t.Context()); err != nil {
		t.Fatal(err)
	}
	for e := next(t, w); ; e = next(t, w) {
		if e.Type != watch.Bookmark {
			t.Fatalf("got %s %v, want a bookmark", e.Type, e.Object)
		}
		if e.Object.(*example.Pod).ResourceVersion == fmt.Sprint(res.Revision) {
			break
		}
	}

	eventually(t, "the store has forgotten it too", func() bool {
		op := mvcc.Op{Type: mvcc.OpPut, Key: "elsewhere", Value: make([]byte, 16<<10)}
		if _, err := store.Txn(t.Context(), mvcc.Txn{Ops: []mvcc.Op{op}}); err != nil {
			t.Fatal(err)
		}
		return store.OldestRevision() > int64(before)
	})
	late, err := cached.Watch(t.Context(), "/pods/", storage.ListOptions{ResourceVersion: fmt.Sprint(before), Predicate: everything, Recursive: true})
	if err != nil {
		t.Fatal(err)
	}
	defer late.Stop()
	e := next(t, late)
	status, ok := e.Object.(*metav1.Status)
	if !ok || e.Type != watch.Error || status.Reason != metav1.StatusReasonExpired || !strings.Contains(status.Message, fmt.Sprint(store.OldestRevision())) {
		t.Errorf("a watch from before the history: %s %v", e.Type, e.Object)
	}
}

// Reads of one object in a context with a revision show it as it was, behind a
// cache too.
func TestGetAtRevision(t *testing.T) {
	for _, cached := range []bool{false, true} {
		f := newFixture(t, setup{cached: cached})
		const key = "/pods/ns/foo"
		created, updated := &example.Pod{}, &example.Pod{}
		if err := f.storage.Create(f.ctx, key, &example.Pod{ObjectMeta: metav1.ObjectMeta{Name: "foo", Namespace: "ns"}}, created, 0); err != nil {
			t.Fatal(err)
		}
		label := func(in runtime.Object, _ storage.ResponseMeta) (runtime.Object, *uint64, error) {
			in.(*example.Pod).Labels = map[string]string{"a": "b"}
			return in, nil, nil
		}
		if err := f.storage.GuaranteedUpdate(f.ctx, key, updated, false, nil, label, nil); err != nil {
			t.Fatal(err)
		}
		for _, want := range []*example.Pod{created, updated} {
			at, err := strconv.ParseInt(want.ResourceVersion, 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			got := &example.Pod{}
			if err := f.storage.Get(WithRevision(f.ctx, at), key, storage.GetOptions{}, got); err != nil {
				t.Fatalf("cached %v, at %d: %v", cached, at, err)
			}
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("cached %v, at %d: %s", cached, at, diff)
			}
		}
		at, _ := strconv.ParseInt(created.ResourceVersion, 10, 64)
		if err := f.storage.Get(WithRevision(f.ctx, at-1), key, storage.GetOptions{}, &example.Pod{}); !storage.IsNotFound(err) {
			t.Errorf("cached %v, before its creation: %v", cached, err)
		}
	}
}

// TestOriginOfBudget: a user who is called as the leader names members is charged under the name that
// the history has, which is no other user's.
func TestOriginOfBudget(t *testing.T) {
	store := openStore(t, nil)
	codec := testCodecs.LegacyCodec(schema.GroupVersion{Group: "example.apiserver.k8s.io", Version: "v1"})
	var reserved string
	s, err := New(Options{Store: store, ResourcePrefix: "/pods", GroupResource: podsGR, Codec: codec, NewFunc: newPod,
		Origin: func(context.Context) string { return "bob [from n7]" },
		Reserve: func(_ context.Context, origin string, _ int64) (func(), error) {
			reserved = origin
			return func() {}, nil
		}})
	if err != nil {
		t.Fatal(err)
	}
	const key = "/pods/ns/foo"
	if err := s.Create(t.Context(), key, &example.Pod{ObjectMeta: metav1.ObjectMeta{Name: "foo", Namespace: "ns"}}, nil, 0); err != nil {
		t.Fatal(err)
	}
	changes, err := NewPast(store, "").Changes(t.Context(), key, 0)
	if err != nil || len(changes.List) != 1 {
		t.Fatalf("%+v, %v", changes, err)
	}
	if written := changes.List[0].Origin; written != reserved || reserved == "bob" {
		t.Errorf("reserved by %q, written by %q", reserved, written)
	}
}

// Each change says who made the request, cut to a bearable length.
func TestChangesNameTheirOrigin(t *testing.T) {
	store := openStore(t, nil)
	type who struct{}
	codec := testCodecs.LegacyCodec(schema.GroupVersion{Group: "example.apiserver.k8s.io", Version: "v1"})
	s, err := New(Options{Store: store, ResourcePrefix: "/pods", GroupResource: podsGR, Codec: codec, NewFunc: newPod,
		Origin: func(ctx context.Context) string { return ctx.Value(who{}).(string) }})
	if err != nil {
		t.Fatal(err)
	}
	as := func(name string) context.Context { return context.WithValue(t.Context(), who{}, name) }
	const key = "/pods/ns/foo"
	if err := s.Create(as("ann"), key, &example.Pod{ObjectMeta: metav1.ObjectMeta{Name: "foo", Namespace: "ns"}}, nil, 0); err != nil {
		t.Fatal(err)
	}
	label := func(in runtime.Object, _ storage.ResponseMeta) (runtime.Object, *uint64, error) {
		in.(*example.Pod).Labels = map[string]string{"a": "b"}
		return in, nil, nil
	}
	if err := s.GuaranteedUpdate(as(strings.Repeat("ü", 200)), key, &example.Pod{}, false, nil, label, nil); err != nil {
		t.Fatal(err)
	}
	if err := s.Delete(as("bad \xff name"), key, &example.Pod{}, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	changes, err := NewPast(store, "").Changes(t.Context(), key, 0)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, c := range changes.List {
		got = append(got, fmt.Sprintf("%s deleted=%v", c.Origin, c.Deleted))
	}
	want := []string{"ann deleted=false", strings.Repeat("ü", 54) + "…cb26b0de5a63c843 deleted=false", "bad \uFFFD name deleted=true"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if changes.Base != 0 || changes.More || changes.Newest != changes.List[2].Revision || changes.Oldest >= changes.List[0].Revision {
		t.Errorf("%+v", changes)
	}
}
