package tools

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/clusterd/clusterd/e2e/cluster/clustertest"
)

const manyObjects = 10_000

// TestE2EClientGo kills the server under client-go's informers, with 10 000
// objects in their caches, and under two candidates of its leader election.
func TestE2EClientGo(t *testing.T) {
	k := start(t, "tools-clientgo")
	config := rest.CopyConfig(k.config)
	config.QPS = -1
	api, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	maps := api.CoreV1().ConfigMaps(k.ns)
	name := func(i int) string { return fmt.Sprintf("o-%05d", i) }
	var making errgroup.Group
	making.SetLimit(32)
	began := time.Now()
	for i := range manyObjects {
		making.Go(func() error {
			_, err := maps.Create(t.Context(), &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: name(i), Labels: map[string]string{"many": "yes"}}, Data: map[string]string{"n": "0"}}, metav1.CreateOptions{})
			return err
		})
	}
	if err := making.Wait(); err != nil {
		t.Fatal(err)
	}
	t.Logf("%d objects after %s", manyObjects, time.Since(began).Round(time.Second))

	// What the informer's handlers received must add up to what is there.
	var handled handled
	factory := informers.NewSharedInformerFactoryWithOptions(api, 0, informers.WithNamespace(k.ns), informers.WithTweakListOptions(func(o *metav1.ListOptions) { o.LabelSelector = "many=yes" }))
	informer := factory.Core().V1().ConfigMaps()
	handler, err := informer.Informer().AddEventHandler(handled.handler())
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	factory.StartWithContext(ctx)
	defer factory.Shutdown()
	defer cancel()
	k.eventually("the informer has synced", func(context.Context) error {
		if !handler.HasSynced() {
			return fmt.Errorf("it has not")
		}
		return nil
	})
	if n := handled.count(); n != manyObjects {
		t.Fatalf("the handlers received %d objects, want %d", n, manyObjects)
	}

	leaders := &leaders{api: api, ns: k.ns}
	stops := map[string]context.CancelFunc{}
	for _, id := range []string{"a", "b"} {
		alone, stop := context.WithCancel(ctx)
		stops[id] = stop
		running.Go(func() { leaders.run(alone, id) })
	}
	first := k.leads(leaders, "")

	// Changes, before the kill and after it; some while the server is away, which
	// are tried until they are acknowledged.
	change := func(i int, n string) error {
		return clustertest.Poll(t.Context(), func(ctx context.Context) error {
			_, err := maps.Patch(ctx, name(i), types.MergePatchType, []byte(`{"data":{"n":"`+n+`"}}`), metav1.PatchOptions{})
			return err
		})
	}
	var changing errgroup.Group
	changing.Go(func() error {
		for i := range 500 {
			if err := change(i, "1"); err != nil {
				return err
			}
			if i == 100 {
				if err := k.c.Kill(node); err != nil {
					return err
				}
				if err := k.c.Start(t.Context(), node); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err := changing.Wait(); err != nil {
		t.Fatal(err)
	}
	for i := manyObjects - 100; i < manyObjects; i++ {
		if err := maps.Delete(t.Context(), name(i), metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	k.eventually("cache and handlers have what the server has", func(ctx context.Context) error {
		list, err := maps.List(ctx, metav1.ListOptions{LabelSelector: "many=yes"})
		if err != nil {
			return err
		}
		cached, err := informer.Lister().ConfigMaps(k.ns).List(labels.Everything())
		if err != nil {
			return err
		}
		have := map[string]string{}
		for _, o := range cached {
			have[o.Name] = o.ResourceVersion
		}
		if len(list.Items) != manyObjects-100 || len(have) != len(list.Items) || handled.count() != len(list.Items) {
			return fmt.Errorf("the server has %d objects, the cache %d, the handlers %d", len(list.Items), len(have), handled.count())
		}
		for i := range list.Items {
			o := &list.Items[i]
			if have[o.Name] != o.ResourceVersion || handled.version(o.Name) != o.ResourceVersion {
				return fmt.Errorf("%s is %s, in the cache %s, handled %s", o.Name, o.ResourceVersion, have[o.Name], handled.version(o.Name))
			}
		}
		return nil
	})
	if back := handled.back.Load(); back != 0 {
		t.Errorf("%d times a handler received an older version than before", back)
	}

	// The leader goes on, or the other takes over; a leader that stops is followed by the other.
	now := k.leads(leaders, "")
	t.Logf("%s led, after the kill %s", first, now)
	stops[now]()
	if next := k.leads(leaders, now); next == now {
		t.Errorf("%s leads still", next)
	}
	if n := leaders.clashes.Load(); n != 0 {
		t.Errorf("%d times there were two leaders", n)
	}
}

// handled is what an informer's handlers received: each object's version.
type handled struct {
	all  sync.Map // name → version
	back atomic.Int64
}

func (o *handled) handler() cache.ResourceEventHandlerFuncs {
	return cache.ResourceEventHandlerFuncs{
		AddFunc: func(obj any) { o.seen(obj) },
		UpdateFunc: func(_, obj any) {
			o.seen(obj)
		},
		DeleteFunc: func(obj any) {
			if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = gone.Obj
			}
			o.all.Delete(obj.(*corev1.ConfigMap).Name)
		},
	}
}

func (o *handled) seen(obj any) {
	m := obj.(*corev1.ConfigMap)
	was, ok := o.all.Swap(m.Name, m.ResourceVersion)
	if ok && number(was.(string)) > number(m.ResourceVersion) {
		o.back.Add(1)
	}
}

// number of a version; of objects of one kind the later one's is greater.
func number(version string) uint64 {
	n, _ := strconv.ParseUint(version, 10, 64) // ours are numbers
	return n
}

func (o *handled) count() (n int) {
	o.all.Range(func(any, any) bool { n++; return true })
	return n
}

func (o *handled) version(name string) string {
	v, _ := o.all.Load(name)
	s, _ := v.(string)
	return s
}

// leaders are the candidates of one election.
type leaders struct {
	api     kubernetes.Interface
	ns      string
	leading sync.Map // id → true
	clashes atomic.Int64
}

// run is one candidate, which stands again when it has lost, until ctx ends.
func (l *leaders) run(ctx context.Context, id string) {
	lock := &resourcelock.LeaseLock{LeaseMeta: metav1.ObjectMeta{Namespace: l.ns, Name: "many"}, Client: l.api.CoordinationV1(), LockConfig: resourcelock.ResourceLockConfig{Identity: id}}
	for ctx.Err() == nil {
		leaderelection.RunOrDie(ctx, leaderelection.LeaderElectionConfig{
			Lock: lock, LeaseDuration: 15 * time.Second, RenewDeadline: 10 * time.Second, RetryPeriod: 2 * time.Second,
			Callbacks: leaderelection.LeaderCallbacks{
				OnStartedLeading: func(context.Context) {
					l.leading.Range(func(other, _ any) bool {
						if other != id {
							l.clashes.Add(1)
						}
						return true
					})
					l.leading.Store(id, true)
				},
				OnStoppedLeading: func() { l.leading.Delete(id) },
			},
		})
	}
}

// leads waits until a candidate other than before leads.
func (k *kit) leads(l *leaders, before string) (id string) {
	k.Helper()
	k.eventually("a candidate other than "+before+" leads", func(context.Context) error {
		id = ""
		l.leading.Range(func(who, _ any) bool {
			if who != before {
				id = who.(string)
			}
			return true
		})
		if id == "" {
			return fmt.Errorf("none does")
		}
		return nil
	})
	return id
}
