package imagepolicy

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/api/imagepolicy/v1alpha1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission"
)

// service is a backend that refuses images whose names hold "bad".
type service struct {
	*httptest.Server
	mu sync.Mutex
	// asked are the specs of all reviews; status, if not 0, is answered to each.
	asked  []v1alpha1.ImageReviewSpec
	status int
}

func newService(t *testing.T) *service {
	s := &service{}
	s.Server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		defer s.mu.Unlock()
		var review v1alpha1.ImageReview
		if err := json.NewDecoder(r.Body).Decode(&review); err != nil || review.APIVersion != "imagepolicy.k8s.io/v1alpha1" || review.Kind != "ImageReview" {
			t.Errorf("not an ImageReview: %v %v", review.TypeMeta, err)
		}
		s.asked = append(s.asked, review.Spec)
		if s.status != 0 {
			w.WriteHeader(s.status)
			return
		}
		review.Status.Allowed = true
		for _, c := range review.Spec.Containers {
			if strings.Contains(c.Image, "bad") {
				review.Status = v1alpha1.ImageReviewStatus{Reason: c.Image + " is unsigned"}
			}
		}
		review.Status.AuditAnnotations = map[string]string{"seen": "yes"}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(review)
	}))
	t.Cleanup(s.Close)
	return s
}

func (s *service) count() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.asked)
}

func (s *service) answer(status int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status = status
}

// config is a configuration that names s.
func (s *service) config(t *testing.T, more string) string {
	file := filepath.Join(t.TempDir(), "kubeconfig")
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(file, fmt.Appendf(nil, `
apiVersion: v1
kind: Config
clusters: [{name: backend, cluster: {server: %q, certificate-authority: %q}}]
contexts: [{name: it, context: {cluster: backend}}]
current-context: it
`, s.URL+"/review", ca), 0o600); err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf("imagePolicy: {kubeConfigFile: %q%s}", file, more)
}

func newPlugin(t *testing.T, config string) *plugin {
	t.Helper()
	made, err := New(strings.NewReader(config))
	if err != nil {
		t.Fatal(err)
	}
	p := made.(*plugin)
	p.failureTTL = time.Hour // a busy machine is slower than the usual one
	return p
}

func pod(images ...string) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "team", Annotations: map[string]string{}}}
	for _, image := range images {
		p.Spec.Containers = append(p.Spec.Containers, corev1.Container{Image: image})
	}
	return p
}

func record(now, old *corev1.Pod, sub string) admission.Attributes {
	operation := admission.Create
	if old != nil {
		operation = admission.Update
	}
	record := admission.NewAttributesRecord(now, nil, corev1.SchemeGroupVersion.WithKind("Pod"), "team", "p", corev1.SchemeGroupVersion.WithResource("pods"), sub, operation, nil, false, nil)
	if old != nil {
		record = admission.NewAttributesRecord(now, old, corev1.SchemeGroupVersion.WithKind("Pod"), "team", "p", corev1.SchemeGroupVersion.WithResource("pods"), sub, operation, nil, false, nil)
	}
	return record
}

// both runs the two phases of a request, as a server does.
func (p *plugin) both(t *testing.T, now, old *corev1.Pod, sub string) error {
	a := record(now, old, sub)
	if err := p.Admit(t.Context(), a, nil); err != nil {
		return err
	}
	return p.Validate(t.Context(), a, nil)
}

func TestDecisions(t *testing.T) {
	s := newService(t)
	p := newPlugin(t, s.config(t, ""))
	good := pod("good:1")
	good.Spec.InitContainers = []corev1.Container{{Image: "init:1"}}
	good.Annotations = map[string]string{"team.image-policy.k8s.io/ticket": "42", "other/note": "x", FailedOpen: "true"}
	if err := p.both(t, good, nil, ""); err != nil {
		t.Fatalf("allowed images: %v", err)
	}
	want := v1alpha1.ImageReviewSpec{Namespace: "team", Containers: []v1alpha1.ImageReviewContainerSpec{{Image: "good:1"}, {Image: "init:1"}},
		Annotations: map[string]string{"team.image-policy.k8s.io/ticket": "42"}}
	if diff := cmp.Diff([]v1alpha1.ImageReviewSpec{want}, s.asked); diff != "" {
		t.Errorf("one request asks once (-want +got):\n%s", diff)
	}
	if _, there := good.Annotations[FailedOpen]; there {
		t.Error("a user said that the backend had not answered, and it was accepted")
	}

	err := p.both(t, pod("good:1", "bad:1"), nil, "")
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "image policy webhook backend denied one or more images: bad:1 is unsigned") {
		t.Errorf("a refused image: %v", err)
	}
	// What a webhook put in after the first phase is judged in the second.
	if err := p.Validate(t.Context(), record(pod("bad:2"), nil, ""), nil); !apierrors.IsForbidden(err) {
		t.Errorf("a refused image that came late: %v", err)
	}

	// Updates: labels of a pod that would not be let in any more, other images, ephemeral containers.
	asked := s.count()
	bad, relabelled := pod("bad:1"), pod("bad:1")
	relabelled.Labels = map[string]string{"a": "b"}
	if err := p.both(t, relabelled, bad, ""); err != nil || s.count() != asked {
		t.Errorf("a label: %v, asked %d times", err, s.count()-asked)
	}
	if err := p.both(t, pod("bad:3"), pod("good:1"), ""); !apierrors.IsForbidden(err) {
		t.Errorf("another image: %v", err)
	}
	annotated := pod("bad:1")
	annotated.Annotations["x.image-policy.k8s.io/y"] = "z"
	if err := p.both(t, annotated, bad, ""); !apierrors.IsForbidden(err) {
		t.Errorf("another annotation: %v", err)
	}
	debugged := pod("good:1")
	debugged.Spec.EphemeralContainers = []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Image: "bad:shell"}}}
	if err := p.both(t, debugged, pod("good:1"), "ephemeralcontainers"); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "bad:shell") {
		t.Errorf("an ephemeral container: %v", err)
	}

	// Nothing else is asked about.
	asked = s.count()
	if err := p.both(t, pod("bad:9"), nil, "binding"); err != nil || s.count() != asked {
		t.Errorf("a binding: %v", err)
	}
}

func TestAnswersAreKept(t *testing.T) {
	s := newService(t)
	for _, test := range []struct {
		config, image string
		asked         int
	}{
		{"", "good:1", 1},
		{"", "bad:1", 1},
		// Not kept: each phase of each request asks, unless the first refuses.
		{", allowTTL: -1", "good:1", 4},
		{", denyTTL: -1", "bad:1", 2},
		{", allowTTL: -1", "bad:1", 1},
	} {
		before := s.count()
		p := newPlugin(t, s.config(t, test.config))
		for range 2 {
			if err := p.both(t, pod(test.image), nil, ""); (err == nil) != (test.image == "good:1") {
				t.Errorf("%s: %v", test.image, err)
			}
		}
		if asked := s.count() - before; asked != test.asked {
			t.Errorf("config %q, %s: two requests asked %d times, want %d", test.config, test.image, asked, test.asked)
		}
	}
	// They have an end.
	p := newPlugin(t, s.config(t, ", allowTTL: 1"))
	if p.allowTTL != time.Second || p.denyTTL != 30*time.Second {
		t.Errorf("kept for %v and %v", p.allowTTL, p.denyTTL)
	}
}

func TestNoAnswer(t *testing.T) {
	s := newService(t)
	s.answer(http.StatusTeapot)
	closed := newPlugin(t, s.config(t, ""))
	err := closed.both(t, pod("good:1"), nil, "")
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "imagePolicy.defaultAllow is false") {
		t.Errorf("defaultAllow false: %v", err)
	}

	open := newPlugin(t, s.config(t, ", defaultAllow: true"))
	before, let := s.count(), pod("bad:1")
	let.Annotations = nil
	if err := open.both(t, let, nil, ""); err != nil || let.Annotations[FailedOpen] != "true" {
		t.Errorf("defaultAllow true: %v, annotations %v", err, let.Annotations)
	}
	if asked := s.count() - before; asked != 1 {
		t.Errorf("one request asked a backend in trouble %d times", asked)
	}
	// An answer is no failure, whatever it says.
	s.answer(0)
	if err := open.both(t, pod("bad:other"), nil, ""); !apierrors.IsForbidden(err) {
		t.Errorf("a refusal with defaultAllow true: %v", err)
	}

	// Errors that pass are tried again.
	s.answer(http.StatusInternalServerError)
	before = s.count()
	if err := newPlugin(t, s.config(t, ", retryBackoff: 1")).both(t, pod("good:2"), nil, ""); err == nil || s.count()-before != 5 {
		t.Errorf("a server error: %v after %d attempts", err, s.count()-before)
	}

	down := newPlugin(t, s.config(t, ", defaultAllow: true"))
	s.Close()
	let = pod("bad:1")
	if err := down.both(t, let, nil, ""); err != nil || let.Annotations[FailedOpen] != "true" {
		t.Errorf("a backend that is down: %v, annotations %v", err, let.Annotations)
	}
}

func TestWrongConfigurations(t *testing.T) {
	s := newService(t)
	plain := filepath.Join(t.TempDir(), "plain")
	if err := os.WriteFile(plain, []byte(`
apiVersion: v1
kind: Config
clusters: [{name: backend, cluster: {server: "http://127.0.0.1:1"}}]
contexts: [{name: it, context: {cluster: backend}}]
current-context: it
`), 0o600); err != nil {
		t.Fatal(err)
	}
	for config, want := range map[string]string{
		"{}":                                   "imagePolicy.kubeConfigFile is required",
		"imagePolicy: {allowTTL: 3}":           "imagePolicy.kubeConfigFile is required",
		"imagePolicy: {kubeConfigFile: /none}": "imagePolicy.kubeConfigFile: /none:",
		fmt.Sprintf("imagePolicy: {kubeConfigFile: %q}", plain): `cluster.server: "http://127.0.0.1:1": must begin with https://`,
		s.config(t, ", allowTTL: 1801"):                         "imagePolicy.allowTTL: 1801: must be 1 to 1800 (in units of 1s), 0 for the default of 5m0s",
		s.config(t, ", denyTTL: -2"):                            "imagePolicy.denyTTL: -2: must be 1 to 1800 (in units of 1s), 0 for the default of 30s, or -1 for none",
		s.config(t, ", retryBackoff: 300001"):                   "imagePolicy.retryBackoff: 300001: must be 1 to 300000 (in units of 1ms)",
		s.config(t, ", denyttl: 3, alowTTL: 1"):                 `unknown field "alowTTL"`,
		s.config(t, ", defaultAllow: perhaps"):                  "defaultAllow",
	} {
		if _, err := New(strings.NewReader(config)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s:\n %v\n want %q", config, err, want)
		}
	}
	if _, err := New(nil); err == nil || !strings.Contains(err.Error(), "imagePolicy.kubeConfigFile is required") {
		t.Errorf("no configuration: %v", err)
	}
}
