package subresource

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// anyNode is a store that has each node.
type anyNode struct{}

func (anyNode) Get(context.Context, string, *metav1.GetOptions) (runtime.Object, error) {
	return &corev1.Node{}, nil
}

// creators lets user "acts" create nodes/proxy of n1.
type creators struct{}

func (creators) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if a.GetUser().GetName() == "acts" && a.GetVerb() == "create" && a.GetResource() == "nodes" && a.GetSubresource() == "proxy" && a.GetName() == "n1" {
		return authorizer.DecisionAllow, "", nil
	}
	return authorizer.DecisionNoOpinion, "", nil
}

// TestNodeProxyActs: what acts in containers needs create, also as GET, which is what
// a WebSocket comes as; the rest needs the method's verb alone.
func TestNodeProxyActs(t *testing.T) {
	p := NewNodeProxy(anyNode{}, creators{}, func(context.Context, string) (http.RoundTripper, *url.URL, error) {
		return http.DefaultTransport, &url.URL{Scheme: "https", Host: "n1"}, nil
	})
	for _, tt := range []struct {
		path, user, verb string
		refused          bool
	}{
		{"exec/ns/p/c", "looks", "get", true},
		{"/exec/ns/p/c", "looks", "get", true},
		{"pods/../exec/ns/p/c", "looks", "get", true},
		{"attach/ns/p/c", "looks", "get", true},
		{"portForward/ns/p", "looks", "get", true},
		{"exec/ns/p/c", "looks", "update", true},
		{"exec/ns/p/c", "acts", "get", false},
		{"exec/ns/p/c", "asked before", "create", false},
		{"metrics", "looks", "get", false},
		{"containerLogs/ns/p/c", "looks", "get", false},
		{"", "looks", "get", false},
	} {
		ctx := request.WithRequestInfo(t.Context(), &request.RequestInfo{Verb: tt.verb, APIVersion: "v1", Resource: "nodes", Subresource: "proxy", Name: "n1"})
		ctx = request.WithUser(ctx, &user.DefaultInfo{Name: tt.user})
		_, err := p.Connect(ctx, "n1", &corev1.NodeProxyOptions{Path: tt.path}, nil)
		if apierrors.IsForbidden(err) != tt.refused || err != nil && !tt.refused {
			t.Errorf("%s %s by %q: %v, refused should be %v", tt.verb, tt.path, tt.user, err, tt.refused)
		}
		if err != nil && !strings.Contains(err.Error(), `cannot create resource "nodes/proxy", which a WebSocket needs`) {
			t.Errorf("%s: %v", tt.path, err)
		}
	}
}

// oneNode is a store with node n1, whose address is the host's own.
type oneNode struct{}

func (oneNode) Get(_ context.Context, name string, _ *metav1.GetOptions) (runtime.Object, error) {
	if name != "n1" {
		return nil, apierrors.NewNotFound(corev1.Resource("nodes"), name)
	}
	return &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{
		Addresses:       []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: "n1"}, {Type: corev1.NodeInternalIP, Address: "127.0.0.1"}},
		DaemonEndpoints: corev1.NodeDaemonEndpoints{KubeletEndpoint: corev1.DaemonEndpoint{Port: 6443}},
	}}, nil
}

// TestNodeProxyPorts: the agent answers without a port, at its own and at a kubelet's;
// no other port of the node is asked.
func TestNodeProxyPorts(t *testing.T) {
	agent := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { fmt.Fprintf(w, "agent %s", req.URL.Path) }))
	defer agent.Close()
	base, err := url.Parse(agent.URL)
	if err != nil {
		t.Fatal(err)
	}
	p := NewNodeProxy(oneNode{}, creators{}, func(_ context.Context, node string) (http.RoundTripper, *url.URL, error) {
		if node != "n1" {
			t.Errorf("the agent of %q is asked", node)
		}
		return http.DefaultTransport, base, nil
	})
	ctx := request.WithRequestInfo(t.Context(), &request.RequestInfo{Verb: "get", APIVersion: "v1", Resource: "nodes", Subresource: "proxy"})
	for _, id := range []string{"n1", "n1:6443", "http:n1:", "https:n1:10250"} {
		h, err := p.Connect(ctx, id, &corev1.NodeProxyOptions{Path: "metrics"}, nil)
		if err != nil {
			t.Errorf("%s: %v", id, err)
			continue
		}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
		if got := w.Body.String(); got != "agent /metrics" {
			t.Errorf("%s: %s", id, got)
		}
	}
	for _, id := range []string{"n1:0", "n1:80", "http:n1:9100", "n1:70000", "n1:name", "ftp:n1:6443"} {
		if _, err := p.Connect(ctx, id, &corev1.NodeProxyOptions{}, nil); !apierrors.IsBadRequest(err) {
			t.Errorf("%s: %v, want BadRequest", id, err)
		}
	}
	if _, err := p.Connect(ctx, "n9:10250", &corev1.NodeProxyOptions{}, nil); !apierrors.IsNotFound(err) {
		t.Errorf("a node that is not there: %v, want NotFound", err)
	}
}
