package kubestore

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/api/apitesting"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/cacher"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	storagetesting "k8s.io/apiserver/pkg/storage/testing"
	"k8s.io/apiserver/pkg/storage/value"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/featuregate"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

var (
	testScheme = runtime.NewScheme()
	testCodecs = serializer.NewCodecFactory(testScheme)
	podsGR     = schema.GroupResource{Resource: "pods"}
)

func init() {
	metav1.AddToGroupVersion(testScheme, metav1.SchemeGroupVersion)
	for _, add := range []func(*runtime.Scheme) error{example.AddToScheme, examplev1.AddToScheme} {
		if err := add(testScheme); err != nil {
			panic(err)
		}
	}
}

func newPod() runtime.Object     { return &example.Pod{} }
func newPodList() runtime.Object { return &example.PodList{} }

// fixture is one storage of pods over a store of its own.
type fixture struct {
	t   *testing.T
	ctx context.Context

	store       *recordingStore
	transformer *storagetesting.PrefixTransformer
	secret      *breakable // around transformer
	codec       *breakableCodec
	raw         *Storage
	// storage is what the test talks to: raw, or the watch cache before it.
	storage storage.Interface
	cached  *cacher.CacheDelegator
	clock   *compactorClock
}

type setup struct {
	cached        bool
	clusterScoped bool
	strict        bool // unreadable objects are not marked as corrupt
	frozen        bool // store time stands still: nothing expires
}

func newFixture(t *testing.T, o setup) *fixture {
	t.Helper()
	change := func(c *raftstore.Config) {
		if start := time.Now(); o.frozen {
			c.Now = func() time.Time { return start }
		}
	}
	f := &fixture{
		t:           t,
		ctx:         t.Context(),
		store:       newRecordingStore(openStore(t, change)),
		transformer: storagetesting.NewPrefixTransformer([]byte("sealed!"), false),
		codec:       &breakableCodec{Codec: apitesting.TestCodec(testCodecs, examplev1.SchemeGroupVersion)},
		clock:       newCompactorClock(),
	}
	f.secret = &breakable{Transformer: f.transformer}
	setGate(t, features.AllowUnsafeMalformedObjectDeletion, !o.strict)
	f.open(o)
	return f
}

// open puts a new storage over the store, as a server that starts does.
func (f *fixture) open(o setup) {
	f.t.Helper()
	cfg := Config{
		Store:       f.store,
		Cache:       o.cached,
		Transformer: func(schema.GroupResource) value.Transformer { return f.secret },
		clock:       f.clock,
	}
	keyFunc := func(obj runtime.Object) (string, error) { return storage.NamespaceKeyFunc("/pods/", obj) }
	if o.clusterScoped {
		keyFunc = func(obj runtime.Object) (string, error) { return storage.NoNamespaceKeyFunc("/pods/", obj) }
	}
	s, destroy, err := NewDecorator(cfg)(
		storagebackend.NewDefaultConfig("", f.codec).ForResource(podsGR),
		"/pods/", keyFunc, newPod, newPodList, podAttrs,
		storage.IndexerFuncs{"spec.nodeName": func(obj runtime.Object) string { return obj.(*example.Pod).Spec.NodeName }},
		&cache.Indexers{
			"f:spec.nodeName":      func(obj any) ([]string, error) { return []string{obj.(*example.Pod).Spec.NodeName}, nil },
			"f:metadata.namespace": func(obj any) ([]string, error) { return []string{obj.(*example.Pod).Namespace}, nil },
		})
	if err != nil {
		f.t.Fatal(err)
	}
	f.t.Cleanup(destroy)
	f.storage = s
	if !o.cached {
		f.raw = s.(*Storage)
		return
	}
	f.cached = s.(*resuming).CacheDelegator
	eventually(f.t, "the watch cache is ready", func() bool { return s.ReadinessCheck() == nil })
}

// restarting is a storage that forgets its cache's history when the store
// forgets its own: a new one takes its place, as in a server that restarts.
type restarting struct {
	storage.Interface
	f *fixture
}

func (r *restarting) compact(ctx context.Context, t *testing.T, resourceVersion string) {
	r.f.compact(ctx, t, resourceVersion)
	if r.f.cached != nil {
		r.f.open(setup{cached: true})
		r.Interface = r.f.storage
	}
}

func podAttrs(obj runtime.Object) (labels.Set, fields.Set, error) {
	pod, ok := obj.(*example.Pod)
	if !ok {
		return nil, nil, fmt.Errorf("%T is not a pod", obj)
	}
	return pod.Labels, fields.Set{
		"metadata.name":      pod.Name,
		"metadata.namespace": pod.Namespace,
		"spec.nodeName":      pod.Spec.NodeName,
	}, nil
}

// setGate leaves a gate alone that is right already, because parallel tests may
// not touch any.
func setGate(t *testing.T, gate featuregate.Feature, on bool) {
	t.Helper()
	if utilfeature.DefaultFeatureGate.Enabled(gate) == on {
		return
	}
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, gate, on)
}

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.After(time.Minute)
	for !ok() {
		select {
		case <-deadline:
			t.Fatalf("gave up waiting until %s", what)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// increaseRV writes outside of the pods.
func (f *fixture) increaseRV(ctx context.Context, t *testing.T) int64 {
	res, err := f.store.Txn(ctx, mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "elsewhere", Value: []byte("x")}}})
	if err != nil {
		t.Fatal(err)
	}
	return res.Revision
}

// compact drops the history before resourceVersion, and lets the watch cache
// notice. Like upstream's it uses up a revision, which the suite counts on.
func (f *fixture) compact(ctx context.Context, t *testing.T, resourceVersion string) {
	rev, err := strconv.ParseInt(resourceVersion, 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	f.increaseRV(ctx, t)
	f.store.oldest.Store(rev)
	if f.cached != nil {
		f.clock.poll()
		eventually(t, "the watch cache has compacted", func() bool { return f.cached.CompactRevision() == rev })
	}
}

// checkStored is upstream's invariant: the stored object has no version.
func (f *fixture) checkStored(ctx context.Context, t *testing.T, key string) {
	kv, _, err := f.store.Get(ctx, "/registry"+key, raftstore.ReadOptions{})
	if err != nil || kv == nil {
		t.Fatalf("get %s from the store: %v, %v", key, kv, err)
	}
	data, _, err := f.transformer.TransformFromStorage(ctx, kv.Value, value.DefaultContext(key))
	if err != nil {
		t.Fatal(err)
	}
	obj, err := runtime.Decode(f.codec, data)
	if err != nil {
		t.Fatal(err)
	}
	if pod := obj.(*example.Pod); pod.ResourceVersion != "" || pod.SelfLink != "" {
		t.Errorf("stored object carries resourceVersion %q, selfLink %q", pod.ResourceVersion, pod.SelfLink)
	}
}

// checkCalls is upstream's bound on the work of a limited list: pages double,
// and no object is opened twice.
func (f *fixture) checkCalls(t *testing.T, pageSize, processed uint64) {
	if reads := f.transformer.GetReadsAndReset(); reads != processed {
		t.Errorf("%d values opened, want %d", reads, processed)
	}
	want := uint64(1)
	for page, seen := pageSize, pageSize; pageSize > 0 && seen < processed; want++ {
		page = min(2*page, maxPage)
		seen += page
	}
	if got := f.store.lists.Swap(0); got != want {
		t.Errorf("%d pages read, want %d", got, want)
	}
}

// UpdatePrefixTransformer implements upstream's InterfaceWithPrefixTransformer.
func (f *withTransformer) UpdatePrefixTransformer(modify storagetesting.PrefixTransformerModifier) func() {
	changed := *f.transformer
	return f.UpdateTransformer(func(value.Transformer) value.Transformer { return modify(&changed) })
}

// UpdateTransformer implements upstream's InterfaceWithTransformerOverride.
func (f *withTransformer) UpdateTransformer(modify storagetesting.TransformerModifier) func() {
	before := f.raw.values.transformer
	f.raw.values.transformer = modify(before)
	return func() { f.raw.values.transformer = before }
}

// withTransformer is a raw storage whose transformer the suite may replace.
type withTransformer struct {
	storage.Interface
	*fixture
}

func (f *fixture) withTransformer() *withTransformer { return &withTransformer{f.raw, f} }

var errBroken = errors.New("synthetic error")

// breakable is a transformer that can be made to fail.
type breakable struct {
	value.Transformer
	broken atomic.Bool
}

func (b *breakable) TransformFromStorage(ctx context.Context, data []byte, dataCtx value.Context) ([]byte, bool, error) {
	if b.broken.Load() {
		return nil, false, errBroken
	}
	return b.Transformer.TransformFromStorage(ctx, data, dataCtx)
}

// breakableCodec is a codec that can be made to fail.
type breakableCodec struct {
	runtime.Codec
	broken atomic.Bool
}

func (b *breakableCodec) Decode(data []byte, defaults *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	if b.broken.Load() {
		return nil, nil, errBroken
	}
	return b.Codec.Decode(data, defaults, into)
}

// compactorClock is the real clock, except that the watch cache's look at the
// store's compaction, due every 15 seconds, happens when poll is called.
type compactorClock struct {
	clock.RealClock
	due chan time.Time
}

const compactorPeriod = 15 * time.Second

func newCompactorClock() *compactorClock { return &compactorClock{due: make(chan time.Time, 1)} }

func (c *compactorClock) poll() { c.due <- time.Now() }

func (c *compactorClock) NewTimer(d time.Duration) clock.Timer {
	if d == compactorPeriod {
		return dueTimer{c.due}
	}
	return c.RealClock.NewTimer(d)
}

type dueTimer struct{ c chan time.Time }

func (t dueTimer) C() <-chan time.Time        { return t.c }
func (t dueTimer) Stop() bool                 { return true }
func (t dueTimer) Reset(d time.Duration) bool { return true }
