package server

import (
	"context"
	"net/http"
	"strings"

	"k8s.io/apiserver/pkg/endpoints/request"
)

type agentKey struct{}

// withAgent lets Caller name the program that sends a request.
func withAgent(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if agent := agentName(req.UserAgent()); agent != "" {
			req = req.WithContext(context.WithValue(req.Context(), agentKey{}, agent))
		}
		next.ServeHTTP(w, req)
	})
}

// agentName is the program in a User-Agent such as "kubectl/v1.37.2
// (linux/amd64) kubernetes/abc".
func agentName(userAgent string) string {
	name, _, _ := strings.Cut(userAgent, " ")
	name, _, _ = strings.Cut(name, "/")
	return name
}

// Caller names who makes the request that ctx belongs to: the user, and the
// program where it says more than the user does; "" outside of requests. It is
// for people: programs choose their own names.
func Caller(ctx context.Context) string {
	user, ok := request.UserFrom(ctx)
	if !ok {
		return ""
	}
	name := user.GetName()
	agent, _ := ctx.Value(agentKey{}).(string)
	if agent == "" || agent == ownAgent && strings.HasPrefix(name, "system:") {
		return name
	}
	return name + " via " + agent
}

// ownAgent is what the parts of this program call themselves; their users'
// names tell them apart.
const ownAgent = "clusterd"
