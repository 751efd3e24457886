package e2e

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/member/transport"
)

// TestE2ERemovalReachesAgents takes servers' keys away, whose thief speaks to agents, one after
// the other: each agent refuses them within a second, and closes what they have open.
func TestE2ERemovalReachesAgents(t *testing.T) {
	need(t)
	e := startBare(t, 5, func(c *cluster.Config) { c.Agents = 2 })
	e.ready(7)
	ns := e.namespace("removal")
	ids := map[string]string{}
	for _, agent := range []string{"a1", "a2"} {
		p := pod("on-" + agent)
		p.Spec.NodeName = agent
		e.create(ns, p)
		ids[p.Name] = e.podReady(ns, p.Name).Status.ContainerStatuses[0].ContainerID
	}
	best := time.Hour
	for _, server := range []string{"n5", "n4", "n3"} {
		thief := stolenIdentity(e, server)
		open := map[string]net.Conn{}
		for _, agent := range []string{"a1", "a2"} {
			c, err := thief.Dial(t.Context(), addrOf(e, agent), "", transport.Node)
			if err != nil {
				t.Fatalf("%s's key before its removal: %v", server, err)
			}
			defer c.Close()
			open[agent] = c
		}
		mustContain(t, "rm", e.ctl("members", "rm", server, "--yes"), server)
		removed := time.Now()
		var took time.Duration
		for agent, c := range open {
			// It is closed, and no other is taken.
			c.SetReadDeadline(time.Now().Add(testTimeout))
			if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatalf("what %s had open at %s: %v", server, agent, err)
			}
			e.eventually(agent+" refuses "+server, func(ctx context.Context) error {
				c, err := thief.Dial(ctx, addrOf(e, agent), "", transport.Node)
				if err != nil {
					return nil
				}
				defer c.Close()
				c.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
				if _, err := c.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
					return errors.New("it is open")
				}
				return nil
			})
			took = max(took, time.Since(removed))
		}
		best = min(best, took)
		t.Logf("both agents refused %s %s after its removal", server, took)
	}
	if best > time.Second {
		t.Errorf("of three removals the fastest took %s to reach both agents", best)
	}
	// The agents' pods go on, by the servers that are left.
	for name, id := range ids {
		e.eventuallyHas([]string{"logs", "-n", ns, name}, "serving on")
		if got := e.get(ns, name).Status.ContainerStatuses[0]; got.ContainerID != id || got.RestartCount != 0 {
			t.Errorf("the container of %s is another one: %+v, before %s", name, got, id)
		}
	}
	// The word is servers' own: a user who may use nodes/proxy cannot give it.
	out, errs, code := e.run("clusterctl", `["`+strings.Repeat("a", 26)+`"]`, "get", "--raw", "/api/v1/nodes/a1/proxy/clusterd/v1/removed-servers")
	if code == 0 {
		t.Errorf("an administrator by nodes/proxy: %s%s", out, errs)
	}
	if err := putAsUser(e, "a1"); err == nil || !strings.Contains(err.Error(), "only servers ask for this") {
		t.Errorf("an administrator writes by nodes/proxy: %v", err)
	}
}

// putAsUser tells an agent, as the administrator, that a server was removed.
func putAsUser(e *env, agent string) error {
	b, err := e.api.CoreV1().RESTClient().Put().AbsPath("/api/v1/nodes/" + agent + "/proxy/clusterd/v1/removed-servers").Body([]byte(`[]`)).Do(e.t.Context()).Raw()
	if err != nil {
		return fmt.Errorf("%w: %s", err, b)
	}
	return nil
}
