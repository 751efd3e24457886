package apis

import (
	"math/rand" //nolint:depguard // what upstream's fuzzer takes
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/apitesting/fuzzer"
	metafuzzer "k8s.io/apimachinery/pkg/apis/meta/fuzzer"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// TestRandomObjects gives every function of every kind objects that make no
// sense. Whatever a client sends, they must answer, not panic, and defaults
// must settle at once.
func TestRandomObjects(t *testing.T) {
	const rounds = 100
	for _, k := range Kinds() {
		t.Run(k.GVK.Kind, func(t *testing.T) {
			random := fuzzer.FuzzerFor(metafuzzer.Funcs, rand.NewSource(1), Codecs)
			fill := func() runtime.Object {
				obj := k.New()
				random.Fill(obj)
				return obj
			}
			for range rounds {
				raw, obj, old := fill(), fill(), fill()
				exercise(k, raw, raw.DeepCopyObject()) // as it comes, without defaults
				Scheme.Default(obj)
				Scheme.Default(old)
				again := obj.DeepCopyObject()
				Scheme.Default(again)
				if diff := cmp.Diff(obj, again); diff != "" {
					t.Fatalf("defaulting again changes it:\n%s", diff)
				}
				if cells := k.Row(obj, now); len(cells) != len(k.Columns) {
					t.Fatalf("%d cells for %d columns", len(cells), len(k.Columns))
				}
				exercise(k, obj.DeepCopyObject(), obj)
				exercise(k, obj, old)
			}
		})
	}
}

// exercise calls all that k has; obj and old may be changed.
func exercise(k Kind, obj, old runtime.Object) {
	k.Validate(obj)
	k.ValidateUpdate(obj, old)
	k.Row(obj, now)
	if k.Fields != nil {
		k.Fields(obj)
	}
	if k.Warnings != nil {
		k.Warnings(obj)
	}
	if k.Grace != nil {
		k.Grace(obj, &metav1.DeleteOptions{})
	}
	if k.Scale != nil {
		k.Scale.SetSpecReplicas(obj, k.Scale.SpecReplicas(obj)+k.Scale.StatusReplicas(obj))
		_, _ = k.Scale.Selector(obj) // random operators are mostly wrong
	}
	if k.PrepareUpdate != nil {
		k.PrepareUpdate(obj, old)
	}
	if k.Status != nil {
		k.Status.PrepareUpdate(obj, old)
		k.Status.ValidateUpdate(obj, old)
	}
	if k.PrepareCreate != nil {
		k.PrepareCreate(obj)
	}
}
