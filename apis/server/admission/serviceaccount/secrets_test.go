package serviceaccount

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
)

// accounts has one that is called as its key.
type accounts map[string]*corev1.ServiceAccount

func (a accounts) ServiceAccount(_ context.Context, _, name string) (*corev1.ServiceAccount, error) {
	if account := a[name]; account != nil {
		return account, nil
	}
	return nil, apierrors.NewNotFound(corev1.Resource("serviceaccounts"), name)
}

func env(secret string) []corev1.EnvVar {
	return []corev1.EnvVar{{Name: "E", ValueFrom: &corev1.EnvVarSource{SecretKeyRef: &corev1.SecretKeySelector{LocalObjectReference: corev1.LocalObjectReference{Name: secret}}}}}
}

func from(secret string) []corev1.EnvFromSource {
	return []corev1.EnvFromSource{{SecretRef: &corev1.SecretEnvSource{LocalObjectReference: corev1.LocalObjectReference{Name: secret}}}}
}

func volume(source corev1.VolumeSource) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.Volumes = []corev1.Volume{{Name: "v", VolumeSource: source}} }
}

func projected(source corev1.VolumeProjection) corev1.VolumeSource {
	return corev1.VolumeSource{Projected: &corev1.ProjectedVolumeSource{Sources: []corev1.VolumeProjection{source}}}
}

// TestMountableSecrets: an account can keep its pods to the Secrets that it lists.
func TestMountableSecrets(t *testing.T) {
	meta := func(name, enforce string) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "ns", Name: name, Annotations: map[string]string{enforceMountable: enforce}}
	}
	account := func(name, enforce string) *corev1.ServiceAccount {
		return &corev1.ServiceAccount{ObjectMeta: meta(name, enforce), Secrets: []corev1.ObjectReference{{Name: "listed"}}, ImagePullSecrets: []corev1.LocalObjectReference{{Name: "pull"}}}
	}
	p := New(accounts{"strict": account("strict", "true"), "open": account("open", "no"), "off": account("off", "false")})
	validate := func(account, subresource string, change func(*corev1.Pod)) error {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p"}, Spec: corev1.PodSpec{ServiceAccountName: account, Containers: []corev1.Container{{Name: "c"}}}}
		change(pod)
		operation := admission.Create
		if subresource != "" {
			operation = admission.Update
		}
		return p.(admission.ValidationInterface).Validate(t.Context(), admission.NewAttributesRecord(pod, nil, corev1.SchemeGroupVersion.WithKind("Pod"), "ns", "p",
			corev1.SchemeGroupVersion.WithResource("pods"), subresource, operation, nil, false, nil), nil)
	}
	for name, test := range map[string]struct {
		subresource string
		change      func(secret string) func(*corev1.Pod)
		good, want  string
	}{
		"volume": {change: func(s string) func(*corev1.Pod) {
			return volume(corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: s}})
		}, good: "listed", want: `volume with secret.secretName="other" is not allowed because service account strict does not reference that secret`},
		"projected volume": {change: func(s string) func(*corev1.Pod) {
			return volume(projected(corev1.VolumeProjection{Secret: &corev1.SecretProjection{LocalObjectReference: corev1.LocalObjectReference{Name: s}}}))
		}, good: "listed", want: `projected secret.name="other"`},
		"env": {change: func(s string) func(*corev1.Pod) {
			return func(p *corev1.Pod) { p.Spec.Containers[0].Env = env(s) }
		}, good: "listed", want: `container c with envVar E referencing secret.secretName="other"`},
		"envFrom of an init container": {change: func(s string) func(*corev1.Pod) {
			return func(p *corev1.Pod) {
				p.Spec.InitContainers = []corev1.Container{{Name: "i", EnvFrom: from(s)}}
			}
		}, good: "listed", want: `init container i with envFrom referencing secret.secretName="other"`},
		"pull secret": {change: func(s string) func(*corev1.Pod) {
			return func(p *corev1.Pod) { p.Spec.ImagePullSecrets = []corev1.LocalObjectReference{{Name: s}} }
		}, good: "pull", want: `imagePullSecrets[0].name="other"`},
		"ephemeral container": {subresource: ephemeral, change: func(s string) func(*corev1.Pod) {
			return func(p *corev1.Pod) {
				p.Spec.EphemeralContainers = []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "e", Env: env(s)}}}
			}
		}, good: "listed", want: `ephemeral container e with envVar E referencing secret.secretName="other"`},
	} {
		if err := validate("strict", test.subresource, test.change("other")); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want Forbidden: %s", name, err, test.want)
		}
		if err := validate("strict", test.subresource, test.change(test.good)); err != nil {
			t.Errorf("%s, of a Secret that the account lists: %v", name, err)
		}
		for _, lax := range []string{"open", "off"} {
			if err := validate(lax, test.subresource, test.change("other")); err != nil {
				t.Errorf("%s, of the account %s: %v", name, lax, err)
			}
		}
	}
	// A later write of the pod is about something else.
	if err := validate("strict", "status", func(p *corev1.Pod) { p.Spec.Containers[0].Env = env("other") }); err != nil {
		t.Errorf("status: %v", err)
	}
}

// TestMirrorPodsReadNothing: who writes one, a node or an administrator, shows
// its node no Secret and gives it no token by it.
func TestMirrorPodsReadNothing(t *testing.T) {
	p := New(accounts{})
	for want, change := range map[string]func(*corev1.Pod){
		"": func(*corev1.Pod) {},
		"a mirror pod may not reference service accounts":                 func(p *corev1.Pod) { p.Spec.ServiceAccountName = "default" },
		"a mirror pod may not reference secrets":                          func(p *corev1.Pod) { p.Spec.Containers[0].Env = env("s") },
		"a mirror pod may not use ServiceAccountToken volume projections": volume(projected(corev1.VolumeProjection{ServiceAccountToken: &corev1.ServiceAccountTokenProjection{Path: "token"}})),
		"a mirror pod may not reference secrets ":                         volume(corev1.VolumeSource{CephFS: &corev1.CephFSVolumeSource{SecretRef: &corev1.LocalObjectReference{Name: "s"}}}),
	} {
		pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Annotations: map[string]string{corev1.MirrorPodAnnotationKey: "hash"}}, Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "c"}}}}
		change(pod)
		err := p.(admission.ValidationInterface).Validate(t.Context(), admission.NewAttributesRecord(pod, nil, corev1.SchemeGroupVersion.WithKind("Pod"), "ns", "p",
			corev1.SchemeGroupVersion.WithResource("pods"), "", admission.Create, nil, false, nil), nil)
		if want == "" && err != nil || want != "" && (!apierrors.IsForbidden(err) || !strings.Contains(err.Error(), strings.TrimSpace(want))) {
			t.Errorf("%v, want %q", err, want)
		}
	}
}
