package kubestore

import (
	"fmt"
	"runtime"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
)

// BenchmarkCache compares the raw storage with the watch cache before it, on a
// store of one member, with 1000 pods of about 1 KiB.
func BenchmarkCache(b *testing.B) {
	const pods = 1000
	pb := protobuf.NewSerializer(testScheme, testScheme)
	codec := testCodecs.CodecForVersions(pb, pb, schema.GroupVersions{examplev1.SchemeGroupVersion}, nil)
	open := func(b *testing.B, cached bool) storage.Interface {
		keyFunc := func(obj apiruntime.Object) (string, error) { return storage.NamespaceKeyFunc("/pods/", obj) }
		s, destroy, err := NewDecorator(Config{Store: openStore(b, nil), Cache: cached})(
			storagebackend.NewDefaultConfig("", codec).ForResource(podsGR), "/pods/", keyFunc, newPod, newPodList, podAttrs, nil, nil)
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(destroy)
		eventually(b, "the storage is ready", func() bool { return s.ReadinessCheck() == nil })
		return s
	}
	create := func(b *testing.B, s storage.Interface, i int) {
		pod := &example.Pod{
			ObjectMeta: metav1.ObjectMeta{
				Name: fmt.Sprintf("pod-%06d", i), Namespace: "ns",
				Annotations: map[string]string{"payload": fmt.Sprintf("%01000d", i)},
			},
			Spec: example.PodSpec{NodeName: fmt.Sprintf("node-%d", i%10)},
		}
		if err := s.Create(b.Context(), "/pods/ns/"+pod.Name, pod, &example.Pod{}, 0); err != nil {
			b.Fatal(err)
		}
	}
	heap := func() float64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc)
	}
	for _, cached := range []bool{false, true} {
		name := fmt.Sprintf("cache=%v/", cached)
		b.Run(name+"create", func(b *testing.B) {
			s := open(b, cached)
			i := 0
			for b.Loop() {
				create(b, s, i)
				i++
			}
		})
		b.Run(name+"memory", func(b *testing.B) {
			s := open(b, cached)
			before := heap()
			for i := range pods {
				create(b, s, i)
			}
			for b.Loop() {
			}
			b.ReportMetric((heap()-before)/pods, "heap-B/pod")
		})
		for _, list := range []struct {
			name string
			rv   string
			pred storage.SelectionPredicate
		}{
			{"list-newest", "", storage.Everything},
			{"list-any", "0", storage.Everything},
			{"list-one-node", "0", storage.SelectionPredicate{
				Label: labels.Everything(), Field: fields.OneTermEqualSelector("spec.nodeName", "node-1"), GetAttrs: podAttrs,
			}},
		} {
			b.Run(name+list.name, func(b *testing.B) {
				s := open(b, cached)
				for i := range pods {
					create(b, s, i)
				}
				opts := storage.ListOptions{ResourceVersion: list.rv, Predicate: list.pred, Recursive: true}
				for b.Loop() {
					if err := s.GetList(b.Context(), "/pods/", opts, &example.PodList{}); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
		for _, watchers := range []int{1, 50} {
			b.Run(fmt.Sprintf("%swatch-%d", name, watchers), func(b *testing.B) {
				s := open(b, cached)
				create(b, s, 0)
				var got []<-chan struct{}
				for range watchers {
					w, err := s.Watch(b.Context(), "/pods/", storage.ListOptions{ResourceVersion: "", Predicate: storage.Everything, Recursive: true})
					if err != nil {
						b.Fatal(err)
					}
					seen := make(chan struct{}, 1000)
					go func() {
						for range w.ResultChan() {
							seen <- struct{}{}
						}
						close(seen)
					}()
					<-seen // the first pod
					b.Cleanup(func() {
						w.Stop()
						for range seen {
						}
					})
					got = append(got, seen)
				}
				i := 1
				for b.Loop() {
					create(b, s, i)
					i++
					for _, seen := range got {
						<-seen
					}
				}
			})
		}
	}
}
