package apis

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"
	"sigs.k8s.io/yaml"
)

// annotated is where an object keeps the annotations of its pods; nil: it makes none.
func annotated(obj runtime.Object) *metav1.ObjectMeta {
	switch o := obj.(type) {
	case *corev1.PodTemplate:
		return &o.Template.ObjectMeta
	case *corev1.ReplicationController:
		if o.Spec.Template == nil {
			o.Spec.Template = &corev1.PodTemplateSpec{}
		}
		return &o.Spec.Template.ObjectMeta
	case *appsv1.ReplicaSet:
		return &o.Spec.Template.ObjectMeta
	case *appsv1.Deployment:
		return &o.Spec.Template.ObjectMeta
	case *appsv1.StatefulSet:
		return &o.Spec.Template.ObjectMeta
	case *appsv1.DaemonSet:
		return &o.Spec.Template.ObjectMeta
	case *batchv1.Job:
		return &o.Spec.Template.ObjectMeta
	case *batchv1.CronJob:
		return &o.Spec.JobTemplate.Spec.Template.ObjectMeta
	case *corev1.Pod:
		return &o.ObjectMeta
	}
	return nil
}

// A workload that was stored before the rule for the deletion cost can be changed, and so
// can what its controller makes of its template be made.
func TestDeletionCost(t *testing.T) {
	costs := func(errs field.ErrorList) (n int) {
		for _, err := range errs {
			if strings.HasSuffix(err.Field, "metadata.annotations["+corev1.PodDeletionCost+"]") {
				n++
			}
		}
		return n
	}
	seen := 0
	for _, k := range Kinds() {
		if annotated(k.New()) == nil {
			continue
		}
		t.Run(k.GVK.Kind, func(t *testing.T) {
			text, err := os.ReadFile(filepath.Join("testdata", k.GVK.Kind+".yaml"))
			if err != nil {
				t.Fatal(err)
			}
			made := func(cost string) runtime.Object {
				obj := k.New()
				if err := yaml.Unmarshal(text, obj); err != nil {
					t.Fatal(err)
				}
				Scheme.Default(obj)
				obj.(metav1.Object).SetOwnerReferences(nil)
				metav1.SetMetaDataAnnotation(annotated(obj), corev1.PodDeletionCost, cost)
				return obj
			}
			owned := made("low")
			owner := metav1.OwnerReference{APIVersion: "v1", Kind: "K", Name: "n", UID: "u", Controller: ptr.To(true)}
			owned.(metav1.Object).SetOwnerReferences([]metav1.OwnerReference{owner})
			for name, test := range map[string]struct {
				errs field.ErrorList
				want int
			}{
				"a number":      {k.Validate(made("7")), 0},
				"none":          {k.Validate(made("low")), 1},
				"stored before": {k.ValidateUpdate(made("low"), made("low")), 0},
				"changed":       {k.ValidateUpdate(made("+5"), made("low")), 1},
				"mended":        {k.ValidateUpdate(made("5"), made("low")), 0},
				"made of one":   {k.Validate(owned), 0},
			} {
				if got := costs(test.errs); got != test.want {
					t.Errorf("%s: %d faults of it, want %d: %v", name, got, test.want, test.errs)
				}
			}
			seen++
		})
	}
	if seen != 9 {
		t.Errorf("%d kinds have one, want 9", seen)
	}
}
