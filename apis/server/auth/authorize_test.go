package auth

import (
	"context"
	"errors"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
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

func who(name string, groups ...string) user.Info {
	return &user.DefaultInfo{Name: name, Groups: append(groups, user.AllAuthenticated)}
}

func resource(verb, group, resource, subresource, namespace, name string) authorizer.AttributesRecord {
	return authorizer.AttributesRecord{ResourceRequest: true, Verb: verb, APIGroup: group, Resource: resource, Subresource: subresource, Namespace: namespace, Name: name}
}

func path(verb, p string) authorizer.AttributesRecord {
	return authorizer.AttributesRecord{Verb: verb, Path: p}
}

func TestGrants(t *testing.T) {
	manager, scheduler, jane := who(ControllerManager), who(Scheduler), who("jane")
	root := who("root", user.SystemPrivilegedGroup)
	z := NewAuthorizer(fakePods{})
	for _, test := range []struct {
		name string
		user user.Info
		asks authorizer.AttributesRecord
		want bool
	}{
		{"root, anything", root, resource("delete", "x", "y", "z", "", ""), true},
		{"root, any path", root, path("post", "/clusterd/v1/x"), true},
		{"jane, nothing", jane, resource("get", "", "pods", "", "default", "p"), false},
		{"jane, discovery", jane, path("get", "/apis/apps/v1"), true},
		{"jane, no writing there", jane, path("post", "/apis/apps/v1"), false},
		{"jane, metrics", jane, path("get", "/metrics"), false},
		{"jane, about herself", jane, resource("create", "authorization.k8s.io", "selfsubjectaccessreviews", "", "", ""), true},
		{"jane, about others", jane, resource("create", "authorization.k8s.io", "subjectaccessreviews", "", "", ""), false},
		{"manager, kinds", manager, resource("create", "apps", "replicasets", "", "default", ""), true},
		{"manager, status", manager, resource("update", "apps", "deployments", "status", "default", "d"), true},
		{"manager, finalize", manager, resource("update", "", "namespaces", "finalize", "", "n"), true},
		{"manager, no terminals", manager, resource("create", "", "pods", "exec", "default", "p"), false},
		{"manager, no proxies", manager, resource("get", "", "nodes", "proxy", "", "n"), false},
		{"manager, no binding", manager, resource("create", "", "pods", "binding", "default", "p"), false},
		{"manager, nobody else", manager, resource("impersonate", "", "users", "", "", "root"), false},
		{"scheduler, binding", scheduler, resource("create", "", "pods", "binding", "default", "p"), true},
		{"scheduler, status of pods", scheduler, resource("patch", "", "pods", "status", "default", "p"), true},
		{"scheduler, no creation", scheduler, resource("create", "", "pods", "", "default", ""), false},
		{"scheduler, its lease", scheduler, resource("update", "coordination.k8s.io", "leases", "", "kube-system", "l"), true},
		{"scheduler, no other lease", scheduler, resource("update", "coordination.k8s.io", "leases", "", "default", "l"), false},
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
	decision, _, err := NewAuthorizer(fakePods{}).Authorize(t.Context(), path("get", "/healthz"))
	if decision == authorizer.DecisionAllow || err != nil {
		t.Errorf("%v %v", decision, err)
	}
}

func TestNodesFailClosed(t *testing.T) {
	broken := errors.New("store is away")
	asks := resource("get", "", "secrets", "", "default", "s")
	asks.User = who("system:node:n1", user.NodesGroup)
	decision, _, err := NewAuthorizer(fakePods{err: broken}).Authorize(t.Context(), asks)
	if decision == authorizer.DecisionAllow || !errors.Is(err, broken) {
		t.Errorf("%v %v", decision, err)
	}
}

func TestSelectorsDoNotWidenWhatANodeSees(t *testing.T) {
	z := NewAuthorizer(fakePods{})
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
