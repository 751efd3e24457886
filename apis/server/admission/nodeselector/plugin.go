// Package nodeselector implements PodNodeSelector: the pods of a namespace run on the
// nodes that the namespace's annotation selects. It is off by default.
package nodeselector

import (
	"context"
	"errors"
	"fmt"
	"io"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/admission"
	"sigs.k8s.io/yaml"
)

// Annotation of a namespace is its selector, as "env=prod,disk=ssd".
const Annotation = "scheduler.alpha.kubernetes.io/node-selector"

// clusterDefault is the key of the configuration for namespaces without the
// annotation; every other key is a namespace, with the labels that the pods of
// it may select.
const clusterDefault = "clusterDefaultNodeSelector"

// Namespaces finds a namespace, or fails with a NotFound StatusError.
type Namespaces interface {
	Namespace(ctx context.Context, name string) (*corev1.Namespace, error)
}

type plugin struct {
	*admission.Handler
	namespaces Namespaces
	selectors  map[string]labels.Set
}

var (
	_ admission.MutationInterface   = &plugin{}
	_ admission.ValidationInterface = &plugin{}
)

// New makes the plugin; config is upstream's podNodeSelectorPluginConfig; nil:
// annotations alone count.
func New(namespaces Namespaces, config io.Reader) (admission.Interface, error) {
	p := &plugin{Handler: admission.NewHandler(admission.Create), namespaces: namespaces, selectors: map[string]labels.Set{}}
	if config == nil {
		return p, nil
	}
	data, err := io.ReadAll(config)
	if err != nil {
		return nil, fmt.Errorf("read the configuration: %w", err)
	}
	var file struct {
		Selectors map[string]string `json:"podNodeSelectorPluginConfig"`
	}
	if err := yaml.UnmarshalStrict(data, &file); err != nil {
		return nil, fmt.Errorf("podNodeSelectorPluginConfig: %w", err)
	}
	for key, text := range file.Selectors {
		if p.selectors[key], err = labels.ConvertSelectorToLabelsMap(text); err != nil {
			return nil, fmt.Errorf("podNodeSelectorPluginConfig.%s: %q: %w", key, text, err)
		}
	}
	return p, nil
}

// Admit adds the namespace's selector to the pod's.
func (p *plugin) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	pod, selector, err := p.selectorOf(ctx, a)
	if pod == nil || err != nil {
		return err
	}
	if labels.Conflicts(selector, pod.Spec.NodeSelector) {
		return admission.NewForbidden(a, errors.New("pod node label selector conflicts with its namespace node label selector"))
	}
	if merged := labels.Merge(selector, pod.Spec.NodeSelector); len(merged) > 0 {
		pod.Spec.NodeSelector = merged
	}
	return nil
}

// Validate checks that the selector is still there, and holds nothing but what
// the namespace may ask for.
func (p *plugin) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	pod, selector, err := p.selectorOf(ctx, a)
	if pod == nil || err != nil {
		return err
	}
	for key, value := range selector {
		if pod.Spec.NodeSelector[key] != value {
			return admission.NewForbidden(a, errors.New("pod node label selector conflicts with its namespace node label selector"))
		}
	}
	allowed, bounded := p.selectors[a.GetNamespace()]
	if !bounded || len(allowed) == 0 {
		return nil
	}
	for key, value := range pod.Spec.NodeSelector {
		if got, ok := allowed[key]; !ok || got != value {
			return admission.NewForbidden(a, errors.New("pod node label selector labels conflict with its namespace whitelist"))
		}
	}
	return nil
}

// selectorOf is the pod, nil if the request is about none, and the selector of
// its namespace.
func (p *plugin) selectorOf(ctx context.Context, a admission.Attributes) (*corev1.Pod, labels.Set, error) {
	if a.GetResource().GroupResource() != corev1.Resource("pods") || a.GetSubresource() != "" {
		return nil, nil, nil
	}
	pod, ok := a.GetObject().(*corev1.Pod)
	if !ok {
		return nil, nil, apierrors.NewBadRequest(fmt.Sprintf("expected a Pod, got %T", a.GetObject()))
	}
	namespace, err := p.namespaces.Namespace(ctx, a.GetNamespace())
	if apierrors.IsNotFound(err) {
		return nil, nil, err
	}
	if err != nil {
		return nil, nil, apierrors.NewInternalError(fmt.Errorf("look up namespace %s: %w", a.GetNamespace(), err))
	}
	text, ok := namespace.Annotations[Annotation]
	if !ok {
		return pod, p.selectors[clusterDefault], nil
	}
	selector, err := labels.ConvertSelectorToLabelsMap(text)
	if err != nil {
		return nil, nil, admission.NewForbidden(a, fmt.Errorf("annotation %s of namespace %s: %q: %w", Annotation, namespace.Name, text, err))
	}
	return pod, selector, nil
}
