package auth

import (
	"context"
	"errors"
	"testing"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/authorization/union"
)

// fakePods are the pods of node n1.
type fakePods struct {
	pods []*corev1.Pod
	err  error
}

func (f fakePods) OnNode(_ context.Context, node, _ string) ([]*corev1.Pod, error) {
	if node != "n1" {
		return nil, f.err
	}
	return f.pods, f.err
}

func (f fakePods) Claim(_ context.Context, namespace, name string) (*corev1.PersistentVolumeClaim, error) {
	if namespace != "default" || name != "data" {
		return nil, apierrors.NewNotFound(corev1.Resource("persistentvolumeclaims"), name)
	}
	return &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{UID: "c1"}, Spec: corev1.PersistentVolumeClaimSpec{VolumeName: "disk"}}, nil
}

func (f fakePods) Volume(_ context.Context, name string) (*corev1.PersistentVolume, error) {
	if name != "disk" {
		return nil, apierrors.NewNotFound(corev1.Resource("persistentvolumes"), name)
	}
	v := &corev1.PersistentVolume{Spec: corev1.PersistentVolumeSpec{ClaimRef: &corev1.ObjectReference{UID: "c1"}}}
	v.Spec.CSI = &corev1.CSIPersistentVolumeSource{NodeStageSecretRef: &corev1.SecretReference{Namespace: "vault", Name: "stage"}}
	return v, nil
}

func (f fakePods) Attachment(_ context.Context, name string) (*storagev1.VolumeAttachment, error) {
	node, ok := map[string]string{"mine": "n1", "theirs": "n2"}[name]
	if !ok {
		return nil, apierrors.NewNotFound(storagev1.Resource("volumeattachments"), name)
	}
	return &storagev1.VolumeAttachment{Spec: storagev1.VolumeAttachmentSpec{NodeName: node}}, nil
}

func (f fakePods) PodCertificateRequest(_ context.Context, _, name string) (*certificatesv1.PodCertificateRequest, error) {
	node, ok := map[string]types.NodeName{"mine": "n1", "theirs": "n2"}[name]
	if !ok {
		return nil, apierrors.NewNotFound(certificatesv1.Resource("podcertificaterequests"), name)
	}
	return &certificatesv1.PodCertificateRequest{Spec: certificatesv1.PodCertificateRequestSpec{NodeName: node}}, nil
}

func (f fakePods) ResourceSlice(_ context.Context, name string) (*resourcev1.ResourceSlice, error) {
	node, ok := map[string]string{"mine": "n1", "theirs": "n2", "anybodys": ""}[name]
	if !ok {
		return nil, apierrors.NewNotFound(resourcev1.Resource("resourceslices"), name)
	}
	s := &resourcev1.ResourceSlice{}
	if node != "" {
		s.Spec.NodeName = &node
	}
	return s, nil
}

func who(name string, groups ...string) user.Info {
	return &user.DefaultInfo{Name: name, Groups: append(groups, user.AllAuthenticated)}
}

func resource(verb, group, resource, subresource, namespace, name string) authorizer.AttributesRecord {
	return authorizer.AttributesRecord{ResourceRequest: true, Verb: verb, APIGroup: group, Resource: resource, Subresource: subresource, Namespace: namespace, Name: name}
}

func path(verb, p string) authorizer.AttributesRecord {
	return authorizer.AttributesRecord{Verb: verb, Path: p}
}

func TestNodesAndMasters(t *testing.T) {
	node := who("system:node:n1", user.NodesGroup)
	z, err := union.New(union.NamedAuthorizer{AuthorizerName: "masters", Authorizer: Masters{}}, union.NamedAuthorizer{AuthorizerName: "node", Authorizer: NewNodeAuthorizer(fakePods{})})
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name string
		user user.Info
		asks authorizer.AttributesRecord
		want bool
	}{
		{"root, anything", who("root", user.SystemPrivilegedGroup), resource("delete", "x", "y", "z", "", ""), true},
		{"root, any path", who("root", user.SystemPrivilegedGroup), path("post", "/clusterd/v1/x"), true},
		{"jane, nothing", who("jane"), resource("get", "", "pods", "", "default", "p"), false},
		{"node, services", node, resource("list", "", "services", "", "", ""), true},
		{"node, its status", node, resource("patch", "", "nodes", "status", "", "n1"), true},
		{"node, another's status", node, resource("patch", "", "nodes", "status", "", "n2"), false},
		{"node, no paths", node, path("get", "/metrics"), false},
		{"node, its lease", node, resource("update", "coordination.k8s.io", "leases", "", "kube-node-lease", "n1"), true},
		{"node, no other lease", node, resource("update", "coordination.k8s.io", "leases", "", "default", "n1"), false},
		{"node, a certificate for a pod", node, resource("create", "certificates.k8s.io", "podcertificaterequests", "", "default", ""), true},
		{"node, its request for one", node, resource("get", "certificates.k8s.io", "podcertificaterequests", "", "default", "mine"), true},
		{"node, another's request", node, resource("get", "certificates.k8s.io", "podcertificaterequests", "", "default", "theirs"), false},
		{"node, no request", node, resource("get", "certificates.k8s.io", "podcertificaterequests", "", "default", "none"), false},
		{"node, all requests", node, resource("list", "certificates.k8s.io", "podcertificaterequests", "", "", ""), false},
		{"node, an answer", node, resource("update", "certificates.k8s.io", "podcertificaterequests", "status", "default", "mine"), false},
		{"a node's name without its group", who("system:node:n1"), resource("list", "", "services", "", "", ""), false},
		{"a node's group without its name", who("n1", user.NodesGroup), resource("list", "", "services", "", "", ""), false},
		{"a node without a name", who("system:node:", user.NodesGroup), resource("list", "", "services", "", "", ""), false},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.asks.User = test.user
			decision, _, err := z.Authorize(t.Context(), test.asks)
			if err != nil || (decision == authorizer.DecisionAllow) != test.want {
				t.Errorf("%v %v, want allowed: %t", decision, err, test.want)
			}
		})
	}
}

func TestNobodyMayNothing(t *testing.T) {
	decision, _, err := NewNodeAuthorizer(fakePods{}).Authorize(t.Context(), path("get", "/healthz"))
	if decision == authorizer.DecisionAllow || err != nil {
		t.Errorf("%v %v", decision, err)
	}
}

func TestNodesFailClosed(t *testing.T) {
	broken := errors.New("store is away")
	asks := resource("get", "", "secrets", "", "default", "s")
	asks.User = who("system:node:n1", user.NodesGroup)
	decision, _, err := NewNodeAuthorizer(fakePods{err: broken}).Authorize(t.Context(), asks)
	if decision == authorizer.DecisionAllow || !errors.Is(err, broken) {
		t.Errorf("%v %v", decision, err)
	}
}

func TestSelectorsDoNotWidenWhatANodeSees(t *testing.T) {
	z := NewNodeAuthorizer(fakePods{})
	for selector, want := range map[string]bool{
		"spec.nodeName=n1":                   true,
		"spec.nodeName=n1,metadata.name=x":   true,
		"spec.nodeName!=n1":                  false,
		"spec.nodeName=n2":                   false,
		"metadata.name=x":                    false,
		"spec.nodeName!=n2,metadata.name=n1": false,
	} {
		parsed, err := fields.ParseSelector(selector)
		if err != nil {
			t.Fatal(err)
		}
		asks := resource("list", "", "pods", "", "", "")
		asks.User = who("system:node:n1", user.NodesGroup)
		asks.FieldSelectorRequirements = parsed.Requirements()
		decision, _, err := z.Authorize(t.Context(), asks)
		if err != nil || (decision == authorizer.DecisionAllow) != want {
			t.Errorf("%s: %v %v, want allowed: %t", selector, decision, err, want)
		}
	}
}

func TestRefers(t *testing.T) {
	local := corev1.LocalObjectReference{Name: "x"}
	env := func(source *corev1.EnvVarSource) []corev1.EnvVar {
		return []corev1.EnvVar{{Name: "E", ValueFrom: source}}
	}
	volume := func(source corev1.VolumeSource) corev1.PodSpec {
		return corev1.PodSpec{Volumes: []corev1.Volume{{Name: "v", VolumeSource: source}}}
	}
	for _, test := range []struct {
		name     string
		resource string
		spec     corev1.PodSpec
	}{
		{"pull secret", "secrets", corev1.PodSpec{ImagePullSecrets: []corev1.LocalObjectReference{local}}},
		{"secret volume", "secrets", volume(corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: "x"}})},
		{"projected secret", "secrets", volume(corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{{Secret: &corev1.SecretProjection{LocalObjectReference: local}}}}})},
		{"secret variable", "secrets", corev1.PodSpec{Containers: []corev1.Container{{Env: env(&corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: local}})}}}},
		{"secret variables", "secrets", corev1.PodSpec{InitContainers: []corev1.Container{{EnvFrom: []corev1.EnvFromSource{{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: local}}}}}}},
		{"config volume", "configmaps", volume(corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: local}})},
		{"projected config", "configmaps", volume(corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{{ConfigMap: &corev1.ConfigMapProjection{LocalObjectReference: local}}}}})},
		{"config variable", "configmaps", corev1.PodSpec{EphemeralContainers: []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Env: env(&corev1.EnvVarSource{ConfigMapKeyRef: &corev1.ConfigMapKeySelector{LocalObjectReference: local}})}}}}},
		{"config variables", "configmaps", corev1.PodSpec{Containers: []corev1.Container{{EnvFrom: []corev1.EnvFromSource{{ConfigMapRef: &corev1.ConfigMapEnvSource{LocalObjectReference: local}}}}}}},
		{"account", "serviceaccounts", corev1.PodSpec{ServiceAccountName: "x"}},
	} {
		t.Run(test.name, func(t *testing.T) {
			pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p"}, Spec: test.spec}
			for _, r := range []string{"secrets", "configmaps", "serviceaccounts", "pods"} {
				if got := Refers(pod, r, "x"); got != (r == test.resource) {
					t.Errorf("refers to %s x: %t", r, got)
				}
				if Refers(pod, r, "y") {
					t.Errorf("refers to %s y", r)
				}
			}
		})
	}
}

func TestNodesSeeVolumesOfTheirPodsOnly(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "default"}, Spec: corev1.PodSpec{Volumes: []corev1.Volume{
		{Name: "v", VolumeSource: corev1.VolumeSource{PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "data"}}},
		{Name: "scratch", VolumeSource: corev1.VolumeSource{Ephemeral: &corev1.EphemeralVolumeSource{}}},
	}}}
	z := NewNodeAuthorizer(fakePods{pods: []*corev1.Pod{pod}})
	selected := func(verb, selector string) authorizer.AttributesRecord {
		a := resource(verb, "", "persistentvolumes", "", "", "")
		parsed, err := labels.ParseToRequirements(selector)
		if err != nil {
			t.Fatal(err)
		}
		a.LabelSelectorRequirements = parsed
		return a
	}
	for _, test := range []struct {
		name string
		asks authorizer.AttributesRecord
		want bool
	}{
		{"claim of a pod", resource("get", "", "persistentvolumeclaims", "", "default", "data"), true},
		{"ephemeral claim of a pod", resource("get", "", "persistentvolumeclaims", "", "default", "p-scratch"), true},
		{"another claim", resource("get", "", "persistentvolumeclaims", "", "default", "other"), false},
		{"all claims", resource("list", "", "persistentvolumeclaims", "", "default", ""), false},
		{"changing a claim", resource("update", "", "persistentvolumeclaims", "", "default", "data"), false},
		{"volume of a pod's claim", resource("get", "", "persistentvolumes", "", "", "disk"), true},
		{"another volume", resource("get", "", "persistentvolumes", "", "", "other"), false},
		{"a pod's claim, watched", func() authorizer.AttributesRecord {
			a := resource("watch", "", "persistentvolumeclaims", "", "default", "")
			a.FieldSelectorRequirements = fields.OneTermEqualSelector("metadata.name", "data").Requirements()
			return a
		}(), true},
		{"size of a pod's claim", resource("patch", "", "persistentvolumeclaims", "status", "default", "data"), true},
		{"size of another claim", resource("patch", "", "persistentvolumeclaims", "status", "default", "other"), false},
		{"secret for the driver of a pod's volume", resource("get", "", "secrets", "", "vault", "stage"), true},
		{"another secret there", resource("get", "", "secrets", "", "vault", "other"), false},
		{"that secret elsewhere", resource("get", "", "secrets", "", "default", "stage"), false},
		{"what is attached to it", resource("get", "storage.k8s.io", "volumeattachments", "", "", "mine"), true},
		{"what is attached to another", resource("get", "storage.k8s.io", "volumeattachments", "", "", "theirs"), false},
		{"what does not exist", resource("get", "storage.k8s.io", "volumeattachments", "", "", "none"), false},
		{"attaching", resource("create", "storage.k8s.io", "volumeattachments", "", "", "mine"), false},
		{"drivers", resource("watch", "storage.k8s.io", "csidrivers", "", "", ""), true},
		{"its drivers", resource("update", "storage.k8s.io", "csinodes", "", "", "n1"), true},
		{"another's drivers", resource("update", "storage.k8s.io", "csinodes", "", "", "n2"), false},
		{"all volumes", resource("list", "", "persistentvolumes", "", "", ""), false},
		{"its own folders", selected("watch", "clusterd.local/local-path-node=n1"), true},
		{"another's folders", selected("list", "clusterd.local/local-path-node=n2"), false},
		{"its own and another's", selected("list", "clusterd.local/local-path-node in (n1,n2)"), false},
		{"all but another's", selected("list", "clusterd.local/local-path-node!=n2"), false},
	} {
		t.Run(test.name, func(t *testing.T) {
			test.asks.User = who("system:node:n1", user.NodesGroup)
			decision, _, err := z.Authorize(t.Context(), test.asks)
			if err != nil || (decision == authorizer.DecisionAllow) != test.want {
				t.Errorf("%v %v, want allowed: %t", decision, err, test.want)
			}
		})
	}
}
