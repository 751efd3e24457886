package kubeletapi

import (
	"crypto/tls"
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

func read[T any](t *testing.T, r *http.Request) *T {
	t.Helper()
	var v T
	if err := json.NewDecoder(r.Body).Decode(&v); err != nil {
		t.Error(err)
	}
	return &v
}

func write(w http.ResponseWriter, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusCreated)
	_ = json.NewEncoder(w).Encode(v)
}

// TestWhoMayAsk: a token names a user, and the path and method the right that
// is asked for. What may not be asked is not answered.
func TestWhoMayAsk(t *testing.T) {
	api := http.NewServeMux()
	api.HandleFunc("POST /apis/authentication.k8s.io/v1/tokenreviews", func(w http.ResponseWriter, r *http.Request) {
		review := read[authenticationv1.TokenReview](t, r)
		if name, ok := strings.CutPrefix(review.Spec.Token, "token-of-"); ok {
			review.Status = authenticationv1.TokenReviewStatus{Authenticated: true, User: authenticationv1.UserInfo{Username: name}}
		}
		write(w, review)
	})
	// Each user is called as the one right it has: verb:subresource.
	api.HandleFunc("POST /apis/authorization.k8s.io/v1/subjectaccessreviews", func(w http.ResponseWriter, r *http.Request) {
		review := read[authorizationv1.SubjectAccessReview](t, r)
		a := review.Spec.ResourceAttributes
		review.Status.Allowed = a != nil && a.Resource == "nodes" && a.Name == "n1" && review.Spec.User == a.Verb+":"+a.Subresource
		write(w, review)
	})
	backend := httptest.NewServer(api)
	defer backend.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: backend.URL, QPS: -1})
	if err != nil {
		t.Fatal(err)
	}
	var answered []string
	s, err := New(Config{
		NodeName: "n1", Addr: netip.MustParseAddrPort("127.0.0.1:10250"), Client: client,
		Certificate: func() *tls.Certificate { return nil }, Logger: slog.New(slog.DiscardHandler),
		Handler: http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			answered = append(answered, r.URL.Path)
			if r.Header.Get("Authorization") != "" {
				t.Error("the token travels on")
			}
		}),
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		method, path, token string
		want                int
		says                string
	}{
		{"GET", "/metrics", "", 401, "Authorization: Bearer TOKEN"},
		{"GET", "/metrics", "guessed", 401, ""},
		{"GET", "/healthz", "", 401, ""},
		{"GET", "/metrics", "token-of-get:metrics", 200, ""},
		{"GET", "/metrics/cadvisor", "token-of-get:metrics", 200, ""},
		{"GET", "/stats/summary", "token-of-get:metrics", 403, `user "get:metrics" may not get nodes/stats of node n1`},
		{"GET", "/stats/summary", "token-of-get:stats", 200, ""},
		{"GET", "/logs/", "token-of-get:log", 200, ""},
		{"GET", "/pods", "token-of-get:pods", 200, ""},
		{"GET", "/pods", "token-of-get:proxy", 200, ""},
		{"GET", "/configz", "token-of-get:stats", 403, "nodes/configz or nodes/proxy"},
		{"GET", "/containerLogs/a/b/c", "token-of-get:log", 403, "nodes/proxy"},
		{"GET", "/containerLogs/a/b/c", "token-of-get:proxy", 200, ""},
		{"POST", "/exec/a/b/c", "token-of-get:proxy", 403, "may not create nodes/proxy"},
		{"GET", "/exec/a/b/c", "token-of-get:proxy", 403, "may not create nodes/proxy"},
		{"GET", "/attach/a/b/c", "token-of-get:proxy", 403, "may not create nodes/proxy"},
		{"GET", "/portForward/a/b", "token-of-get:proxy", 403, "may not create nodes/proxy"},
		{"GET", "/exec/a/b/c", "token-of-create:proxy", 200, ""},
		{"POST", "/exec/a/b/c", "token-of-create:proxy", 200, ""},
		{"PROPFIND", "/pods", "token-of-get:proxy", 403, ""},
		{"GET", "/metricsnot", "token-of-get:metrics", 403, ""},
	} {
		answered = nil
		r := httptest.NewRequest(tt.method, tt.path, nil)
		if tt.token != "" {
			r.Header.Set("Authorization", "Bearer "+tt.token)
		}
		w := httptest.NewRecorder()
		s.ServeHTTP(w, r)
		body := w.Body.String()
		if w.Code != tt.want || !strings.Contains(body, tt.says) || (tt.want == 200) != (len(answered) == 1) {
			t.Errorf("%s %s with %q: %d %s, answered %q; want %d %q", tt.method, tt.path, tt.token, w.Code, body, answered, tt.want, tt.says)
		}
	}
}
