package main

import (
	"context"
	"errors"
	"math"
	"net/http"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/clusterd/clusterd/member/servers"
	"github.com/clusterd/clusterd/member/transport"
)

// removedPath is where a server tells an agent which servers were removed (PUT, a list of
// ids). An agent that does not know it asks by itself, every half minute.
const removedPath = "/clusterd/v1/removed-servers"

const (
	// pushRetry is after how long an agent that did not answer is told again, at first, and
	// pushRetryMost at last. pushTimeout is how long it may take.
	pushRetry     = time.Second
	pushRetryMost = 30 * time.Second
	pushTimeout   = 5 * time.Second
	// pushAtOnce bounds how many are told at the same time.
	pushAtOnce = 64
)

// removalPush is what each agent that is connected has confirmed to know.
type removalPush struct {
	ids    func() []string          // of removed servers that agents must refuse
	agents func() map[string]string // that are connected: names by id
	tell   func(ctx context.Context, name string, ids []string) error

	known map[string][]string // by the agent's id; of run's goroutine
}

// pushRemovals tells agents of removed servers as soon as this server has heard of it, and those
// that connect, over their tunnels. It takes the word of one server, and every server gives it: the
// removed one cannot keep an agent from learning of it.
func (m *Main) pushRemovals(ctx context.Context) error {
	p := &removalPush{
		ids: m.rights.removedServers, agents: m.peers.agents.Agents,
		tell: func(ctx context.Context, name string, ids []string) error {
			return m.peers.call(ctx, name, http.MethodPut, removedPath, ids, nil)
		},
	}
	retry := pushBackoff()
	for {
		changed := m.rights.changed.Next()
		var again <-chan time.Time
		if p.push(ctx) {
			retry = pushBackoff()
		} else {
			again = time.After(retry.Step())
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
			retry = pushBackoff()
		case <-m.peers.agents.Arrivals():
		case <-again:
		}
	}
}

func pushBackoff() wait.Backoff {
	return wait.Backoff{Duration: pushRetry, Factor: 2, Jitter: 0.1, Steps: math.MaxInt32, Cap: pushRetryMost}
}

// push tells those who lack something, and reports whether all know it now.
func (p *removalPush) push(ctx context.Context) (all bool) {
	ids, agents := p.ids(), p.agents()
	if len(ids) == 0 {
		p.known = nil
		return true
	}
	known := map[string][]string{}
	var mu sync.Mutex // guards known
	telling, all := errgroup.Group{}, true
	telling.SetLimit(pushAtOnce)
	for id, name := range agents {
		has := p.known[id]
		if !slices.ContainsFunc(ids, func(one string) bool { return !slices.Contains(has, one) }) {
			mu.Lock()
			known[id] = has
			mu.Unlock()
			continue
		}
		telling.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, pushTimeout)
			defer cancel()
			err := p.tell(ctx, name, ids)
			mu.Lock()
			defer mu.Unlock()
			if err == nil || errors.Is(err, errNoSuchCall) || errors.Is(err, errCallRefused) {
				known[id] = ids
			} else {
				all = false
			}
			return nil
		})
	}
	_ = telling.Wait()
	p.known = known
	return all
}

// putRemoved takes the word of a server on removed ones.
func (n *agentNode) putRemoved(w http.ResponseWriter, r *http.Request) {
	var ids []string
	if !decode(w, r, maxRemovedServers, &ids) {
		return
	}
	caller, _ := transport.PeerFrom(r.Context())
	switch err := n.servers.Remove(caller, ids); {
	case errors.Is(err, servers.ErrOnlyCaller):
		refuse(w, http.StatusConflict, err.Error())
		return
	case err != nil:
		refuse(w, http.StatusInternalServerError, err.Error())
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// maxRemovedServers bounds the list's bytes: some thousands of ids.
const maxRemovedServers = 256 << 10
