package kubeletapi

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"strings"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/client-go/kubernetes"
)

// CallsConfig is that of the handler of servers' calls.
type CallsConfig struct {
	NodeName string // required
	// Client asks the API server as the node; required.
	Client kubernetes.Interface
	// Caller is the user for whom a server makes the call; nil: for itself; required.
	Caller func(context.Context) user.Info
	// Handler answers those who may; required.
	Handler http.Handler
	Logger  *slog.Logger // required
}

// Calls answers the calls of servers, which bear the user they are made for: the API
// server is asked back whether that user may. What a server asks for itself is
// whether the node is well, and what it uses.
type Calls struct {
	cfg  CallsConfig
	what authorizer.Authorizer
}

// NewCalls checks the configuration.
func NewCalls(cfg CallsConfig) (*Calls, error) {
	if cfg.NodeName == "" || cfg.Client == nil || cfg.Caller == nil || cfg.Handler == nil || cfg.Logger == nil {
		return nil, errors.New("kubeletapi: NodeName, Client, Caller, Handler and Logger are required")
	}
	what, err := delegate(cfg.Client)
	if err != nil {
		return nil, err
	}
	return &Calls{cfg, what}, nil
}

// ServeHTTP answers a call that its user may make.
func (c *Calls) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	who := c.cfg.Caller(r.Context())
	if who == nil {
		if r.Method == http.MethodGet && (r.URL.Path == "/healthz" || r.URL.Path == "/metrics/resource") {
			c.cfg.Handler.ServeHTTP(w, r)
			return
		}
		c.cfg.Logger.Warn("a node call that names no user was refused", "path", r.URL.Path)
		http.Error(w, fmt.Sprintf("node %s: Forbidden: the call names no user for whom it is made (servers of an older version do not: upgrade them)", c.cfg.NodeName), http.StatusForbidden)
		return
	}
	asked := callAttributes(c.cfg.NodeName, who, r)
	if permit(w, r, c.what, asked, c.cfg.NodeName) {
		c.cfg.Handler.ServeHTTP(w, r)
		return
	}
	c.cfg.Logger.Warn("a node call was refused", "path", r.URL.Path, "user", who.GetName())
}

// callAttributes are the rights one of which a call needs: those that the API server
// has asked for, by the path that it has made of the request; or nodes/proxy.
func callAttributes(node string, who user.Info, r *http.Request) []authorizer.AttributesRecord {
	asked := attributes(node, who, r)
	proxy := asked[len(asked)-1]
	proxy.Subresource = "proxy"
	subresource := map[string]string{"containerLogs": "log", "exec": "exec", "attach": "attach", "portForward": "portforward"}
	parts := strings.Split(strings.TrimPrefix(r.URL.Path, "/"), "/")
	if sub, ofPod := subresource[parts[0]]; ofPod && len(parts) >= 3 {
		pod := authorizer.AttributesRecord{
			User: who, Verb: "get", APIVersion: "v1", Namespace: parts[1], Resource: "pods", Subresource: sub, Name: parts[2], ResourceRequest: true, Path: r.URL.Path,
		}
		if sub != "log" {
			pod.Verb = "create" // whatever the method; so asks the API server, too
		}
		return []authorizer.AttributesRecord{pod, proxy}
	}
	if asked[len(asked)-1].Subresource == "proxy" {
		return asked
	}
	return append(asked, proxy)
}
