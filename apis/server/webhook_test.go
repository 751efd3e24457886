package server_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	registrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/features"
)

// hook is a webhook that a test answers for.
type hook struct {
	*httptest.Server
	ca    []byte
	asked atomic.Int32
}

func newHook(t *testing.T, answer func(*admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse) *hook {
	t.Helper()
	h := &hook{}
	h.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		h.asked.Add(1)
		var review admissionv1.AdmissionReview
		if err := json.NewDecoder(req.Body).Decode(&review); err != nil || review.Request == nil {
			http.Error(w, "no review", http.StatusBadRequest)
			return
		}
		review.Response = answer(review.Request)
		if review.Response == nil {
			http.Error(w, "out of order", http.StatusInternalServerError)
			return
		}
		review.Response.UID = review.Request.UID
		review.Request = nil
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(review)
	}))
	h.TLS = &tls.Config{Certificates: []tls.Certificate{selfSigned(t)}, MinVersion: tls.VersionTLS12}
	h.Config.ErrorLog = log.New(io.Discard, "", 0) // refused handshakes are what some tests want
	h.StartTLS()
	t.Cleanup(h.Close)
	h.ca = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: h.Certificate().Raw})
	return h
}

// selfSigned is a certificate for the Service hooks and for loopback.
func selfSigned(t *testing.T) tls.Certificate {
	t.Helper()
	key := must[*ecdsa.PrivateKey](t)(ecdsa.GenerateKey(elliptic.P256(), rand.Reader))
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Minute), NotAfter: time.Now().Add(time.Hour),
		DNSNames: []string{"hooks.default.svc"}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
	}
	raw := must[[]byte](t)(x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key))
	return tls.Certificate{Certificate: [][]byte{raw}, PrivateKey: key}
}

func (h *hook) client() registrationv1.WebhookClientConfig {
	return registrationv1.WebhookClientConfig{URL: ptr.To(h.URL + "/review"), CABundle: h.ca}
}

func onConfigMaps() []registrationv1.RuleWithOperations {
	return []registrationv1.RuleWithOperations{{
		Operations: []registrationv1.OperationType{registrationv1.Create, registrationv1.Update},
		Rule:       registrationv1.Rule{APIGroups: []string{""}, APIVersions: []string{"v1"}, Resources: []string{"configmaps"}},
	}}
}

func validatingHook(name string, client registrationv1.WebhookClientConfig, change func(*registrationv1.ValidatingWebhook)) *registrationv1.ValidatingWebhookConfiguration {
	w := registrationv1.ValidatingWebhook{
		Name: name + ".example.com", ClientConfig: client, Rules: onConfigMaps(),
		SideEffects: ptr.To(registrationv1.SideEffectClassNone), AdmissionReviewVersions: []string{"v1"},
		TimeoutSeconds: ptr.To[int32](30),
	}
	if change != nil {
		change(&w)
	}
	return &registrationv1.ValidatingWebhookConfiguration{ObjectMeta: meta(name), Webhooks: []registrationv1.ValidatingWebhook{w}}
}

// eventually tries to create a ConfigMap, which something registered a moment
// ago may judge, until the outcome is as wanted.
func eventually(t *testing.T, s *servertest.Server, data map[string]string, want func(*corev1.ConfigMap, error) bool) {
	t.Helper()
	var last error
	var made *corev1.ConfigMap
	n := 0
	err := wait.PollUntilContextCancel(waitContext(t), 5*time.Millisecond, true, func(ctx context.Context) (bool, error) {
		n++
		made, last = s.Client.CoreV1().ConfigMaps("default").Create(ctx, configMap(strings.ToLower(strings.NewReplacer("/", "-", "_", "-", "#", "-").Replace(t.Name()))+"-"+strconv.Itoa(n), data), metav1.CreateOptions{})
		return want(made, last), nil
	})
	if err != nil {
		t.Fatalf("not as wanted: %v, %v", made, last)
	}
}

func refusedWith(text string) func(*corev1.ConfigMap, error) bool {
	return func(_ *corev1.ConfigMap, err error) bool { return err != nil && strings.Contains(err.Error(), text) }
}

func TestValidatingWebhook(t *testing.T) {
	features.Conforms(t, 23)
	s := servertest.Start(t, nil)
	h := newHook(t, func(r *admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
		var m corev1.ConfigMap
		if err := json.Unmarshal(r.Object.Raw, &m); err != nil {
			return nil
		}
		if m.Data["colour"] == "red" {
			return &admissionv1.AdmissionResponse{Result: &metav1.Status{Message: "no red here", Code: 403}, Warnings: []string{"think of blue"}}
		}
		return &admissionv1.AdmissionResponse{Allowed: true}
	})
	hooks := s.Client.AdmissionregistrationV1().ValidatingWebhookConfigurations()
	must[*registrationv1.ValidatingWebhookConfiguration](t)(hooks.Create(t.Context(), validatingHook("colours", h.client(), nil), metav1.CreateOptions{}))
	eventually(t, s, map[string]string{"colour": "red"}, refusedWith(`admission webhook "colours.example.com" denied the request: no red here`))
	must[*corev1.ConfigMap](t)(s.Client.CoreV1().ConfigMaps("default").Create(t.Context(), configMap("blue", map[string]string{"colour": "blue"}), metav1.CreateOptions{}))

	// A dry run asks too; a condition on the request spares the question.
	_, err := s.Client.CoreV1().ConfigMaps("default").Create(t.Context(), configMap("dry", map[string]string{"colour": "red"}), metav1.CreateOptions{DryRun: []string{metav1.DryRunAll}})
	if err == nil || !strings.Contains(err.Error(), "no red here") {
		t.Errorf("dry run: %v", err)
	}
	_, err = hooks.Create(t.Context(), validatingHook("bad", h.client(), func(w *registrationv1.ValidatingWebhook) {
		w.MatchConditions = []registrationv1.MatchCondition{{Name: "x", Expression: "object.metadata.name +"}}
	}), metav1.CreateOptions{})
	if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "webhooks[0].matchConditions[0].expression") {
		t.Errorf("an expression that is none: %v", err)
	}
	if err := hooks.Delete(t.Context(), "colours", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	eventually(t, s, map[string]string{"colour": "red"}, func(_ *corev1.ConfigMap, err error) bool { return err == nil })
	must[*registrationv1.ValidatingWebhookConfiguration](t)(hooks.Create(t.Context(), validatingHook("picky", h.client(), func(w *registrationv1.ValidatingWebhook) {
		w.MatchConditions = []registrationv1.MatchCondition{{Name: "big", Expression: "has(object.data) && 'size' in object.data && object.data.size == 'big'"}}
	}), metav1.CreateOptions{}))
	eventually(t, s, map[string]string{"colour": "red", "size": "big"}, refusedWith("no red here"))
	before := h.asked.Load()
	must[*corev1.ConfigMap](t)(s.Client.CoreV1().ConfigMaps("default").Create(t.Context(), configMap("small", map[string]string{"colour": "red"}), metav1.CreateOptions{}))
	if h.asked.Load() != before {
		t.Error("asked though the condition did not match")
	}
}

// TestWebhookFails is about webhooks that do not answer.
func TestWebhookFails(t *testing.T) {
	s := servertest.Start(t, nil)
	broken := newHook(t, func(*admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse { return nil })
	slow := newHook(t, func(*admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
		time.Sleep(2 * time.Second)
		return &admissionv1.AdmissionResponse{Allowed: true}
	})
	hooks := s.Client.AdmissionregistrationV1().ValidatingWebhookConfigurations()
	for _, test := range []struct {
		name   string
		hook   *hook
		policy registrationv1.FailurePolicyType
		want   string // "": let through
	}{
		{"broken", broken, registrationv1.Fail, `failed calling webhook "broken.example.com"`},
		{"slow", slow, registrationv1.Fail, "context deadline exceeded"},
		{"ignored", broken, registrationv1.Ignore, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			must[*registrationv1.ValidatingWebhookConfiguration](t)(hooks.Create(t.Context(), validatingHook(test.name, test.hook.client(), func(w *registrationv1.ValidatingWebhook) {
				w.FailurePolicy, w.TimeoutSeconds = &test.policy, ptr.To[int32](1)
			}), metav1.CreateOptions{}))
			before := test.hook.asked.Load()
			eventually(t, s, nil, func(_ *corev1.ConfigMap, err error) bool {
				if test.want == "" {
					return err == nil && test.hook.asked.Load() > before
				}
				return refusedWith(test.want)(nil, err)
			})
			if err := hooks.Delete(t.Context(), test.name, metav1.DeleteOptions{}); err != nil {
				t.Fatal(err)
			}
			eventually(t, s, nil, func(_ *corev1.ConfigMap, err error) bool { return err == nil })
		})
	}
}

// TestMutatingWebhook has a webhook behind a Service.
func TestMutatingWebhook(t *testing.T) {
	s := servertest.Start(t, nil)
	h := newHook(t, func(r *admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
		patch := fmt.Sprintf(`[{"op":"add","path":"/metadata/annotations","value":{"seen-by":%q}}]`, r.UserInfo.Username)
		return &admissionv1.AdmissionResponse{Allowed: true, Patch: []byte(patch), PatchType: ptr.To(admissionv1.PatchTypeJSONPatch)}
	})
	service := func(name string) registrationv1.WebhookClientConfig {
		serve(t, s, name)
		return registrationv1.WebhookClientConfig{
			Service:  &registrationv1.ServiceReference{Namespace: "default", Name: name, Path: ptr.To("/review"), Port: ptr.To(portOf(t, h.URL))},
			CABundle: h.ca,
		}
	}
	configuration := func(client registrationv1.WebhookClientConfig) *registrationv1.MutatingWebhookConfiguration {
		return &registrationv1.MutatingWebhookConfiguration{ObjectMeta: meta("labels"), Webhooks: []registrationv1.MutatingWebhook{{
			Name: "labels.example.com", ClientConfig: client, Rules: onConfigMaps(),
			SideEffects: ptr.To(registrationv1.SideEffectClassNone), AdmissionReviewVersions: []string{"v1"}, TimeoutSeconds: ptr.To[int32](30),
		}}}
	}
	hooks := s.Client.AdmissionregistrationV1().MutatingWebhookConfigurations()
	// The certificate is for hooks.default.svc.
	must[*registrationv1.MutatingWebhookConfiguration](t)(hooks.Create(t.Context(), configuration(service("others")), metav1.CreateOptions{}))
	eventually(t, s, nil, refusedWith("not others.default.svc"))
	if h.asked.Load() > 0 {
		t.Error("a webhook was asked whose certificate is another's")
	}
	if err := hooks.Delete(t.Context(), "labels", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	must[*registrationv1.MutatingWebhookConfiguration](t)(hooks.Create(t.Context(), configuration(service("hooks")), metav1.CreateOptions{}))
	eventually(t, s, nil, func(m *corev1.ConfigMap, err error) bool {
		return err == nil && m.Annotations["seen-by"] == "system:apiserver"
	})
}

// serve makes a Service that leads to this machine.
func serve(t *testing.T, s *servertest.Server, name string) {
	t.Helper()
	must[*corev1.Service](t)(s.Client.CoreV1().Services("default").Create(t.Context(), externalName(name), metav1.CreateOptions{}))
}

// externalName is a Service of this machine: endpoints on loopback are refused
// by the API, a name for it is not.
func externalName(name string) *corev1.Service {
	return &corev1.Service{ObjectMeta: meta(name), Spec: corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "localhost"}}
}

func portOf(t *testing.T, address string) int32 {
	t.Helper()
	u := must[*url.URL](t)(url.Parse(address))
	return int32(must[int64](t)(strconv.ParseInt(u.Port(), 10, 32)))
}

func onConfigMapsNamed() *registrationv1.MatchResources {
	return &registrationv1.MatchResources{ResourceRules: []registrationv1.NamedRuleWithOperations{{RuleWithOperations: onConfigMaps()[0]}}}
}

func TestAdmissionPolicies(t *testing.T) {
	features.Conforms(t, 91)
	s := servertest.Start(t, nil)
	api := s.Client.AdmissionregistrationV1()
	policy := &registrationv1.ValidatingAdmissionPolicy{ObjectMeta: meta("sizes"), Spec: registrationv1.ValidatingAdmissionPolicySpec{
		MatchConstraints: onConfigMapsNamed(),
		ParamKind:        &registrationv1.ParamKind{APIVersion: "v1", Kind: "ConfigMap"},
		Variables:        []registrationv1.Variable{{Name: "size", Expression: "has(object.data) && 'size' in object.data ? int(object.data.size) : 0"}},
		Validations: []registrationv1.Validation{{
			Expression: "variables.size <= int(params.data.limit)", MessageExpression: "'at most ' + params.data.limit",
		}},
	}}
	bad := policy.DeepCopy()
	bad.Spec.Validations[0].Expression = "variables.length <= 3"
	if _, err := api.ValidatingAdmissionPolicies().Create(t.Context(), bad, metav1.CreateOptions{}); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "spec.validations[0].expression") {
		t.Errorf("an expression of an unknown variable: %v", err)
	}
	must[*corev1.ConfigMap](t)(s.Client.CoreV1().ConfigMaps("default").Create(t.Context(), configMap("limits", map[string]string{"limit": "5"}), metav1.CreateOptions{}))
	must[*registrationv1.ValidatingAdmissionPolicy](t)(api.ValidatingAdmissionPolicies().Create(t.Context(), policy, metav1.CreateOptions{}))
	must[*registrationv1.ValidatingAdmissionPolicyBinding](t)(api.ValidatingAdmissionPolicyBindings().Create(t.Context(), &registrationv1.ValidatingAdmissionPolicyBinding{
		ObjectMeta: meta("sizes"), Spec: registrationv1.ValidatingAdmissionPolicyBindingSpec{
			PolicyName: "sizes", ValidationActions: []registrationv1.ValidationAction{registrationv1.Deny},
			ParamRef: &registrationv1.ParamRef{Name: "limits", Namespace: "default", ParameterNotFoundAction: ptr.To(registrationv1.DenyAction)},
		},
	}, metav1.CreateOptions{}))
	eventually(t, s, map[string]string{"size": "6"}, refusedWith("ValidatingAdmissionPolicy 'sizes' with binding 'sizes' denied request: at most 5"))
	must[*corev1.ConfigMap](t)(s.Client.CoreV1().ConfigMaps("default").Create(t.Context(), configMap("fits", map[string]string{"size": "5"}), metav1.CreateOptions{}))

	must[*registrationv1.MutatingAdmissionPolicy](t)(api.MutatingAdmissionPolicies().Create(t.Context(), &registrationv1.MutatingAdmissionPolicy{
		ObjectMeta: meta("labels"), Spec: registrationv1.MutatingAdmissionPolicySpec{
			MatchConstraints: onConfigMapsNamed(), ReinvocationPolicy: registrationv1.NeverReinvocationPolicy,
			Mutations: []registrationv1.Mutation{{
				PatchType:          registrationv1.PatchTypeApplyConfiguration,
				ApplyConfiguration: &registrationv1.ApplyConfiguration{Expression: `Object{metadata: Object.metadata{labels: {"team": "a"}}}`},
			}},
		},
	}, metav1.CreateOptions{}))
	must[*registrationv1.MutatingAdmissionPolicyBinding](t)(api.MutatingAdmissionPolicyBindings().Create(t.Context(), &registrationv1.MutatingAdmissionPolicyBinding{
		ObjectMeta: meta("labels"), Spec: registrationv1.MutatingAdmissionPolicyBindingSpec{PolicyName: "labels"},
	}, metav1.CreateOptions{}))
	eventually(t, s, nil, func(m *corev1.ConfigMap, err error) bool { return err == nil && m.Labels["team"] == "a" })
}
