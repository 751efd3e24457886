package server_test

import (
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/api/imagepolicy/v1alpha1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/admission"
	"github.com/clusterd/clusterd/apis/server/admission/imagepolicy"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

// TestImagePolicy: a server that asks a backend about images, which then ceases
// to answer.
func TestImagePolicy(t *testing.T) {
	var silent atomic.Bool
	backend := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var review v1alpha1.ImageReview
		if err := json.NewDecoder(r.Body).Decode(&review); err != nil || silent.Load() {
			w.WriteHeader(http.StatusBadGateway)
			return
		}
		review.Status.Allowed = true
		for _, c := range review.Spec.Containers {
			if strings.HasPrefix(c.Image, "bad") {
				review.Status = v1alpha1.ImageReviewStatus{Reason: "no signature"}
			}
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(review)
	}))
	t.Cleanup(backend.Close)
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	ca := write("ca.pem", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: backend.Certificate().Raw})))
	kubeconfig := write("kubeconfig", fmt.Sprintf(`
apiVersion: v1
kind: Config
clusters: [{name: backend, cluster: {server: %q, certificate-authority: %q}}]
contexts: [{name: it, context: {cluster: backend}}]
current-context: it
`, backend.URL, ca))
	set := func(more string) admission.Set {
		return admission.Set{Enable: []string{"ImagePolicyWebhook"}, File: write("admission.yaml", fmt.Sprintf(`
apiVersion: apiserver.config.k8s.io/v1
kind: AdmissionConfiguration
plugins:
- {name: ImagePolicyWebhook, configuration: {imagePolicy: {kubeConfigFile: %q, defaultAllow: true%s}}}
`, kubeconfig, more))}
	}
	if _, err := server.New(server.Config{Storage: servertest.NewMemory().Decorator(), Admission: set(", allowTTL: 9999")}); err == nil ||
		!strings.Contains(err.Error(), "admission plugin ImagePolicyWebhook: imagePolicy.allowTTL: 9999") {
		t.Errorf("a wrong configuration: %v", err)
	}

	s := servertest.Start(t, func(c *server.Config) { c.Admission = set(", denyTTL: 1800") })
	pods := s.Client.CoreV1().Pods("default")
	create := func(name, image string) (*corev1.Pod, error) {
		p := pod(name)
		p.Spec.Containers[0].Image = image
		return pods.Create(t.Context(), p, metav1.CreateOptions{})
	}
	good, err := create("good", "good:1")
	if err != nil || good.Annotations[imagepolicy.FailedOpen] != "" {
		t.Fatalf("allowed: %v, annotations %v", err, good.Annotations)
	}
	if _, err := create("bad", "bad:1"); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "no signature") {
		t.Errorf("refused: %v", err)
	}
	good.Spec.EphemeralContainers = []corev1.EphemeralContainer{{EphemeralContainerCommon: corev1.EphemeralContainerCommon{
		Name: "shell", Image: "bad:shell", ImagePullPolicy: corev1.PullAlways, TerminationMessagePolicy: corev1.TerminationMessageReadFile}}}
	if _, err := pods.UpdateEphemeralContainers(t.Context(), "good", good, metav1.UpdateOptions{}); !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "no signature") {
		t.Errorf("an ephemeral container: %v", err)
	}

	silent.Store(true)
	if _, err := create("late", "bad:2"); err != nil {
		t.Fatalf("no answer, defaultAllow: %v", err)
	}
	stored := must[*corev1.Pod](t)(pods.Get(t.Context(), "late", metav1.GetOptions{}))
	if stored.Annotations[imagepolicy.FailedOpen] != "true" {
		t.Errorf("the stored pod does not say that there was no answer: %v", stored.Annotations)
	}
	if _, err := create("bad", "bad:1"); !apierrors.IsForbidden(err) {
		t.Errorf("what was refused before, as long as that is kept: %v", err)
	}
}
