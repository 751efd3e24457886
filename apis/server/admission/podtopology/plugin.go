// Package podtopology implements PodTopologyLabels: binding a pod copies the zone and
// region labels of the node to the pod, where its containers can read them.
package podtopology

import (
	"context"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
)

// copied are the labels of a node that its pods get.
var copied = []string{corev1.LabelTopologyZone, corev1.LabelTopologyRegion}

// Nodes finds a node, or fails with a NotFound StatusError.
type Nodes interface {
	Node(ctx context.Context, name string) (*corev1.Node, error)
}

type plugin struct {
	*admission.Handler
	nodes Nodes
}

var _ admission.MutationInterface = &plugin{}

// New makes the plugin.
func New(nodes Nodes) admission.Interface {
	return &plugin{Handler: admission.NewHandler(admission.Create), nodes: nodes}
}

// Admit labels pods that are made with a node, and bindings, whose labels the
// pod gets. What the author of a pod said of its place gives way to what is.
func (p *plugin) Admit(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	resource, subresource := a.GetResource().GroupResource(), a.GetSubresource()
	var object metav1.Object
	var node string
	switch {
	case resource == corev1.Resource("pods") && subresource == "":
		pod, ok := a.GetObject().(*corev1.Pod)
		if !ok {
			return errors.NewBadRequest(fmt.Sprintf("expected a Pod, got %T", a.GetObject()))
		}
		object, node = pod, pod.Spec.NodeName
	case resource == corev1.Resource("pods") && subresource == "binding", resource == corev1.Resource("bindings"):
		binding, ok := a.GetObject().(*corev1.Binding)
		if !ok {
			return errors.NewBadRequest(fmt.Sprintf("expected a Binding, got %T", a.GetObject()))
		}
		object, node = binding, binding.Target.Name
	}
	if node == "" {
		return nil
	}
	found, err := p.nodes.Node(ctx, node)
	if errors.IsNotFound(err) {
		return nil // a pod may come before its node
	}
	if err != nil {
		return errors.NewInternalError(fmt.Errorf("find the zone of node %s: %w", node, err))
	}
	labels := object.GetLabels()
	for _, key := range copied {
		value, ok := found.Labels[key]
		if !ok {
			continue
		}
		if labels == nil {
			labels = map[string]string{}
		}
		labels[key] = value
	}
	object.SetLabels(labels)
	return nil
}
