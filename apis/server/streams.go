package server

import (
	"fmt"
	"net/http"
	"slices"
	"sync"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/server/routine"

	"github.com/clusterd/clusterd/apis"
	"github.com/clusterd/clusterd/apis/server/inproc"
)

// DefaultStreams is how many watches and streams a user may have open at once.
const DefaultStreams = 1000

// manyStreams is how many times as many nodes and administrators may have: a
// node follows each Secret and ConfigMap that its pods use.
const manyStreams = 10

// streamsRetry is after how many seconds a client that was refused should ask again.
const streamsRetry = 10

// streams bounds how many requests without an end one user has. Priority and
// fairness does not count those that are running: a watch gives its seat back
// when it has begun.
type streams struct {
	limit int

	mu   sync.Mutex
	open map[string]int // by user
}

func newStreams(limit int) *streams { return &streams{limit: limit, open: map[string]int{}} }

// bounded is next, for at most so many watches and streams of one user. Those of
// this process are not counted.
func (s *streams) bounded(next http.Handler, isLong request.LongRunningRequestCheck) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		ctx := req.Context()
		info, ok := request.RequestInfoFrom(ctx)
		who, known := request.UserFrom(ctx)
		if !ok || !known || inproc.Inside(ctx) || !isLong(req, info) {
			next.ServeHTTP(w, req)
			return
		}
		name, limit := who.GetName(), s.limitOf(who)
		if !s.begin(name, limit) {
			err := apierrors.NewTooManyRequests(fmt.Sprintf("%q has %d watches and streams open at this server, and may have no more: end some, or set --max-streams-per-user", name, limit), streamsRetry)
			responsewriters.ErrorNegotiated(err, apis.Codecs, schema.GroupVersion{Version: "v1"}, w, req)
			return
		}
		end := func() { s.end(name) }
		defer func() {
			if end != nil {
				end()
			}
		}()
		next.ServeHTTP(w, req)
		// With the gate APIServingWithRoutine a watch begins here and is served when
		// all filters have returned.
		if routine.AppendTask(ctx, &routine.Task{Func: end}) {
			end = nil
		}
	})
}

func (s *streams) limitOf(who user.Info) int {
	if groups := who.GetGroups(); slices.Contains(groups, user.NodesGroup) || slices.Contains(groups, user.SystemPrivilegedGroup) {
		return s.limit * manyStreams
	}
	return s.limit
}

func (s *streams) begin(name string, limit int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open[name] >= limit {
		return false
	}
	s.open[name]++
	return true
}

func (s *streams) end(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open[name]--; s.open[name] == 0 {
		delete(s.open, name)
	}
}
