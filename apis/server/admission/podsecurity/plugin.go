// Package podsecurity holds pods to the Pod Security Standards that the labels
// of their namespace name: enforce refuses, warn warns and audit notes. It is
// k8s.io/pod-security-admission asked by this server's admission.
package podsecurity

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"

	admissionv1 "k8s.io/api/admission/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/warning"
	"k8s.io/component-base/metrics/legacyregistry"
	podadmission "k8s.io/pod-security-admission/admission"
	"k8s.io/pod-security-admission/admission/api/load"
	"k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/metrics"
	"k8s.io/pod-security-admission/policy"
)

// Objects is what the plugin looks up.
type Objects interface {
	Namespace(ctx context.Context, name string) (*corev1.Namespace, error)
	// Pods lists the pods of a namespace.
	Pods(ctx context.Context, namespace string) ([]*corev1.Pod, error)
}

type plugin struct {
	*admission.Handler
	standards *podadmission.Admission
}

var _ admission.ValidationInterface = &plugin{}

// recorder counts for the whole process, whose metrics are one registry.
var recorder = sync.OnceValue(func() metrics.Recorder {
	r := metrics.NewPrometheusRecorder(api.GetAPIVersion())
	r.MustRegister(legacyregistry.MustRegister)
	return r
})

// New makes the plugin; config is a PodSecurityConfiguration, for what the
// labels of a namespace leave open and who is exempt; nil: namespaces without
// labels are privileged, and no user is exempt.
func New(objects Objects, config io.Reader) (admission.Interface, error) {
	configuration, err := load.LoadFromReader(config)
	if err != nil {
		return nil, fmt.Errorf("configuration of pod security: %w", err)
	}
	evaluator, err := policy.NewEvaluator(policy.DefaultChecks(), nil)
	if err != nil {
		return nil, fmt.Errorf("checks of pod security: %w", err)
	}
	standards := &podadmission.Admission{
		Configuration:    configuration,
		Evaluator:        evaluator,
		Metrics:          recorder(),
		PodSpecExtractor: podadmission.DefaultPodSpecExtractor{},
		NamespaceGetter:  lookups{objects},
		PodLister:        lookups{objects},
	}
	if err := standards.CompleteConfiguration(); err != nil {
		return nil, fmt.Errorf("pod security: %w", err)
	}
	if err := standards.ValidateConfiguration(); err != nil {
		return nil, fmt.Errorf("pod security: %w", err)
	}
	return &plugin{Handler: admission.NewHandler(admission.Create, admission.Update), standards: standards}, nil
}

// Validate refuses what the namespace does not allow.
func (p *plugin) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	resource := a.GetResource().GroupResource()
	if resource != corev1.Resource("namespaces") && !p.standards.PodSpecExtractor.HasPodSpec(resource) {
		return nil
	}
	response := p.standards.Validate(ctx, attributes{a})
	for _, w := range response.Warnings {
		warning.AddWarning(ctx, "", w)
	}
	for key, value := range response.AuditAnnotations {
		audit.AddAuditAnnotation(ctx, api.AuditAnnotationPrefix+key, value)
	}
	if response.Allowed {
		return nil
	}
	refusal := admission.NewForbidden(a, errors.New("not allowed by PodSecurity"))
	var status *apierrors.StatusError
	if response.Result != nil && errors.As(refusal, &status) {
		if response.Result.Message != "" {
			status.ErrStatus.Message = response.Result.Message
		}
		if response.Result.Reason != "" {
			status.ErrStatus.Reason = response.Result.Reason
		}
		if response.Result.Code != 0 {
			status.ErrStatus.Code = response.Result.Code
		}
		if response.Result.Details != nil {
			status.ErrStatus.Details = response.Result.Details
		}
	}
	return refusal
}

type lookups struct{ Objects }

// GetNamespace implements podadmission.NamespaceGetter.
func (l lookups) GetNamespace(ctx context.Context, name string) (*corev1.Namespace, error) {
	return l.Namespace(ctx, name)
}

// ListPods implements podadmission.PodLister.
func (l lookups) ListPods(ctx context.Context, namespace string) ([]*corev1.Pod, error) {
	return l.Pods(ctx, namespace)
}

// attributes are a request as the library asks for it: objects are of the
// versioned types here.
type attributes struct{ admission.Attributes }

// GetOperation implements api.Attributes.
func (a attributes) GetOperation() admissionv1.Operation {
	return admissionv1.Operation(strings.ToUpper(string(a.Attributes.GetOperation())))
}

// GetObject implements api.Attributes.
func (a attributes) GetObject() (runtime.Object, error) { return a.Attributes.GetObject(), nil }

// GetOldObject implements api.Attributes.
func (a attributes) GetOldObject() (runtime.Object, error) { return a.Attributes.GetOldObject(), nil }

// GetUserName implements api.Attributes.
func (a attributes) GetUserName() string {
	if u := a.GetUserInfo(); u != nil {
		return u.GetName()
	}
	return ""
}
