// Package defaultingressclass implements DefaultIngressClass: Ingresses without a class
// get the one that is marked as the default.
package defaultingressclass

import (
	"context"
	"fmt"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/admission"

	"github.com/clusterd/clusterd/apis/networking"
)

// Classes lists the ingress classes. They may be a moment old.
type Classes interface {
	IngressClasses(ctx context.Context) ([]networkingv1.IngressClass, error)
}

type plugin struct {
	*admission.Handler
	classes Classes
}

var _ admission.MutationInterface = &plugin{}

// New makes the plugin.
func New(classes Classes) admission.Interface {
	return &plugin{Handler: admission.NewHandler(admission.Create), classes: classes}
}

// Admit fills in the class. If there is no default, the Ingress stays without
// one. The annotation that named a class before spec.ingressClassName did counts
// as one.
func (p *plugin) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetResource().GroupResource() != networkingv1.Resource("ingresses") || a.GetSubresource() != "" {
		return nil
	}
	ingress, ok := a.GetObject().(*networkingv1.Ingress)
	if !ok {
		return errors.NewBadRequest(fmt.Sprintf("expected an Ingress, got %T", a.GetObject()))
	}
	if ingress.Spec.IngressClassName != nil || networking.ClassOf(ingress) != "" {
		return nil
	}
	classes, err := p.classes.IngressClasses(ctx)
	if err != nil {
		return errors.NewInternalError(fmt.Errorf("find the default class of ingress %s: %w", ingress.Name, err))
	}
	if class := networking.DefaultClass(classes); class != nil {
		ingress.Spec.IngressClassName = &class.Name
	}
	return nil
}
