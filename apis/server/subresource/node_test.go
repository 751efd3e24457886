package subresource

import (
	"context"
	"net/http"
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
	return &corev1.Node{Status: corev1.NodeStatus{DaemonEndpoints: corev1.NodeDaemonEndpoints{KubeletEndpoint: corev1.DaemonEndpoint{Port: 6443}}}}, nil
}

// creators lets user "acts" create nodes/proxy of n1.
type creators struct{}

func (creators) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if a.GetUser().GetName() == "acts" && a.GetVerb() == "create" && a.GetResource() == "nodes" && a.GetSubresource() == "proxy" && a.GetName() == "n1" {
		return authorizer.DecisionAllow, "", nil
	}
	return authorizer.DecisionNoOpinion, "", nil
}

// TestNodeProxyNames: a node may be named with its agent's port, and with no other.
func TestNodeProxyNames(t *testing.T) {
	p := NewNodeProxy(anyNode{}, creators{}, func(_ context.Context, name string) (http.RoundTripper, *url.URL, error) {
		if name != "n1" {
			t.Errorf("reached %q", name)
		}
		return http.DefaultTransport, &url.URL{Scheme: "https", Host: "n1"}, nil
	})
	for id, message := range map[string]string{
		"n1": "", "n1:10250": "", "n1:6443": "", "https:n1:10250": "", "https:n1:": "",
		"n1:22": "port 22 of node n1 is not proxied to: its agent has 6443", "http:n1:10250": "invalid node request", "a:b:c:d": "invalid node request",
	} {
		_, err := p.Connect(t.Context(), id, &corev1.NodeProxyOptions{Path: "pods"}, nil)
		if (err == nil) != (message == "") || err != nil && !(apierrors.IsBadRequest(err) && strings.Contains(err.Error(), message)) {
			t.Errorf("%s: %v, want %q", id, err, message)
		}
	}
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
