package server

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"net/http"
	"strconv"
	"strings"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/clusterd/clusterd/apis/past"
)

type agentKey struct{}

// withAgent lets Caller name the program that sends a request. One that reads writes
// nothing of which it could be the origin, and a watch would keep the copy of its
// request for as long as it lasts.
func withAgent(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if agent := req.UserAgent(); agent != "" && req.Method != http.MethodGet && req.Method != http.MethodHead {
			req = req.WithContext(context.WithValue(req.Context(), agentKey{}, agent))
		}
		next.ServeHTTP(w, req)
	})
}

// maxUser bounds, in bytes, what a user takes of Caller's result, maxProgram what a
// program does: storages bound the whole, and what they would cut off is what
// tells users apart.
const maxUser, maxProgram = 80, 40

// Caller names who makes the request that ctx belongs to: the user, and the
// program where it says more than the user does; "" outside of requests. It is
// for people: programs choose their own names. Users do not: one whose name is
// long, or reads like a user with a program, is shown so that it is no other's.
func Caller(ctx context.Context) string {
	who, ok := request.UserFrom(ctx)
	if !ok {
		return ""
	}
	userAgent, _ := ctx.Value(agentKey{}).(string)
	name, program := shown(who.GetName()), programOf(userAgent)
	switch {
	case program == "":
		return name
	case program != ownProgram || !strings.HasPrefix(name, "system:"):
		return name + past.Via + program
	}
	if part := partOf(userAgent); part != "" {
		return name + partMark + part + ")"
	}
	return name
}

const (
	// partMark stands between a user and the part of this program.
	partMark = " ("
	// cutMark stands in place of what was cut off, before a fingerprint of the whole.
	cutMark = "…"
)

// shown is a user's name as Caller has it: quoted if it could be taken for more
// than a name, and short. No two users have the same.
func shown(name string) string {
	quoted := func(s string) string {
		if strings.Contains(s, past.Via) || strings.Contains(s, "[from ") || strings.HasPrefix(s, `"`) || !strconv.CanBackquote(s) ||
			strings.HasPrefix(s, "system:") && strings.Contains(s, partMark) {
			return strconv.Quote(s)
		}
		return s
	}
	if whole := quoted(name); len(whole) <= maxUser && !strings.Contains(name, cutMark) {
		return whole // nothing that was cut looks like it
	}
	sum := sha256.Sum256([]byte(name))
	mark := cutMark + hex.EncodeToString(sum[:8])
	for cut := maxUser - len(mark); ; cut-- {
		if short := quoted(strings.ToValidUTF8(name[:min(cut, len(name))], "") + mark); len(short) <= maxUser {
			return short
		}
	}
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
	writer, _ := past.SplitOrigin(origin)
	if strings.HasPrefix(writer, "system:") {
		writer, _, _ = strings.Cut(writer, partMark)
	}
	return writer
}

// programOf is the program in a User-Agent such as "kubectl/v1.37.2
// (linux/amd64) kubernetes/abc".
func programOf(userAgent string) string {
	name, _, _ := strings.Cut(userAgent, " ")
	name, _, _ = strings.Cut(name, "/")
	return atMost(name, maxProgram)
}

// partOf is the part in a PartAgent's result; "" in any other User-Agent.
func partOf(userAgent string) string {
	part, ok := strings.CutPrefix(userAgent, ownProgram+"/part (")
	if !ok {
		return ""
	}
	return atMost(strings.TrimSuffix(part, ")"), maxProgram)
}

// atMost is at most so many bytes of s.
func atMost(s string, bytes int) string {
	if len(s) <= bytes {
		return s
	}
	return strings.ToValidUTF8(s[:bytes-len(cutMark)], "") + cutMark
}
