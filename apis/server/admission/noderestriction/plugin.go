// Package noderestriction confines a node's identity to what is its own: its
// Node, its Lease and the pods bound to it. The authorizer has let the request
// pass by its shape; here its content counts.
package noderestriction

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/admission"

	"github.com/clusterd/clusterd/apis/server/auth"
)

// restrictedLabels is the label domain by which administrators keep workloads
// to trusted nodes; a node may not claim it.
const restrictedLabels = "node-restriction.kubernetes.io"

// Pods finds a pod, or fails with a NotFound StatusError.
type Pods interface {
	Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error)
}

type plugin struct {
	*admission.Handler
	pods Pods
}

var _ admission.ValidationInterface = &plugin{}

// New makes the plugin.
func New(pods Pods) admission.Interface {
	return &plugin{Handler: admission.NewHandler(admission.Create, admission.Update, admission.Delete), pods: pods}
}

// Validate lets everybody but nodes pass.
func (p *plugin) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	node, ok := auth.NodeName(a.GetUserInfo())
	if !ok {
		return nil
	}
	switch a.GetResource().GroupResource() {
	case corev1.Resource("pods"):
		return p.pod(ctx, node, a)
	case corev1.Resource("nodes"):
		return own(node, a)
	case coordinationv1.SchemeGroupVersion.WithResource("leases").GroupResource():
		return lease(node, a)
	}
	return nil
}

func (p *plugin) pod(ctx context.Context, node string, a admission.Attributes) error {
	if a.GetSubresource() == "eviction" {
		pod, err := p.pods.Pod(ctx, a.GetNamespace(), a.GetName())
		if errors.IsNotFound(err) {
			return err
		}
		if err != nil {
			return admission.NewForbidden(a, err)
		}
		return bound(node, pod, a, "evict")
	}
	switch a.GetOperation() {
	case admission.Create:
		obj, ok := a.GetObject().(*corev1.Pod)
		if !ok {
			return refuse(a, "unexpected type %T", a.GetObject())
		}
		return mirror(node, obj, a)
	case admission.Update:
		old, ok := a.GetOldObject().(*corev1.Pod)
		if !ok {
			return refuse(a, "unexpected type %T", a.GetOldObject())
		}
		if a.GetSubresource() != "status" {
			return refuse(a, "node %q may only update the status of pods", node)
		}
		obj, ok := a.GetObject().(*corev1.Pod)
		if !ok {
			return refuse(a, "unexpected type %T", a.GetObject())
		}
		if !equality.Semantic.DeepEqual(old.Labels, obj.Labels) {
			return refuse(a, "node %q cannot update labels through pod status", node)
		}
		return bound(node, old, a, "update pod status for")
	case admission.Delete:
		old, ok := a.GetOldObject().(*corev1.Pod)
		if !ok {
			return refuse(a, "unexpected type %T", a.GetOldObject())
		}
		return bound(node, old, a, "delete")
	}
	return nil
}

// mirror lets a node show its own static pods, and by them gain no right: a pod
// of the node that referred to a Secret would let the node read it.
func mirror(node string, pod *corev1.Pod, a admission.Attributes) error {
	if _, ok := pod.Annotations[corev1.MirrorPodAnnotationKey]; !ok {
		return refuse(a, "pod does not have %q annotation, node %q can only create mirror pods", corev1.MirrorPodAnnotationKey, node)
	}
	owners := pod.OwnerReferences
	if len(owners) != 1 || owners[0].APIVersion != "v1" || owners[0].Kind != "Node" || owners[0].Name != node {
		return refuse(a, "node %q can only create pods with a single owner reference set to itself", node)
	}
	var refers []string
	auth.References(pod, func(resource, name string) { refers = append(refers, resource+"/"+name) })
	for _, volume := range pod.Spec.Volumes {
		if volume.PersistentVolumeClaim != nil {
			refers = append(refers, "persistentvolumeclaims/"+volume.PersistentVolumeClaim.ClaimName)
		}
	}
	if len(refers) > 0 {
		return refuse(a, "node %q can not create pods that reference %s", node, strings.Join(refers, ", "))
	}
	return bound(node, pod, a, "create")
}

func bound(node string, pod *corev1.Pod, a admission.Attributes, verb string) error {
	if pod.Spec.NodeName != node {
		return refuse(a, "node %q can only %s pods with spec.nodeName set to itself", node, verb)
	}
	return nil
}

func own(node string, a admission.Attributes) error {
	if a.GetName() != node && a.GetName() != "" {
		return refuse(a, "node %q is not allowed to modify node %q", node, a.GetName())
	}
	obj, ok := a.GetObject().(*corev1.Node)
	if !ok {
		return nil // a deletion: the authorizer has said no already
	}
	if obj.Name != node {
		return refuse(a, "node %q is not allowed to modify node %q", node, obj.Name)
	}
	old, _ := a.GetOldObject().(*corev1.Node)
	if old != nil && !equality.Semantic.DeepEqual(old.Spec.Taints, obj.Spec.Taints) {
		return refuse(a, "node %q is not allowed to modify taints", node)
	}
	if changed := changedLabels(old, obj); len(changed) > 0 {
		return refuse(a, "node %q is not allowed to modify labels: %s", node, strings.Join(changed, ", "))
	}
	return nil
}

// changedLabels lists the restricted labels that obj has otherwise than old.
func changedLabels(old, obj *corev1.Node) []string {
	before := map[string]string{}
	if old != nil {
		before = old.Labels
	}
	var changed []string
	for key := range union(before, obj.Labels) {
		domain, _, _ := strings.Cut(key, "/")
		if domain != restrictedLabels && !strings.HasSuffix(domain, "."+restrictedLabels) {
			continue
		}
		was, had := before[key]
		is, has := obj.Labels[key]
		if had != has || was != is {
			changed = append(changed, key)
		}
	}
	slices.Sort(changed)
	return changed
}

func union(a, b map[string]string) map[string]string {
	all := maps.Clone(a)
	if all == nil {
		all = map[string]string{}
	}
	maps.Copy(all, b)
	return all
}

func lease(node string, a admission.Attributes) error {
	name := a.GetName()
	if obj, ok := a.GetObject().(*coordinationv1.Lease); ok && name == "" {
		name = obj.Name
	}
	if a.GetNamespace() != corev1.NamespaceNodeLease || name != node {
		return refuse(a, "node %q can only access the lease with its own name in namespace %q", node, corev1.NamespaceNodeLease)
	}
	return nil
}

func refuse(a admission.Attributes, format string, args ...any) error {
	return admission.NewForbidden(a, fmt.Errorf(format, args...))
}
