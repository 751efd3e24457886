// Package externalips implements DenyServiceExternalIPs: new use of spec.externalIPs in
// Services is refused, so that a Service cannot attract traffic for addresses of others.
// It is off by default.
package externalips

import (
	"context"
	"errors"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/admission"
)

type plugin struct{ *admission.Handler }

var _ admission.ValidationInterface = plugin{}

// New makes the plugin.
func New() admission.Interface {
	return plugin{admission.NewHandler(admission.Create, admission.Update)}
}

// Validate refuses external addresses that a Service does not have already.
func (plugin) Validate(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetResource().GroupResource() != corev1.Resource("services") || a.GetSubresource() != "" {
		return nil
	}
	service, ok := a.GetObject().(*corev1.Service)
	if !ok {
		return apierrors.NewBadRequest(fmt.Sprintf("expected a Service, got %T", a.GetObject()))
	}
	var had []string
	if old, ok := a.GetOldObject().(*corev1.Service); ok {
		had = old.Spec.ExternalIPs
	}
	if slices.ContainsFunc(service.Spec.ExternalIPs, func(address string) bool { return !slices.Contains(had, address) }) {
		return admission.NewForbidden(a, errors.New("Use of external IPs is denied by admission control")) //nolint:staticcheck // upstream's words, which tools look for
	}
	return nil
}
