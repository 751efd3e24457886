package server_test

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"

	admissionv1 "k8s.io/api/admission/v1"
	registrationv1 "k8s.io/api/admissionregistration/v1"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/server/servertest"
)

// patched answers a webhook with a JSON patch; nil: nothing is changed.
func patched(patch []map[string]any) *admissionv1.AdmissionResponse {
	answer := &admissionv1.AdmissionResponse{Allowed: true}
	if len(patch) > 0 {
		answer.Patch, _ = json.Marshal(patch) // of maps and strings
		answer.PatchType = ptr.To(admissionv1.PatchTypeJSONPatch)
	}
	return answer
}

// TestWebhooksChange: what webhooks are mostly for. A Deployment is changed; pods with
// a port get a sidecar, and all pods of a namespace a certificate, the sidecar too.
func TestWebhooksChange(t *testing.T) {
	s := servertest.Start(t, nil)
	ctx := t.Context()
	must[*corev1.Namespace](t)(s.Client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "trusting", Labels: map[string]string{"certificates": "yes"}}}, metav1.CreateOptions{}))
	read := func(r *admissionv1.AdmissionRequest, into any) bool { return json.Unmarshal(r.Object.Raw, into) == nil }
	deployments := newHook(t, func(r *admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
		return patched([]map[string]any{{"op": "add", "path": "/metadata/annotations", "value": map[string]string{"marked": r.Name}}, {"op": "replace", "path": "/spec/replicas", "value": 0}})
	})
	certificates := newHook(t, func(r *admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
		var p corev1.Pod
		if !read(r, &p) {
			return nil
		}
		var patch []map[string]any
		has := false
		for _, v := range p.Spec.Volumes {
			has = has || v.Name == "ca"
		}
		if !has {
			patch = append(patch, map[string]any{"op": "add", "path": "/spec/volumes/-", "value": map[string]any{"name": "ca", "configMap": map[string]string{"name": "ca"}}})
		}
		for i, c := range p.Spec.Containers {
			mounted := false
			for _, m := range c.VolumeMounts {
				mounted = mounted || m.Name == "ca"
			}
			if !mounted {
				patch = append(patch, map[string]any{"op": "add", "path": fmt.Sprintf("/spec/containers/%d/volumeMounts/-", i), "value": map[string]string{"name": "ca", "mountPath": "/ca"}})
			}
		}
		return patched(patch)
	})
	sidecars := newHook(t, func(r *admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
		var p corev1.Pod
		if !read(r, &p) {
			return nil
		}
		wanted := false
		for _, c := range p.Spec.Containers {
			if c.Name == "sidecar" {
				return patched(nil)
			}
			for _, port := range c.Ports {
				wanted = wanted || port.ContainerPort == 80
			}
		}
		if !wanted {
			return patched(nil)
		}
		return patched([]map[string]any{{"op": "add", "path": "/spec/containers/-", "value": map[string]any{"name": "sidecar", "image": "i", "volumeMounts": []any{map[string]string{"name": p.Spec.Volumes[0].Name, "mountPath": "/token"}}}}})
	})
	hooks := s.Client.AdmissionregistrationV1().MutatingWebhookConfigurations()
	register := func(name string, h *hook, group, resource string, change func(*registrationv1.MutatingWebhook)) {
		w := registrationv1.MutatingWebhook{
			Name: name + ".example.com", ClientConfig: h.client(), TimeoutSeconds: ptr.To[int32](30), SideEffects: ptr.To(registrationv1.SideEffectClassNone), AdmissionReviewVersions: []string{"v1"},
			Rules: []registrationv1.RuleWithOperations{{Operations: []registrationv1.OperationType{registrationv1.Create},
				Rule: registrationv1.Rule{APIGroups: []string{group}, APIVersions: []string{"v1"}, Resources: []string{resource}}}},
		}
		if change != nil {
			change(&w)
		}
		must[*registrationv1.MutatingWebhookConfiguration](t)(hooks.Create(ctx, &registrationv1.MutatingWebhookConfiguration{ObjectMeta: meta(name), Webhooks: []registrationv1.MutatingWebhook{w}}, metav1.CreateOptions{}))
	}
	// By their names the certificates come first: they are asked again for the sidecar.
	register("a-certificates", certificates, "", "pods", func(w *registrationv1.MutatingWebhook) {
		w.ReinvocationPolicy = ptr.To(registrationv1.IfNeededReinvocationPolicy)
		w.NamespaceSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"certificates": "yes"}}
	})
	register("b-sidecars", sidecars, "", "pods", nil)
	register("deployments", deployments, "apps", "deployments", nil)

	dry := metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}}
	soon(t, "a Deployment is changed", func() bool {
		labels := map[string]string{"app": "web"}
		d := must[*appsv1.Deployment](t)(s.Client.AppsV1().Deployments("default").Create(ctx, &appsv1.Deployment{ObjectMeta: meta("marked"), Spec: appsv1.DeploymentSpec{
			Replicas: ptr.To[int32](2), Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: pod("x").Spec},
		}}, dry))
		return d.Annotations["marked"] == "marked" && *d.Spec.Replicas == 0
	})
	of := func(namespace string, port int32) *corev1.Pod {
		p := pod("p")
		p.Namespace = namespace
		p.Spec.Containers[0].Ports = []corev1.ContainerPort{{ContainerPort: port}}
		return must[*corev1.Pod](t)(s.Client.CoreV1().Pods(namespace).Create(ctx, p, dry))
	}
	soon(t, "a sidecar comes", func() bool { return len(of("default", 80).Spec.Containers) == 2 })
	if p := of("default", 81); len(p.Spec.Containers) != 1 {
		t.Errorf("without that port: %v", p.Spec.Containers)
	}
	mounts := func(p *corev1.Pod) (n int) {
		for _, c := range p.Spec.Containers {
			for _, m := range c.VolumeMounts {
				if m.MountPath == "/ca" {
					n++
				}
			}
		}
		return n
	}
	soon(t, "a certificate comes", func() bool { return mounts(of("trusting", 81)) == 1 })
	if p := of("trusting", 80); len(p.Spec.Containers) != 2 || mounts(p) != 2 {
		t.Errorf("of two containers %d have the certificate: %+v", mounts(p), p.Spec.Containers)
	}
	if p := of("default", 80); mounts(p) != 0 {
		t.Errorf("in another namespace: %+v", p.Spec.Containers)
	}
}

// TestWebhookReadsSecrets: a webhook refuses Secrets by what is in them.
func TestWebhookReadsSecrets(t *testing.T) {
	s := servertest.Start(t, nil)
	h := newHook(t, func(r *admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
		var secret corev1.Secret
		if json.Unmarshal(r.Object.Raw, &secret) != nil {
			return nil
		}
		if password, ok := secret.Data["password"]; ok && len(password) < 20 {
			return &admissionv1.AdmissionResponse{Result: &metav1.Status{Message: "a password has at least 20 characters", Code: 422}}
		}
		return &admissionv1.AdmissionResponse{Allowed: true}
	})
	must[*registrationv1.ValidatingWebhookConfiguration](t)(s.Client.AdmissionregistrationV1().ValidatingWebhookConfigurations().Create(t.Context(),
		validatingHook("passwords", h.client(), func(w *registrationv1.ValidatingWebhook) { w.Rules[0].Resources = []string{"secrets"} }), metav1.CreateOptions{}))
	secrets := s.Client.CoreV1().Secrets("default")
	create := func(name, password string) error {
		_, err := secrets.Create(t.Context(), &corev1.Secret{ObjectMeta: meta(name), StringData: map[string]string{"password": password}}, metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
		return err
	}
	soon(t, "a short password is refused", func() bool {
		err := create("short", "nineteen-characters")
		return err != nil && strings.Contains(err.Error(), "a password has at least 20 characters")
	})
	if err := create("long", "twenty-characters-xx"); err != nil {
		t.Errorf("a long one: %v", err)
	}
}
