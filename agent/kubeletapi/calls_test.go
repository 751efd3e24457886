package kubeletapi

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

type userKey struct{}

// TestServersCalls: each call needs the right that the API server has asked its user
// for, and a server alone gets to know whether the node is well.
func TestServersCalls(t *testing.T) {
	down := false
	api := http.NewServeMux()
	// Each user is called as the one right it has.
	api.HandleFunc("POST /apis/authorization.k8s.io/v1/subjectaccessreviews", func(w http.ResponseWriter, r *http.Request) {
		if down {
			http.Error(w, "down", http.StatusInternalServerError)
			return
		}
		review := read[authorizationv1.SubjectAccessReview](t, r)
		a := review.Spec.ResourceAttributes
		right := a.Verb + " " + a.Resource + "/" + a.Subresource + " " + strings.TrimPrefix(a.Namespace+"/"+a.Name, "/")
		review.Status.Allowed = review.Spec.User == right && slices.Equal(review.Spec.Groups, []string{"g"}) && review.Spec.UID == "u" && review.Spec.Extra["k"][0] == "v"
		write(w, review)
	})
	backend := httptest.NewServer(api)
	defer backend.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: backend.URL, QPS: -1})
	if err != nil {
		t.Fatal(err)
	}
	answered := 0
	calls, err := NewCalls(CallsConfig{
		NodeName: "n1", Client: client, Logger: slog.New(slog.DiscardHandler),
		Caller: func(ctx context.Context) user.Info {
			name, _ := ctx.Value(userKey{}).(string)
			if name == "" {
				return nil
			}
			return &user.DefaultInfo{Name: name, UID: "u", Groups: []string{"g"}, Extra: map[string][]string{"k": {"v"}}}
		},
		Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) { answered++ }),
	})
	if err != nil {
		t.Fatal(err)
	}
	ask := func(method, path, who string, want int, says string) {
		t.Helper()
		answered = 0
		r := httptest.NewRequest(method, path, nil)
		r = r.WithContext(context.WithValue(r.Context(), userKey{}, who))
		w := httptest.NewRecorder()
		calls.ServeHTTP(w, r)
		if body := w.Body.String(); w.Code != want || !strings.Contains(body, says) || (want == 200) != (answered == 1) {
			t.Errorf("%s %s for %q: %d %s, answered %d times; want %d %q", method, path, who, w.Code, body, answered, want, says)
		}
	}
	for _, tt := range []struct {
		method, path, who string
		want              int
		says              string
	}{
		{"GET", "/healthz", "", 200, ""},
		{"GET", "/metrics/resource", "", 200, ""},
		{"POST", "/healthz", "", 403, "names no user"},
		{"GET", "/metrics", "", 403, "names no user"},
		{"GET", "/pods", "", 403, "names no user"},
		{"GET", "/logs/", "", 403, "names no user"},
		{"GET", "/images", "", 403, "names no user"},
		{"POST", "/images/load", "", 403, "names no user"},
		{"GET", "/containerLogs/ns/p/c", "", 403, "names no user"},
		{"POST", "/exec/ns/p/uid/c", "", 403, "names no user"},
		{"POST", "/attach/ns/p/uid/c", "", 403, "names no user"},
		{"POST", "/portForward/ns/p/uid", "", 403, "names no user"},

		{"GET", "/containerLogs/ns/p/c", "get pods/log ns/p", 200, ""},
		{"GET", "/containerLogs/ns/p/c", "get nodes/proxy n1", 200, ""},
		{"GET", "/containerLogs/other/p/c", "get pods/log ns/p", 403, `user "get pods/log ns/p" may not get pods/log or nodes/proxy of node n1`},
		{"GET", "/containerLogs/ns/q/c", "get pods/log ns/p", 403, ""},
		{"POST", "/exec/ns/p/uid/c", "create pods/exec ns/p", 200, ""},
		{"POST", "/exec/ns/p/uid/c", "get pods/exec ns/p", 403, ""},
		{"GET", "/exec/ns/p/uid/c", "create pods/exec ns/p", 200, ""},
		{"GET", "/exec/ns/p/uid/c", "get pods/exec ns/p", 403, ""},
		{"GET", "/exec/ns/p/uid/c", "get nodes/proxy n1", 403, ""},
		{"GET", "/exec/ns/p/uid/c", "create nodes/proxy n1", 200, ""},
		{"GET", "/attach/ns/p/uid/c", "get nodes/proxy n1", 403, ""},
		{"GET", "/portForward/ns/p/uid", "get nodes/proxy n1", 403, ""},
		{"POST", "/exec/ns/p/uid/c", "create nodes/proxy n1", 200, ""},
		{"POST", "/exec/ns/p/uid/c", "get nodes/proxy n1", 403, ""},
		{"POST", "/exec/ns/p/uid/c", "create pods/attach ns/p", 403, ""},
		{"POST", "/exec/ns/p/uid/c", "get pods/log ns/p", 403, ""},
		{"POST", "/attach/ns/p/uid/c", "create pods/attach ns/p", 200, ""},
		{"POST", "/portForward/ns/p/uid", "create pods/portforward ns/p", 200, ""},
		{"POST", "/portForward/ns/p/uid", "create pods/portforward ns/q", 403, ""},
		{"POST", "/images/load", "create nodes/proxy n1", 200, ""},
		{"POST", "/images/load", "create nodes/proxy n2", 403, ""},
		{"GET", "/images", "get nodes/proxy n1", 200, ""},
		{"GET", "/pods", "get nodes/pods n1", 200, ""},
		{"GET", "/pods", "get pods/ ns", 403, ""},
		{"GET", "/metrics/cadvisor", "get nodes/metrics n1", 200, ""},
		{"GET", "/metrics/cadvisor", "get nodes/proxy n1", 200, ""},
		{"GET", "/exec", "get pods/exec /", 403, ""},
		{"GET", "/healthz", "nobody", 403, ""},
	} {
		ask(tt.method, tt.path, tt.who, tt.want, tt.says)
	}
	down = true
	ask("GET", "/containerLogs/ns/p/d", "get pods/log ns/p2", 503, "could not be asked")
}
