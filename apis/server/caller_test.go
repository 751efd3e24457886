package server

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"unicode/utf8"

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
		// Names that read like more than a name.
		{"admin via kubectl", "", `"admin via kubectl"`},
		{"admin via kubectl", "curl/8", `"admin via kubectl" via curl`},
		{`"admin"`, "curl/8", `"\"admin\"" via curl`},
		{"ann [from gw5]", "", `"ann [from gw5]"`},
		{"system:x (job)", "curl", `"system:x (job)" via curl`},
		{"line\nbreak", "", `"line\nbreak"`},
	} {
		got := "not asked"
		handler := withAgent(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) { got = Caller(req.Context()) }))
		req := httptest.NewRequest(http.MethodPost, "/", nil)
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
		`"admin via kubectl"`: `"admin via kubectl"`, `"admin via kubectl" via curl`: `"admin via kubectl"`,
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

// TestCallersAreTwo: no name is so long or so odd that its budget is another's,
// and no program makes two of one user.
func TestCallersAreTwo(t *testing.T) {
	long := "system:serviceaccount:" + strings.Repeat("n", 63) + ":" + strings.Repeat("a", 253)
	seen := map[string]string{}
	for _, name := range []string{
		"admin", "admin via kubectl", `"admin via kubectl"`, `"admin`, long, long + "b", long[:120], long[:119],
		shown(long), strings.Repeat("\x00", 200), strings.Repeat("\x00", 201), strings.Repeat("ü via ", 40), strings.Repeat("ü via ", 41),
	} {
		var writer string
		for _, agent := range []string{"", "kubectl/v1", strings.Repeat("p", 300), "clusterd/part (" + strings.Repeat("x via ", 50) + ")"} {
			ctx := context.WithValue(request.WithUser(context.Background(), &user.DefaultInfo{Name: name}), agentKey{}, agent)
			origin := Caller(ctx)
			if len(origin) > 128 || !utf8.ValidString(origin) {
				t.Errorf("%q with %q: %d bytes: %q", name, agent, len(origin), origin)
			}
			if of := WriterOf(origin); writer == "" {
				writer = of
			} else if of != writer {
				t.Errorf("%q is %q with one program and %q with another", name, writer, of)
			}
		}
		if other, ok := seen[writer]; ok {
			t.Errorf("%q and %q are both %q", name, other, writer)
		}
		seen[writer] = name
	}
}
