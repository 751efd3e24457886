// Package noderestriction implements NodeRestriction: a node's identity may change only
// its Node, its Lease and the pods bound to it. The authorizer has let the request
// pass by its shape; here its content counts.
package noderestriction

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"

	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
	kubeletapis "k8s.io/kubelet/pkg/apis"

	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/apis/server/auth"
)

// restrictedLabels is the label domain by which administrators keep workloads
// to trusted nodes; a node may not claim it.
const restrictedLabels = "node-restriction.kubernetes.io"

// Objects finds pods, who they run as and where, and what their volumes lead to. Missing objects are
// NotFound StatusErrors.
type Objects interface {
	auth.Volumes
	Pod(ctx context.Context, namespace, name string) (*corev1.Pod, error)
	CSIDriver(ctx context.Context, name string) (*storagev1.CSIDriver, error)
	ServiceAccount(ctx context.Context, namespace, name string) (*corev1.ServiceAccount, error)
	Node(ctx context.Context, name string) (*corev1.Node, error)
}

type plugin struct {
	*admission.Handler
	objects Objects
}

var _ admission.ValidationInterface = &plugin{}

// New makes the plugin.
func New(objects Objects) admission.Interface {
	return &plugin{Handler: admission.NewHandler(admission.Create, admission.Update, admission.Delete), objects: objects}
}

// Validate admits all users but nodes.
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
	case corev1.Resource("persistentvolumes"):
		return folder(node, a)
	case corev1.Resource("persistentvolumeclaims"):
		return claim(node, a)
	case resourcev1.Resource("resourceslices"):
		return slice(node, a)
	case storagev1.Resource("csinodes"):
		return csiNode(node, a)
	case certificatesv1.Resource("podcertificaterequests"):
		return p.podCertificate(ctx, node, a)
	case corev1.Resource("serviceaccounts"):
		if a.GetSubresource() == "token" {
			return p.token(ctx, node, a)
		}
	case coordinationv1.SchemeGroupVersion.WithResource("leases").GroupResource():
		return lease(node, a)
	}
	return nil
}

// token lets a node ask for tokens of its pods only: bound to the pod, and for
// whom the pod's volumes say.
func (p *plugin) token(ctx context.Context, node string, a admission.Attributes) error {
	request, ok := a.GetObject().(*authenticationv1.TokenRequest)
	if !ok {
		return refuse(a, "unexpected type %T", a.GetObject())
	}
	ref := request.Spec.BoundObjectRef
	switch {
	case ref == nil || ref.APIVersion != "v1" || ref.Kind != "Pod" || ref.Name == "":
		return refuse(a, "node requested token not bound to a pod")
	case ref.UID == "":
		return refuse(a, "node requested token with a pod binding without a uid")
	}
	pod, err := p.objects.Pod(ctx, a.GetNamespace(), ref.Name)
	if errors.IsNotFound(err) {
		return err
	}
	if err != nil {
		return admission.NewForbidden(a, err)
	}
	if pod.UID != ref.UID {
		return errors.NewConflict(corev1.Resource("pods"), ref.Name, fmt.Errorf("the UID in the bound object reference (%s) does not match the UID in record (%s). The object might have been deleted and then recreated", ref.UID, pod.UID))
	}
	if pod.Spec.NodeName != node {
		return refuse(a, "node requested token bound to a pod scheduled on a different node")
	}
	allowed := audiencesOf(pod)
	audiences := request.Spec.Audiences
	if len(audiences) == 0 {
		audiences = []string{""} // this server's
	}
	for _, audience := range audiences {
		if !slices.Contains(allowed, audience) && !slices.Contains(p.driverAudiences(ctx, pod), audience) {
			return refuse(a, "audience %q not found in pod spec volume", audience)
		}
	}
	return nil
}

// audiencesOf are those that the volumes of pod have tokens for; "" is this
// server.
func audiencesOf(pod *corev1.Pod) []string {
	var audiences []string
	for _, volume := range pod.Spec.Volumes {
		if volume.Projected == nil {
			continue
		}
		for _, source := range volume.Projected.Sources {
			if source.ServiceAccountToken != nil {
				audiences = append(audiences, source.ServiceAccountToken.Audience)
			}
		}
	}
	return audiences
}

func (p *plugin) pod(ctx context.Context, node string, a admission.Attributes) error {
	if a.GetSubresource() == "eviction" {
		pod, err := p.objects.Pod(ctx, a.GetNamespace(), a.GetName())
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
		return p.mirror(ctx, node, obj, a)
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
		if err := sameClaims(node, &old.Status, &obj.Status, a); err != nil {
			return err
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
func (p *plugin) mirror(ctx context.Context, node string, pod *corev1.Pod, a admission.Attributes) error {
	if _, ok := pod.Annotations[corev1.MirrorPodAnnotationKey]; !ok {
		return refuse(a, "pod does not have %q annotation, node %q can only create mirror pods", corev1.MirrorPodAnnotationKey, node)
	}
	owners := pod.OwnerReferences
	if len(owners) != 1 || owners[0].APIVersion != "v1" || owners[0].Kind != "Node" || owners[0].Name != node {
		return refuse(a, "node %q can only create pods with a single owner reference set to itself", node)
	}
	// Another owner's name would have the pod deleted at once, a former node's of this name too.
	if owner := owners[0]; owner.Controller == nil || !*owner.Controller {
		return refuse(a, "node %q can only create pods with a controller owner reference set to itself", node)
	} else if owner.BlockOwnerDeletion != nil && *owner.BlockOwnerDeletion {
		return refuse(a, "node %q must not set blockOwnerDeletion on an owner reference", node)
	}
	object, err := p.objects.Node(ctx, node)
	if errors.IsNotFound(err) {
		return err
	}
	if err != nil {
		return refuse(a, "failed looking up node %s to verify uid: %v", node, err)
	}
	if owners[0].UID != object.UID {
		return refuse(a, "node %s UID mismatch: expected %s got %s", node, object.UID, owners[0].UID)
	}
	var refers []string
	auth.References(pod, func(resource, name string) { refers = append(refers, resource+"/"+name) })
	for _, volume := range pod.Spec.Volumes {
		if volume.PersistentVolumeClaim != nil {
			refers = append(refers, "persistentvolumeclaims/"+volume.PersistentVolumeClaim.ClaimName)
		}
	}
	for _, claim := range pod.Spec.ResourceClaims {
		refers = append(refers, "spec.resourceClaims/"+claim.Name)
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

// folder lets a node say of the volumes that are directories of its own that they
// were made, and that they are gone. It may change nothing else of them.
func folder(node string, a admission.Attributes) error {
	old, wasOK := a.GetOldObject().(*corev1.PersistentVolume)
	obj, ok := a.GetObject().(*corev1.PersistentVolume)
	if a.GetOperation() != admission.Update || a.GetSubresource() != "" || !ok || !wasOK || old.Labels[names.LocalPathNode] != node {
		return refuse(a, "node %q may only update volumes that are folders of its own", node)
	}
	was, is := old.DeepCopy(), obj.DeepCopy()
	for _, v := range []*corev1.PersistentVolume{was, is} {
		v.ManagedFields, v.ResourceVersion, v.Generation = nil, "", 0
		delete(v.Annotations, names.LocalPathMade)
		if len(v.Annotations) == 0 {
			v.Annotations = nil
		}
	}
	gone := slices.DeleteFunc(slices.Clone(was.Finalizers), func(f string) bool { return f == names.LocalPathFinalizer })
	if old.DeletionTimestamp != nil && slices.Equal(is.Finalizers, gone) {
		was.Finalizers, is.Finalizers = nil, nil
	}
	if !equality.Semantic.DeepEqual(was, is) {
		return refuse(a, "node %q may only say of a volume that its folder was made or removed", node)
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
	// Who is owned goes with the owner: a node could have itself deleted, and come
	// back with other labels and taints.
	var owners []metav1.OwnerReference
	if old != nil {
		owners = old.OwnerReferences
	}
	if !equality.Semantic.DeepEqual(owners, obj.OwnerReferences) {
		return refuse(a, "node %q is not allowed to modify ownerReferences", node)
	}
	changed := slices.DeleteFunc(changedLabels(old, obj), func(key string) bool { return itsRole(a.GetUserInfo(), obj, key) })
	if len(changed) > 0 {
		return refuse(a, "node %q is not allowed to modify labels: %s", node, strings.Join(changed, ", "))
	}
	return nil
}

// changedLabels lists the labels that a node may not set and that obj has
// otherwise than old: those of restrictedLabels, and Kubernetes' own but for
// the few that say what a node is. Roles (node-role.kubernetes.io) are none of
// these: they decide what is sent to a node.
func changedLabels(old, obj *corev1.Node) []string {
	before := map[string]string{}
	if old != nil {
		before = old.Labels
	}
	var changed []string
	for key := range union(before, obj.Labels) {
		if !Restricted(key) {
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

// Restricted reports whether a node may not set a label of its own Node.
func Restricted(key string) bool {
	domain, _, ok := strings.Cut(key, "/")
	if !ok {
		return false // it has no domain
	}
	within := func(zone string) bool { return domain == zone || strings.HasSuffix(domain, "."+zone) }
	if within(restrictedLabels) {
		return true
	}
	return (within("kubernetes.io") || within("k8s.io")) && !kubeletapis.IsKubeletLabel(key)
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
