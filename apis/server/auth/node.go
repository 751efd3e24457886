package auth

import (
	"context"
	"fmt"
	"slices"
	"strings"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/selection"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/component-helpers/storage/ephemeral"

	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/apis/server/tokens"
)

// Pods tells which pods are bound to a node. It is called on requests of
// nodes, from many goroutines, and may block on the store.
type Pods interface {
	// OnNode lists the pods bound to node, in one namespace or, if namespace
	// is empty, in all.
	OnNode(ctx context.Context, node, namespace string) ([]*corev1.Pod, error)
	// PodCertificateRequest reads one. One that is missing is a NotFound
	// StatusError.
	PodCertificateRequest(ctx context.Context, namespace, name string) (*certificatesv1.PodCertificateRequest, error)
	Volumes
	Devices
}

// NodeName is the node that u is, if u is one: user system:node:NAME in group
// system:nodes.
func NodeName(u user.Info) (string, bool) {
	if u == nil || !slices.Contains(u.GetGroups(), user.NodesGroup) {
		return "", false
	}
	name, ok := strings.CutPrefix(u.GetName(), NodeUserPrefix)
	return name, ok && name != ""
}

// nodeRules is what every node may do whatever runs on it: what its agent
// needs to publish itself, and what its network needs to know about all others.
// Which objects a node may write is narrowed further by the noderestriction
// admission plugin.
func nodeRules(node string) []Rule {
	return []Rule{
		{Verbs: read, Groups: core, Resources: []string{"nodes", "services", "namespaces", "endpoints"}},
		{Verbs: read, Groups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}},
		{Verbs: read, Groups: []string{"certificates.k8s.io"}, Resources: []string{"clustertrustbundles"}},
		{Verbs: []string{"create"}, Groups: []string{"certificates.k8s.io"}, Resources: []string{"podcertificaterequests"}}, // of its pods only
		{Verbs: read, Groups: []string{"node.k8s.io"}, Resources: []string{"runtimeclasses"}},
		{Verbs: read, Groups: []string{"networking.k8s.io"}, Resources: []string{"networkpolicies"}},
		{Verbs: []string{"create"}, Groups: core, Resources: []string{"nodes"}},
		{Verbs: []string{"update", "patch"}, Groups: core, Resources: []string{"nodes", "nodes/status"}, Names: []string{node}},
		{Verbs: []string{"create", "update", "patch"}, Groups: []string{"", "events.k8s.io"}, Resources: []string{"events"}},
		{Verbs: []string{"create"}, Groups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Namespace: corev1.NamespaceNodeLease},
		{Verbs: []string{"get", "list", "watch", "update", "patch", "delete"}, Groups: []string{"coordination.k8s.io"}, Resources: []string{"leases"}, Namespace: corev1.NamespaceNodeLease, Names: []string{node}},
		{Verbs: read, Groups: []string{"storage.k8s.io"}, Resources: []string{"csidrivers"}},
		{Verbs: []string{"create"}, Groups: []string{"storage.k8s.io"}, Resources: []string{"csinodes"}},
		{Verbs: []string{"get", "update", "patch", "delete"}, Groups: []string{"storage.k8s.io"}, Resources: []string{"csinodes"}, Names: []string{node}},
		// Its kubelet's port asks who shows a token, and what that user may.
		{Verbs: []string{"create"}, Groups: []string{"authentication.k8s.io"}, Resources: []string{"tokenreviews"}},
		{Verbs: []string{"create"}, Groups: []string{"authorization.k8s.io"}, Resources: []string{"subjectaccessreviews"}},
		{Verbs: []string{"create"}, Groups: core, Resources: []string{"pods/eviction"}},
		{Verbs: []string{"update", "patch"}, Groups: core, Resources: []string{"pods/status"}},
		{Verbs: []string{"patch"}, Groups: core, Resources: []string{"persistentvolumes"}}, // of its own directories only
		{Verbs: []string{"create", "delete"}, Groups: core, Resources: []string{"pods"}},   // it creates mirror pods only
	}
}

func (z *NodeAuthorizer) authorizeNode(ctx context.Context, node string, a authorizer.Attributes) (authorizer.Decision, string, error) {
	for _, rule := range nodeRules(node) {
		if rule.allows(a) {
			return authorizer.DecisionAllow, "", nil
		}
	}
	if !a.IsResourceRequest() && a.GetVerb() == "get" && a.GetPath() == tokens.KeysPath {
		return authorizer.DecisionAllow, "", nil // whether its pods' tokens are still of a key that counts
	}
	if a.IsResourceRequest() && a.GetAPIGroup() == "" && a.GetResource() == "serviceaccounts" && a.GetSubresource() == "token" && a.GetVerb() == "create" {
		// To which pod the token is bound, noderestriction looks at.
		return z.readReferenced(ctx, node, a)
	}
	if claimStatus(a) {
		return z.readReferenced(ctx, node, a)
	}
	if a.IsResourceRequest() && a.GetAPIGroup() == "storage.k8s.io" && a.GetResource() == "volumeattachments" && a.GetSubresource() == "" {
		return z.readAttachment(ctx, node, a)
	}
	if a.IsResourceRequest() && a.GetAPIGroup() == "certificates.k8s.io" && a.GetResource() == "podcertificaterequests" && a.GetSubresource() == "" && slices.Contains(read, a.GetVerb()) {
		return z.readPodRequests(ctx, node, a)
	}
	if a.IsResourceRequest() && a.GetAPIGroup() == "resource.k8s.io" {
		return z.readDevices(ctx, node, a)
	}
	if !a.IsResourceRequest() || a.GetAPIGroup() != "" || a.GetSubresource() != "" || !slices.Contains(read, a.GetVerb()) {
		return authorizer.DecisionNoOpinion, "", nil
	}
	switch a.GetResource() {
	case "pods":
		return z.readPods(ctx, node, a)
	case "secrets", "configmaps", "serviceaccounts", "persistentvolumeclaims":
		return z.readReferenced(ctx, node, a)
	case "persistentvolumes":
		return z.readVolumes(ctx, node, a)
	}
	return authorizer.DecisionNoOpinion, "", nil
}

// readPods lets a node see the pods bound to it: by field selector, or one by
// name.
func (z *NodeAuthorizer) readPods(ctx context.Context, node string, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if selected(a, "spec.nodeName") == node {
		return authorizer.DecisionAllow, "", nil
	}
	if a.GetName() == "" {
		return authorizer.DecisionNoOpinion, "a node may only list and watch pods with field selector spec.nodeName=" + node, nil
	}
	pods, err := z.pods.OnNode(ctx, node, a.GetNamespace())
	if err != nil {
		return authorizer.DecisionNoOpinion, "", fmt.Errorf("find the pods of node %s: %w", node, err)
	}
	if slices.ContainsFunc(pods, func(pod *corev1.Pod) bool { return pod.Name == a.GetName() }) {
		return authorizer.DecisionAllow, "", nil
	}
	return authorizer.DecisionNoOpinion, fmt.Sprintf("pod %s is not bound to node %s", a.GetName(), node), nil
}

// readPodRequests lets a node see the requests for certificates of its own
// pods: by field selector, or one by name.
func (z *NodeAuthorizer) readPodRequests(ctx context.Context, node string, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if selected(a, "spec.nodeName") == node {
		return authorizer.DecisionAllow, "", nil
	}
	if a.GetVerb() != "get" || a.GetName() == "" {
		return authorizer.DecisionNoOpinion, "a node may only list and watch podcertificaterequests with field selector spec.nodeName=" + node, nil
	}
	found, err := z.pods.PodCertificateRequest(ctx, a.GetNamespace(), a.GetName())
	switch {
	case apierrors.IsNotFound(err):
		return authorizer.DecisionNoOpinion, fmt.Sprintf("node %s has asked for no certificate by that name", node), nil
	case err != nil:
		return authorizer.DecisionNoOpinion, "", err
	case string(found.Spec.NodeName) != node:
		return authorizer.DecisionNoOpinion, "it is of another node", nil
	}
	return authorizer.DecisionAllow, "", nil
}

// readVolumes lets a node see the volumes that are directories of its own, by label
// selector, and those that claims of its pods are bound to, one by name.
func (z *NodeAuthorizer) readVolumes(ctx context.Context, node string, a authorizer.Attributes) (authorizer.Decision, string, error) {
	requirements, _ := a.GetLabelSelector()
	for _, r := range requirements {
		value, one := r.Values().PopAny()
		if r.Key() == names.LocalPathNode && (r.Operator() == selection.Equals || r.Operator() == selection.DoubleEquals || r.Operator() == selection.In) && one && value == node && r.Values().Len() == 1 {
			return authorizer.DecisionAllow, "", nil
		}
	}
	if a.GetVerb() != "get" || a.GetName() == "" {
		return authorizer.DecisionNoOpinion, "a node may only list and watch persistentvolumes with label selector " + names.LocalPathNode + "=" + node, nil
	}
	pods, err := z.pods.OnNode(ctx, node, "")
	if err != nil {
		return authorizer.DecisionNoOpinion, "", fmt.Errorf("find the pods of node %s: %w", node, err)
	}
	for _, pod := range pods {
		for _, name := range claimsOf(pod) {
			claim, err := z.pods.Claim(ctx, pod.Namespace, name)
			if err == nil && claim.Spec.VolumeName == a.GetName() {
				return authorizer.DecisionAllow, "", nil
			}
		}
	}
	return authorizer.DecisionNoOpinion, fmt.Sprintf("no pod bound to node %s uses it", node), nil
}

// claimsOf are the claims that the pod mounts.
func claimsOf(pod *corev1.Pod) []string {
	var names []string
	for i := range pod.Spec.Volumes {
		switch v := &pod.Spec.Volumes[i]; {
		case v.PersistentVolumeClaim != nil:
			names = append(names, v.PersistentVolumeClaim.ClaimName)
		case v.Ephemeral != nil:
			names = append(names, ephemeral.VolumeClaimName(pod, v))
		}
	}
	return names
}

// readReferenced lets a node read, one by name, the objects that a pod bound
// to it refers to.
func (z *NodeAuthorizer) readReferenced(ctx context.Context, node string, a authorizer.Attributes) (authorizer.Decision, string, error) {
	name := a.GetName()
	if name == "" {
		name = selected(a, "metadata.name")
	}
	if name == "" || a.GetNamespace() == "" {
		return authorizer.DecisionNoOpinion, fmt.Sprintf("a node may only read an individual %s that one of its pods refers to", strings.TrimSuffix(a.GetResource(), "s")), nil
	}
	pods, err := z.pods.OnNode(ctx, node, a.GetNamespace())
	if err != nil {
		return authorizer.DecisionNoOpinion, "", fmt.Errorf("find the pods of node %s: %w", node, err)
	}
	for _, pod := range pods {
		if a.GetResource() == "persistentvolumeclaims" && slices.Contains(claimsOf(pod), name) || Refers(pod, a.GetResource(), name) {
			return authorizer.DecisionAllow, "", nil
		}
	}
	if a.GetResource() == "secrets" && a.GetVerb() == "get" {
		if ok, err := z.driverSecret(ctx, node, a.GetNamespace(), name); ok || err != nil {
			if ok {
				return authorizer.DecisionAllow, "", nil
			}
			return authorizer.DecisionNoOpinion, "", err
		}
	}
	return authorizer.DecisionNoOpinion, fmt.Sprintf("no pod bound to node %s refers to it", node), nil
}

// selected is the value that a's field selector pins field to, or "".
func selected(a authorizer.Attributes, field string) string {
	requirements, err := a.GetFieldSelector()
	if err != nil {
		return ""
	}
	for _, r := range requirements {
		if r.Field == field && (r.Operator == "=" || r.Operator == "==") {
			return r.Value
		}
	}
	return ""
}

// Refers reports whether pod refers to the named secret, config map or service
// account of its namespace.
func Refers(pod *corev1.Pod, resource, name string) bool {
	found := false
	References(pod, func(r, n string) { found = found || r == resource && n == name })
	return found
}

// References tells visit of each secret, config map and service account, by
// plural and name, that pod refers to: what its node may read.
func References(pod *corev1.Pod, visit func(resource, name string)) {
	if name := pod.Spec.ServiceAccountName; name != "" {
		visit("serviceaccounts", name)
	}
	for _, ref := range pod.Spec.ImagePullSecrets {
		visit("secrets", ref.Name)
	}
	for _, volume := range pod.Spec.Volumes {
		if volume.Secret != nil {
			visit("secrets", volume.Secret.SecretName)
		}
		if volume.ConfigMap != nil {
			visit("configmaps", volume.ConfigMap.Name)
		}
		if volume.CSI != nil && volume.CSI.NodePublishSecretRef != nil {
			visit("secrets", volume.CSI.NodePublishSecretRef.Name)
		}
		if volume.Projected == nil {
			continue
		}
		for _, source := range volume.Projected.Sources {
			if source.Secret != nil {
				visit("secrets", source.Secret.Name)
			}
			if source.ConfigMap != nil {
				visit("configmaps", source.ConfigMap.Name)
			}
		}
	}
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		envReferences(c.Env, c.EnvFrom, visit)
	}
	for _, c := range pod.Spec.EphemeralContainers {
		envReferences(c.Env, c.EnvFrom, visit)
	}
}

func envReferences(env []corev1.EnvVar, from []corev1.EnvFromSource, visit func(resource, name string)) {
	for _, v := range env {
		if v.ValueFrom != nil && v.ValueFrom.SecretKeyRef != nil {
			visit("secrets", v.ValueFrom.SecretKeyRef.Name)
		}
		if v.ValueFrom != nil && v.ValueFrom.ConfigMapKeyRef != nil {
			visit("configmaps", v.ValueFrom.ConfigMapKeyRef.Name)
		}
	}
	for _, f := range from {
		if f.SecretRef != nil {
			visit("secrets", f.SecretRef.Name)
		}
		if f.ConfigMapRef != nil {
			visit("configmaps", f.ConfigMapRef.Name)
		}
	}
}
