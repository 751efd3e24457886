// Package imagepolicy implements ImagePolicyWebhook: a webhook decides whether the images
// of a pod may run. It is off by default.
package imagepolicy

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/api/imagepolicy/v1alpha1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/cache"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/util/webhook"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
)

const (
	// FailedOpen is the annotation of a pod that was let in because no answer was
	// to be had.
	FailedOpen = "alpha.image-policy.k8s.io/failed-open"
	// mark is in the annotations of a pod that the backend is shown.
	mark = ".image-policy.k8s.io/"
	// auditPrefix precedes the keys of annotations in the audit log.
	auditPrefix = "imagepolicywebhook.image-policy.k8s.io/"

	ephemeral = "ephemeralcontainers"

	// answersKept is how many answers are remembered.
	answersKept = 1024
	// failureTTL is how long it is remembered that no answer was to be had: one
	// request asks twice, and must not wait twice for a backend that hangs.
	failureTTL = 2 * time.Second
)

// plugin asks in both phases. What comes last decides: images may be changed by
// webhooks after the first; but a pod can only be annotated in the first.
type plugin struct {
	*admission.Handler
	backend *webhook.GenericWebhook
	// answers are by the review's spec: an ImageReviewStatus, or the error of
	// a backend that did not answer.
	answers           *cache.LRUExpireCache
	allowTTL, denyTTL time.Duration
	failureTTL        time.Duration
	defaultAllow      bool
}

var (
	_ admission.MutationInterface   = &plugin{}
	_ admission.ValidationInterface = &plugin{}
)

// Admit refuses what the backend does, and notes in a pod that it could not be
// asked, if that lets the pod in.
func (p *plugin) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	pod, spec, err := reviewOf(a)
	if pod == nil || err != nil {
		return err
	}
	delete(pod.Annotations, FailedOpen) // it is for the server to say
	status, err := p.ask(ctx, spec)
	if err != nil && p.defaultAllow {
		if pod.Annotations == nil {
			pod.Annotations = map[string]string{}
		}
		pod.Annotations[FailedOpen] = "true"
		return nil
	}
	return p.decide(a, status, err)
}

// Validate refuses what the backend does, and notes in the audit log what it
// says.
func (p *plugin) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	pod, spec, err := reviewOf(a)
	if pod == nil || err != nil {
		return err
	}
	status, err := p.ask(ctx, spec)
	noted := map[string]string{}
	if err == nil {
		noted = status.AuditAnnotations
	} else if p.defaultAllow {
		noted["failed-open"] = "true"
	}
	for key, value := range noted {
		if err := a.AddAnnotation(auditPrefix+key, value); err != nil {
			klog.FromContext(ctx).Info("Annotation of an image policy backend refused", "key", auditPrefix+key, "err", err)
		}
	}
	return p.decide(a, status, err)
}

// decide is nil if the pod may run. err is that of asking.
func (p *plugin) decide(a admission.Attributes, status v1alpha1.ImageReviewStatus, err error) error {
	switch {
	case err != nil && p.defaultAllow, err == nil && status.Allowed:
		return nil
	case err != nil:
		return admission.NewForbidden(a, fmt.Errorf("image policy webhook backend gave no answer, and imagePolicy.defaultAllow is false: %w", err))
	case status.Reason != "":
		return admission.NewForbidden(a, fmt.Errorf("image policy webhook backend denied one or more images: %s", status.Reason))
	}
	return admission.NewForbidden(a, errors.New("one or more images rejected by webhook backend"))
}

// ask is the backend's answer, or a remembered one.
func (p *plugin) ask(ctx context.Context, spec v1alpha1.ImageReviewSpec) (v1alpha1.ImageReviewStatus, error) {
	text, err := json.Marshal(spec)
	if err != nil {
		return v1alpha1.ImageReviewStatus{}, fmt.Errorf("write an ImageReview: %w", err)
	}
	key := string(text)
	if known, ok := p.answers.Get(key); ok {
		if failure, failed := known.(error); failed {
			return v1alpha1.ImageReviewStatus{}, failure
		}
		return known.(v1alpha1.ImageReviewStatus), nil
	}
	review := &v1alpha1.ImageReview{Spec: spec}
	result := p.backend.WithExponentialBackoff(ctx, func() rest.Result {
		return p.backend.RestClient.Post().Body(review).Do(ctx)
	})
	if err := result.Into(review); err != nil {
		klog.FromContext(ctx).Info("No answer of the image policy backend", "allowed", p.defaultAllow, "err", err)
		if ctx.Err() == nil { // else it is the client who went
			p.answers.Add(key, err, p.failureTTL)
		}
		return v1alpha1.ImageReviewStatus{}, err
	}
	ttl := p.denyTTL
	if review.Status.Allowed {
		ttl = p.allowTTL
	}
	p.answers.Add(key, review.Status, ttl)
	return review.Status, nil
}

// reviewOf is the pod and what the backend is asked about it; nil: nothing that
// it had not been asked before.
func reviewOf(a admission.Attributes) (*corev1.Pod, v1alpha1.ImageReviewSpec, error) {
	none := v1alpha1.ImageReviewSpec{}
	if a.GetResource().GroupResource() != corev1.Resource("pods") || a.GetSubresource() != "" && a.GetSubresource() != ephemeral {
		return nil, none, nil
	}
	pod, ok := a.GetObject().(*corev1.Pod)
	if !ok {
		return nil, none, apierrors.NewBadRequest(fmt.Sprintf("expected a Pod, got %T", a.GetObject()))
	}
	spec := specOf(pod, a)
	if old, ok := a.GetOldObject().(*corev1.Pod); ok && a.GetOperation() == admission.Update {
		// A pod that was let in can still be labelled and deleted when the backend
		// thinks otherwise by now.
		if before := specOf(old, a); slices.Equal(before.Containers, spec.Containers) && maps.Equal(before.Annotations, spec.Annotations) {
			return nil, none, nil
		}
	}
	return pod, spec, nil
}

func specOf(pod *corev1.Pod, a admission.Attributes) v1alpha1.ImageReviewSpec {
	spec := v1alpha1.ImageReviewSpec{Namespace: a.GetNamespace(), Annotations: map[string]string{}}
	add := func(image string) {
		spec.Containers = append(spec.Containers, v1alpha1.ImageReviewContainerSpec{Image: image})
	}
	if a.GetSubresource() == ephemeral {
		for _, c := range pod.Spec.EphemeralContainers {
			add(c.Image)
		}
	} else {
		for _, c := range slices.Concat(pod.Spec.Containers, pod.Spec.InitContainers) {
			add(c.Image)
		}
	}
	for key, value := range pod.Annotations {
		if strings.Contains(key, mark) && key != FailedOpen {
			spec.Annotations[key] = value
		}
	}
	return spec
}
