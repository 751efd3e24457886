package main

import (
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"time"

	"k8s.io/apiserver/pkg/server/healthz"
)

// partsLimit is how long the agent may hold up readiness while it is built,
// and how long the leader's loops may be missing before readiness fails.
const partsLimit = time.Minute

// serverParts is how far the parts of this server are that other systems run as
// programs of their own. The zero value: none has begun.
type serverParts struct {
	began  time.Time                 // of this process' node
	serves atomic.Bool               // a request through the whole API has succeeded
	agent  atomic.Bool               // an agent was built, or could not be
	leads  atomic.Pointer[time.Time] // since when this node leads; nil: it does not
	loops  atomic.Bool               // the leader's loops run
}

// readyChecks name each part as Kubernetes does, for /readyz?verbose. An agent that
// fails later does not make the API unready: the Node's condition Ready tells of it,
// and the API of this node goes on.
func (c *serverParts) readyChecks() []healthz.HealthChecker {
	checks := []healthz.HealthChecker{healthz.NamedCheck("apiserver", func(*http.Request) error {
		if !c.serves.Load() {
			return errors.New("no request has passed the whole API yet")
		}
		return nil
	})}
	for _, loop := range []string{"controller-manager", "scheduler"} {
		checks = append(checks, healthz.NamedCheck(loop, func(*http.Request) error { return c.checkLoops(time.Now()) }))
	}
	for _, part := range []string{"kubelet", "container-runtime", "kube-proxy", "pod-network", "csi"} {
		checks = append(checks, healthz.NamedCheck(part, func(*http.Request) error { return c.checkAgent(time.Now()) }))
	}
	return checks
}

// checkLoops: the loops run on the node that leads, and on no other.
func (c *serverParts) checkLoops(now time.Time) error {
	since := c.leads.Load()
	if since == nil || c.loops.Load() || now.Sub(*since) < partsLimit {
		return nil
	}
	return fmt.Errorf("this node leads since %s, and its loops do not run: its log says why", since.UTC().Format(time.RFC3339))
}

func (c *serverParts) checkAgent(now time.Time) error {
	if c.agent.Load() || now.Sub(c.began) >= partsLimit {
		return nil
	}
	return errors.New("the node's agent is being built")
}

// leading says since when this node leads; nil: it does no longer.
func (c *serverParts) leading(since *time.Time) { c.leads.Store(since) }
