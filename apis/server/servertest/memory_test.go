package servertest

import (
	"context"
	"fmt"
	"testing"

	"k8s.io/apimachinery/pkg/api/apitesting"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	st "k8s.io/apiserver/pkg/storage/testing"
)

// twin is one storage of pods over a Memory of its own.
type twin struct {
	storage.Interface
	memory *Memory
	codec  runtime.Codec
}

func newTwin(t *testing.T, namespaced bool) *twin {
	t.Helper()
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, metav1.SchemeGroupVersion)
	for _, add := range []func(*runtime.Scheme) error{example.AddToScheme, examplev1.AddToScheme} {
		if err := add(scheme); err != nil {
			t.Fatal(err)
		}
	}
	w := &twin{memory: NewMemory(), codec: apitesting.TestCodec(serializer.NewCodecFactory(scheme), examplev1.SchemeGroupVersion)}
	key := func(obj runtime.Object) (string, error) { return storage.NamespaceKeyFunc("/pods/", obj) }
	if !namespaced {
		key = func(obj runtime.Object) (string, error) { return storage.NoNamespaceKeyFunc("/pods/", obj) }
	}
	s, destroy, err := w.memory.Decorator()(
		storagebackend.NewDefaultConfig("", w.codec).ForResource(schema.GroupResource{Resource: "pods"}), "/pods", key,
		func() runtime.Object { return &example.Pod{} }, func() runtime.Object { return &example.PodList{} },
		func(obj runtime.Object) (labels.Set, fields.Set, error) {
			pod, ok := obj.(*example.Pod)
			if !ok {
				return nil, nil, fmt.Errorf("%T is not a pod", obj)
			}
			return pod.Labels, fields.Set{"metadata.name": pod.Name, "spec.nodeName": pod.Spec.NodeName}, nil
		}, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(destroy)
	w.Interface = s
	return w
}

// stored is upstream's check of what lies in the store: objects have no version there.
func (w *twin) stored(_ context.Context, t *testing.T, key string) {
	w.memory.mu.Lock()
	e, ok := w.memory.entries[key]
	w.memory.mu.Unlock()
	if !ok {
		t.Fatalf("%s is not stored", key)
	}
	obj, err := runtime.Decode(w.codec, e.data)
	if err != nil {
		t.Fatal(err)
	}
	if pod := obj.(*example.Pod); pod.ResourceVersion != "" || pod.SelfLink != "" {
		t.Errorf("%s is stored with resourceVersion %q and selfLink %q", key, pod.ResourceVersion, pod.SelfLink)
	}
}

// rise writes outside of the pods.
func (w *twin) rise(context.Context, *testing.T) int64 {
	w.memory.mu.Lock()
	defer w.memory.mu.Unlock()
	return int64(w.memory.put("/elsewhere", []byte("x")))
}

// suite is what the twin has to share with the real store, which passes all of
// upstream's suite for implementations of storage.Interface
// (raftstore/kubestore/suite_test.go).
var suite = []struct {
	name       string
	run        func(ctx context.Context, t *testing.T, w *twin)
	namespaces bool
}{
	{name: "RunTestCreate", run: func(ctx context.Context, t *testing.T, w *twin) { st.RunTestCreate(ctx, t, w, w.stored) }},
	{name: "RunTestCreateWithKeyExist", run: plain(st.RunTestCreateWithKeyExist)},
	{name: "RunTestGet", run: plain(st.RunTestGet)},
	{name: "RunTestUnconditionalDelete", run: plain(st.RunTestUnconditionalDelete)},
	{name: "RunTestConditionalDelete", run: plain(st.RunTestConditionalDelete)},
	{name: "RunTestDeleteWithSuggestion", run: plain(st.RunTestDeleteWithSuggestion)},
	{name: "RunTestDeleteWithSuggestionAndConflict", run: plain(st.RunTestDeleteWithSuggestionAndConflict)},
	{name: "RunTestDeleteWithConflict", run: plain(st.RunTestDeleteWithConflict)},
	{name: "RunTestDeleteWithSuggestionOfDeletedObject", run: plain(st.RunTestDeleteWithSuggestionOfDeletedObject)},
	{name: "RunTestValidateDeletionWithSuggestion", run: plain(st.RunTestValidateDeletionWithSuggestion)},
	{name: "RunTestValidateDeletionWithOnlySuggestionValid", run: plain(st.RunTestValidateDeletionWithOnlySuggestionValid)},
	{name: "RunTestPreconditionalDeleteWithSuggestion", run: plain(st.RunTestPreconditionalDeleteWithSuggestion)},
	{name: "RunTestPreconditionalDeleteWithOnlySuggestionPass", run: plain(st.RunTestPreconditionalDeleteWithOnlySuggestionPass)},
	{name: "RunTestGuaranteedUpdateWithConflict", run: plain(st.RunTestGuaranteedUpdateWithConflict)},
	{name: "RunTestGuaranteedUpdateWithSuggestionAndConflict", run: plain(st.RunTestGuaranteedUpdateWithSuggestionAndConflict)},
	{name: "RunTestGetListRecursivePrefix", run: plain(st.RunTestGetListRecursivePrefix)},
	{name: "RunTestNamespaceScopedList", run: plain(st.RunTestNamespaceScopedList), namespaces: true},
	{name: "RunTestWatch", run: plain(st.RunTestWatch)},
	{name: "RunTestClusterScopedWatch", run: plain(st.RunTestClusterScopedWatch)},
	{name: "RunTestNamespaceScopedWatch", run: plain(st.RunTestNamespaceScopedWatch), namespaces: true},
	{name: "RunTestDeleteTriggerWatch", run: plain(st.RunTestDeleteTriggerWatch)},
	{name: "RunTestWatchFromNonZero", run: plain(st.RunTestWatchFromNonZero)},
	{name: "RunTestDelayedWatchDelivery", run: plain(st.RunTestDelayedWatchDelivery)},
	{name: "RunTestWatchContextCancel", run: plain(st.RunTestWatchContextCancel)},
	{name: "RunTestWatcherTimeout", run: plain(st.RunTestWatcherTimeout)},
	{name: "RunTestWatchDeleteEventObjectHaveLatestRV", run: plain(st.RunTestWatchDeleteEventObjectHaveLatestRV)},
	{name: "RunTestWatchInitializationSignal", run: plain(st.RunTestWatchInitializationSignal)},
	{name: "RunSendInitialEventsBackwardCompatibility", run: plain(st.RunSendInitialEventsBackwardCompatibility)},
	{name: "RunTestConsistentList", run: func(ctx context.Context, t *testing.T, w *twin) {
		st.RunTestConsistentList(ctx, t, w, w.rise, false, true, false)
	}},
	{name: "RunTestWatchDispatchBookmarkEvents", run: func(ctx context.Context, t *testing.T, w *twin) {
		st.RunTestWatchDispatchBookmarkEvents(ctx, t, w, false)
	}},
	{name: "RunWatchSemantics", run: plain(st.RunWatchSemantics)},
	{name: "RunWatchSemanticInitialEventsExtended", run: plain(st.RunWatchSemanticInitialEventsExtended)},
	{name: "RunWatchListMatchSingle", run: plain(st.RunWatchListMatchSingle)},
}

func plain(run func(context.Context, *testing.T, storage.Interface)) func(context.Context, *testing.T, *twin) {
	return func(ctx context.Context, t *testing.T, w *twin) { run(ctx, t, w) }
}

// TestUpstreamSuite: the twin answers as the real store does. Left out are the parts
// of the suite for what it does not have: times to live, compaction, old revisions
// (lists at one, and pages of one list while objects go), checks of keys, sizes, and
// values that cannot be decoded.
func TestUpstreamSuite(t *testing.T) {
	for _, c := range suite {
		t.Run(c.name, func(t *testing.T) { c.run(t.Context(), t, newTwin(t, c.namespaces)) })
	}
}
