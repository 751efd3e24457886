// Package alwayspull implements AlwaysPullImages: it sets imagePullPolicy Always on every
// container, so that a private image is used only with its credentials. It is off by
// default.
package alwayspull

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/admission"
)

type plugin struct{ *admission.Handler }

var (
	_ admission.MutationInterface   = plugin{}
	_ admission.ValidationInterface = plugin{}
)

// New makes the plugin.
func New() admission.Interface {
	return plugin{admission.NewHandler(admission.Create, admission.Update)}
}

// pull is one image of a pod, with the field that says when it is pulled.
type pull struct {
	image  string
	policy *corev1.PullPolicy
	path   *field.Path
}

// Admit makes the policy of each image Always.
func (plugin) Admit(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	pod, err := podOf(a)
	if pod == nil || err != nil {
		return err
	}
	for _, p := range pulls(&pod.Spec) {
		*p.policy = corev1.PullAlways
	}
	return nil
}

// Validate refuses what another plugin has changed since.
func (plugin) Validate(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	pod, err := podOf(a)
	if pod == nil || err != nil {
		return err
	}
	var faults field.ErrorList
	for _, p := range pulls(&pod.Spec) {
		if *p.policy != corev1.PullAlways {
			faults = append(faults, field.NotSupported(p.path, *p.policy, []corev1.PullPolicy{corev1.PullAlways}))
		}
	}
	if len(faults) > 0 {
		return apierrors.NewInvalid(a.GetKind().GroupKind(), pod.Name, faults)
	}
	return nil
}

// podOf is the pod, if it may have images that it had not before; else nil.
func podOf(a admission.Attributes) (*corev1.Pod, error) {
	if a.GetResource().GroupResource() != corev1.Resource("pods") || a.GetSubresource() != "" && a.GetSubresource() != "ephemeralcontainers" {
		return nil, nil
	}
	pod, ok := a.GetObject().(*corev1.Pod)
	if !ok {
		return nil, apierrors.NewBadRequest(fmt.Sprintf("expected a Pod, got %T", a.GetObject()))
	}
	old, ok := a.GetOldObject().(*corev1.Pod)
	if a.GetOperation() == admission.Update && ok && images(&old.Spec).IsSuperset(images(&pod.Spec)) {
		return nil, nil
	}
	return pod, nil
}

func images(spec *corev1.PodSpec) sets.Set[string] {
	all := sets.New[string]()
	for _, p := range pulls(spec) {
		all.Insert(p.image)
	}
	return all
}

// pulls are all images of a pod: those of containers and of volumes.
func pulls(spec *corev1.PodSpec) []pull {
	var all []pull
	path := field.NewPath("spec")
	for i := range spec.InitContainers {
		c := &spec.InitContainers[i]
		all = append(all, pull{c.Image, &c.ImagePullPolicy, path.Child("initContainers").Index(i).Child("imagePullPolicy")})
	}
	for i := range spec.Containers {
		c := &spec.Containers[i]
		all = append(all, pull{c.Image, &c.ImagePullPolicy, path.Child("containers").Index(i).Child("imagePullPolicy")})
	}
	for i := range spec.EphemeralContainers {
		c := &spec.EphemeralContainers[i]
		all = append(all, pull{c.Image, &c.ImagePullPolicy, path.Child("ephemeralContainers").Index(i).Child("imagePullPolicy")})
	}
	for i := range spec.Volumes {
		if v := spec.Volumes[i].Image; v != nil {
			all = append(all, pull{v.Reference, &v.PullPolicy, path.Child("volumes").Index(i).Child("image", "pullPolicy")})
		}
	}
	return all
}
