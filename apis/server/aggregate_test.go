package server_test

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"encoding/pem"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"
	aggregator "k8s.io/kube-aggregator/pkg/client/clientset_generated/clientset"
	"k8s.io/kube-openapi/pkg/handler3"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/server/servertest"
)

// TestAggregatedAPI has an aggregated API behind a Service.
func TestAggregatedAPI(t *testing.T) {
	s := servertest.Start(t, nil)
	users := make(chan string, 100)
	other := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		var answer any
		switch req.URL.Path {
		case "/apis/shop.example.com/v1":
			answer = metav1.APIResourceList{TypeMeta: metav1.TypeMeta{Kind: "APIResourceList", APIVersion: "v1"}, GroupVersion: "shop.example.com/v1",
				APIResources: []metav1.APIResource{{Name: "cakes", SingularName: "cake", Kind: "Cake", Namespaced: true, Verbs: []string{"get", "list"}}}}
		case "/apis/shop.example.com/v1/namespaces/default/cakes/nut":
			users <- req.Header.Get("X-Remote-User")
			answer = metav1.PartialObjectMetadata{TypeMeta: metav1.TypeMeta{Kind: "Cake", APIVersion: "shop.example.com/v1"}, ObjectMeta: meta("nut")}
		case "/openapi/v3":
			answer = handler3.OpenAPIV3Discovery{Paths: map[string]handler3.OpenAPIV3DiscoveryGroupVersion{
				"apis/shop.example.com/v1": {ServerRelativeURL: "/openapi/v3/apis/shop.example.com/v1?hash=1"}}}
		case "/openapi/v3/apis/shop.example.com/v1":
			answer = map[string]any{"openapi": "3.0.0", "info": map[string]any{"title": "cakes of " + req.Header.Get("X-Remote-User")}}
		default:
			http.NotFound(w, req)
			return
		}
		_ = json.NewEncoder(w).Encode(answer)
	}))
	other.TLS = &tls.Config{Certificates: []tls.Certificate{selfSigned(t)}, MinVersion: tls.VersionTLS12}
	other.Config.ErrorLog = log.New(io.Discard, "", 0)
	other.StartTLS()
	t.Cleanup(other.Close)
	must[*corev1.Service](t)(s.Client.CoreV1().Services("default").Create(t.Context(), externalName("hooks"), metav1.CreateOptions{}))

	services := must[*aggregator.Clientset](t)(aggregator.NewForConfig(s.LoopbackConfig())).ApiregistrationV1().APIServices()
	must[*apiregistrationv1.APIService](t)(services.Create(t.Context(), &apiregistrationv1.APIService{
		ObjectMeta: meta("v1.shop.example.com"),
		Spec: apiregistrationv1.APIServiceSpec{
			Group: "shop.example.com", Version: "v1", GroupPriorityMinimum: 1000, VersionPriority: 10,
			CABundle: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: other.Certificate().Raw}),
			Service:  &apiregistrationv1.ServiceReference{Namespace: "default", Name: "hooks", Port: ptr.To(portOf(t, other.URL))},
		},
	}, metav1.CreateOptions{}))
	get := func(ctx context.Context) (string, error) {
		body, err := s.Client.Discovery().RESTClient().Get().AbsPath("/apis/shop.example.com/v1/namespaces/default/cakes/nut").
			SetHeader("Accept", "application/json").DoRaw(ctx)
		return string(body), err
	}
	var body string
	var err error
	wait.PollUntilContextCancel(waitContext(t), 20*time.Millisecond, true, func(ctx context.Context) (bool, error) { //nolint:errcheck // its outcome is err
		body, err = get(ctx)
		return err == nil, nil
	})
	if err != nil || !strings.Contains(body, `"kind":"Cake"`) {
		t.Fatalf("the other's API: %v\n%s", err, body)
	}
	if user := <-users; user != "system:apiserver" {
		t.Errorf("the other received user %q", user)
	}
	discovered(t, s, "shop.example.com/v1")
	for path, want := range map[string][]string{
		"/openapi/v3":                          {"apis/shop.example.com/v1?hash=1", "apis/apps/v1?hash=", "apis/apiextensions.k8s.io/v1?hash=", "apis/apiregistration.k8s.io/v1?hash="},
		"/openapi/v3/apis/shop.example.com/v1": {"cakes of system:apiserver"},
	} {
		var document []byte
		err := wait.PollUntilContextCancel(waitContext(t), 20*time.Millisecond, true, func(ctx context.Context) (bool, error) {
			document, _ = s.Client.Discovery().RESTClient().Get().AbsPath(path).SetHeader("Accept", "application/json").DoRaw(ctx)
			return !slices.ContainsFunc(want, func(w string) bool { return !strings.Contains(string(document), w) }), nil
		})
		if err != nil {
			t.Errorf("%s lacks one of %q: %s", path, want, document)
		}
	}

	// What does not answer is said to be unavailable, and nothing else suffers.
	other.Close()
	if _, err := get(t.Context()); err == nil || !strings.Contains(err.Error(), "currently unable to handle the request") && !strings.Contains(err.Error(), "error trying to reach service") {
		t.Errorf("the other's API after its end: %v", err)
	}
	must[*corev1.ConfigMap](t)(s.Client.CoreV1().ConfigMaps("default").Create(t.Context(), configMap("x", nil), metav1.CreateOptions{}))
}
