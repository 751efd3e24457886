package server

import (
	"context"
	"net/http"
	"strings"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
)

type agentKey struct{}

// withAgent lets Caller name the program that sends a request.
func withAgent(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if agent := req.UserAgent(); agent != "" {
			req = req.WithContext(context.WithValue(req.Context(), agentKey{}, agent))
		}
		next.ServeHTTP(w, req)
	})
}

// Caller names who makes the request that ctx belongs to: the user, and the
// program where it says more than the user does; "" outside of requests. It is
// for people: programs choose their own names.
func Caller(ctx context.Context) string {
	who, ok := request.UserFrom(ctx)
	if !ok {
		return ""
	}
	userAgent, _ := ctx.Value(agentKey{}).(string)
	name, program := who.GetName(), programOf(userAgent)
	switch {
	case program == "":
		return name
	case program != ownProgram || !strings.HasPrefix(name, "system:"):
		return name + " via " + program
	}
	if part := partOf(userAgent); part != "" {
		return name + " (" + part + ")"
	}
	return name
}

// ownProgram is what the parts of this program call themselves. Their users'
// names tell most of them apart, PartAgent's the rest.
const ownProgram = "clusterd"

// PartAgent is the User-Agent of one of several parts of this program that
// share a user, such as the controllers: Caller names the part.
func PartAgent(part string) string { return ownProgram + "/part (" + part + ")" }

// WriterOf is whose budget a change of an origin, which is Caller's result,
// counts against: the user, whatever programs it uses and says it uses. The
// loops that share the controllers' name are one each.
func WriterOf(origin string) string {
	if strings.HasPrefix(origin, user.KubeControllerManager+" (") {
		return origin
	}
	writer, _, _ := strings.Cut(origin, " via ")
	if strings.HasPrefix(writer, "system:") {
		writer, _, _ = strings.Cut(writer, " (")
	}
	return writer
}

// programOf is the program in a User-Agent such as "kubectl/v1.37.2
// (linux/amd64) kubernetes/abc".
func programOf(userAgent string) string {
	name, _, _ := strings.Cut(userAgent, " ")
	name, _, _ = strings.Cut(name, "/")
	return name
}

// partOf is the part in a PartAgent's result; "" in any other User-Agent.
func partOf(userAgent string) string {
	part, ok := strings.CutPrefix(userAgent, ownProgram+"/part (")
	if !ok {
		return ""
	}
	return strings.TrimSuffix(part, ")")
}
