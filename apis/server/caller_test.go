package server

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
)

func TestCaller(t *testing.T) {
	for _, tt := range []struct{ user, agent, want string }{
		{"ann", "kubectl/v1.37.2 (linux/amd64) kubernetes/abc", "ann via kubectl"},
		{"ann", "curl", "ann via curl"},
		{"ann", "", "ann"},
		{"ann", PartAgent("deployment"), "ann via clusterd"},
		{"system:node:n1", "clusterd/v1.37.2 (linux/amd64) kubernetes/abc", "system:node:n1"},
		{"system:node:n1", "curl/8", "system:node:n1 via curl"},
		{"system:kube-controller-manager", PartAgent("deployment"), "system:kube-controller-manager (deployment)"},
		{"", "kubectl/v1", ""},
	} {
		got := "not asked"
		handler := withAgent(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) { got = Caller(req.Context()) }))
		req := httptest.NewRequest(http.MethodGet, "/", nil)
		req.Header.Set("User-Agent", tt.agent)
		if tt.user != "" {
			req = req.WithContext(request.WithUser(req.Context(), &user.DefaultInfo{Name: tt.user}))
		}
		handler.ServeHTTP(httptest.NewRecorder(), req)
		if got != tt.want {
			t.Errorf("%q with %q: %q, want %q", tt.user, tt.agent, got, tt.want)
		}
	}
	for origin, want := range map[string]string{
		"": "", "ann": "ann", "ann via kubectl": "ann", "ann via x via y": "ann", "Ann (sales) via kubectl": "Ann (sales)",
		"system:node:n1": "system:node:n1", "system:node:n1 via curl": "system:node:n1", "system:node:n1 (whatever)": "system:node:n1",
		"system:serviceaccount:a:b (deployment)":     "system:serviceaccount:a:b",
		"system:kube-controller-manager (job)":       "system:kube-controller-manager (job)",
		"system:kube-controller-manager via kubectl": "system:kube-controller-manager",
	} {
		if got := WriterOf(origin); got != want {
			t.Errorf("writer of %q: %q, want %q", origin, got, want)
		}
	}
	if got := Caller(context.Background()); got != "" {
		t.Errorf("outside of requests: %q", got)
	}
}
