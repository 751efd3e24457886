package defaultingressclass

import (
	"context"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/networking"
)

type classes []networkingv1.IngressClass

func (c classes) IngressClasses(context.Context) ([]networkingv1.IngressClass, error) { return c, nil }

func TestAdmit(t *testing.T) {
	class := func(name, isDefault string, age int64) networkingv1.IngressClass {
		return networkingv1.IngressClass{ObjectMeta: metav1.ObjectMeta{Name: name, CreationTimestamp: metav1.Unix(age, 0), Annotations: map[string]string{networking.DefaultIngressClass: isDefault}}}
	}
	all := classes{class("plain", "false", 9), class("old", "true", 1), class("new", "true", 2), class("also-new", "true", 2)}
	for name, tt := range map[string]struct {
		classes     classes
		named       *string
		annotations map[string]string
		want        *string
	}{
		"none":                    {all, nil, nil, ptr.To("also-new")},
		"no default":              {all[:1], nil, nil, nil},
		"named":                   {all, ptr.To("plain"), nil, ptr.To("plain")},
		"named by the annotation": {all, nil, map[string]string{"kubernetes.io/ingress.class": "nginx"}, nil},
	} {
		i := &networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Annotations: tt.annotations}, Spec: networkingv1.IngressSpec{IngressClassName: tt.named}}
		a := admission.NewAttributesRecord(i, nil, networkingv1.SchemeGroupVersion.WithKind("Ingress"), "n", "i", networkingv1.SchemeGroupVersion.WithResource("ingresses"), "", admission.Create, nil, false, nil)
		if err := New(tt.classes).(admission.MutationInterface).Admit(t.Context(), a, nil); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if ptr.Deref(i.Spec.IngressClassName, "-") != ptr.Deref(tt.want, "-") {
			t.Errorf("%s: %s", name, ptr.Deref(i.Spec.IngressClassName, "-"))
		}
	}
}
