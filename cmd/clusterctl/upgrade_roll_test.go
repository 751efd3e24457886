package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/member/releases"
)

// upgradeCluster is a cluster as clusterctl upgrade sees it: nodes that take a file,
// go on with it and come back at once. n1 leads until it hands over to n2.
type upgradeCluster struct {
	t  *testing.T
	mu sync.Mutex
	// bad is the node that goes back by itself, or that is never well: unwell.
	bad, unwell string
	// quits goes back from its trial when the first file is sent; full has no room for
	// the program before.
	quits, full string
	nodes       map[string]*v1.NodeRelease
	roles       map[string]string
	leader      string
	renewed     time.Time
	log         []string
	record      v1.Rollout
	taken       bool // another command has the roll-out
	busy        int  // so often, and then no more
}

func newUpgradeCluster(t *testing.T) (*upgradeCluster, *api) {
	c := &upgradeCluster{t: t, leader: "n1", nodes: map[string]*v1.NodeRelease{}, roles: map[string]string{"a1": v1.RoleAgent, "n1": v1.RoleVoter, "n2": v1.RoleVoter, "n3": v1.RoleVoter}, renewed: time.Unix(1e9, 0)}
	for name := range c.roles {
		c.nodes[name] = &v1.NodeRelease{Name: name, Version: oldRelease, Arch: "amd64", AgentRuns: true, StoreReady: true}
	}
	srv := httptest.NewServer(http.HandlerFunc(c.serve))
	t.Cleanup(srv.Close)
	u, err := url.Parse(srv.URL)
	if err != nil {
		t.Fatal(err)
	}
	return c, &api{http: srv.Client(), server: u}
}

func (c *upgradeCluster) serve(w http.ResponseWriter, r *http.Request) {
	c.mu.Lock()
	defer c.mu.Unlock()
	answer := func(v any) { _ = json.NewEncoder(w).Encode(v) }
	path := r.URL.Path
	switch {
	case path == v1.Upgrade:
		if c.busy > 0 || c.taken {
			c.busy--
			w.WriteHeader(http.StatusConflict)
			answer(map[string]string{"message": "another rollout is in progress"})
			return
		}
		_ = json.NewDecoder(r.Body).Decode(&c.record)
		answer(c.record)
	case path == v1.Upgrade+"/handover":
		c.log = append(c.log, "handover")
		c.leader = "n2"
		answer(map[string]any{})
	case path == v1.Members:
		applied := uint64(7)
		list := v1.MemberList{Leader: c.leader}
		for name, role := range c.roles {
			m := v1.Member{Name: name, Role: role, Leader: name == c.leader, Gossip: "alive", Version: c.nodes[name].Version, Applied: &applied}
			if role == v1.RoleAgent {
				m.Gossip, m.Applied = "answers", nil
			}
			list.Members = append(list.Members, m)
		}
		answer(list)
	case strings.HasPrefix(path, v1.Upgrade+"/nodes/"):
		name, what, _ := strings.Cut(strings.TrimPrefix(path, v1.Upgrade+"/nodes/"), "/")
		if what != "" {
			c.log = append(c.log, what+" "+name)
		}
		if what == "switch" && name == c.full {
			w.WriteHeader(http.StatusInternalServerError)
			answer(map[string]string{"message": "keep the present program: no space left on device"})
			return
		}
		if what == "file" && c.quits != "" {
			n := c.nodes[c.quits]
			n.Version, n.Trial, n.Failure = oldRelease, nil, &v1.ReleaseFailure{Version: newRelease, Why: "it ended by itself", At: time.Now()}
		}
		c.do(c.nodes[name], what)
		answer(c.nodes[name])
	case strings.HasPrefix(path, "/api/v1/nodes/"):
		ready := "True"
		if name := filepath.Base(path); name == c.unwell && c.nodes[name].Version == newRelease {
			ready = "False"
		}
		fmt.Fprintf(w, `{"status":{"conditions":[{"type":"Ready","status":%q}]}}`, ready)
	case strings.Contains(path, "/leases/"):
		c.renewed = c.renewed.Add(time.Second)
		fmt.Fprintf(w, `{"spec":{"renewTime":%q}}`, c.renewed.UTC().Format("2006-01-02T15:04:05.000000Z"))
	case path == "/api/v1/pods":
		answer(map[string]any{"items": []any{}})
	default:
		c.t.Errorf("%s %s is asked", r.Method, path)
		w.WriteHeader(http.StatusNotFound)
	}
}

func (c *upgradeCluster) do(n *v1.NodeRelease, what string) {
	switch what {
	case "file":
		n.Staged = &v1.StagedRelease{Version: newRelease, Digest: "digest"}
	case "switch":
		n.Version, n.Trial, n.Staged = newRelease, &v1.ReleaseTrial{Version: newRelease, From: oldRelease}, nil
		if n.Name == c.bad {
			n.Version, n.Trial, n.Failure = oldRelease, nil, &v1.ReleaseFailure{Version: newRelease, Why: "it ended by itself", At: time.Now()}
		}
	case "confirm":
		n.Trial = nil
	case "back":
		n.Version, n.Trial = oldRelease, nil
	}
}

// roll runs a roll-out over the cluster.
func (c *upgradeCluster) roll(a *api, limit time.Duration) (string, error) {
	c.t.Helper()
	secret, err := releases.NewSecretKey()
	if err != nil {
		c.t.Fatal(err)
	}
	m := releases.Manifest{Version: newRelease, Arch: "amd64"}
	path := filepath.Join(c.t.TempDir(), "r.tar.gz")
	if err := os.WriteFile(path, []byte("release"), 0o644); err != nil {
		c.t.Fatal(err)
	}
	signed, err := secret.Sign(strings.NewReader("release"), m)
	if err != nil {
		c.t.Fatal(err)
	}
	sig, err := releases.ParseSignature(signed)
	if err != nil {
		c.t.Fatal(err)
	}
	file := &releaseFile{path: path, size: 7, digest: "digest", signed: signed, signature: sig, manifest: m}
	var nodes []upgradeNode
	for name, role := range c.roles {
		r := *c.nodes[name]
		r.Keys = []string{sig.KeyName()}
		n := upgradeNode{member: v1.Member{Name: name, Role: role, Gossip: "alive", Leader: name == c.leader}, ready: true, release: &r}
		nodes = append(nodes, n)
	}
	plan, err := planUpgrade(nodes, planOptions{release: m, key: sig.KeyName()})
	if err != nil {
		c.t.Fatal(err)
	}
	var out bytes.Buffer
	err = newRoller(a, file, plan, limit, limit, &out, &out).run(c.t.Context())
	return out.String(), err
}

func (c *upgradeCluster) did(want string) {
	c.t.Helper()
	if got := strings.Join(c.log, ", "); got != want {
		c.t.Errorf("it did\n%s\nand not\n%s", got, want)
	}
}

func TestRoll(t *testing.T) {
	c, a := newUpgradeCluster(t)
	// n2 has the file already, n3 was on trial when a command was killed.
	c.nodes["n2"].Staged = &v1.StagedRelease{Version: newRelease, Digest: "digest"}
	c.do(c.nodes["n3"], "switch")
	c.busy = 2 // that command was heard a moment ago
	out, err := c.roll(a, time.Minute)
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	c.did("file a1, file n1, confirm n3, switch a1, confirm a1, switch n2, confirm n2, handover, switch n1, confirm n1")
	if c.record.State != v1.RolloutDone || len(c.record.Nodes) != 4 {
		t.Errorf("%+v", c.record)
	}
	for _, line := range []string{"a1    agent     done", "n1    leader    handed over  n2 leads"} {
		if !strings.Contains(out, line) {
			t.Errorf("%q is not in\n%s", line, out)
		}
	}
}

func TestRollStops(t *testing.T) {
	for _, tt := range []struct {
		what   string
		change func(*upgradeCluster)
		limit  time.Duration
		did    string
		want   string
		state  string
	}{
		{"a node that goes back by itself", func(c *upgradeCluster) { c.bad = "n2" }, time.Minute,
			"file a1, file n2, file n3, file n1, switch a1, confirm a1, switch n2", "n2 did not become well with v2 and is back at v1: the node went back by itself: it ended by itself", v1.RolloutTookBack},
		{"a node that was on trial and has gone back since", func(c *upgradeCluster) { c.do(c.nodes["n3"], "switch"); c.quits = "n3" }, time.Minute,
			"file a1, file n2, file n1", "n3 did not become well with v2 and is back at v1: the node went back by itself: it ended by itself", v1.RolloutTookBack},
		{"a node without room", func(c *upgradeCluster) { c.full = "a1" }, time.Minute,
			"file a1, file n2, file n3, file n1, switch a1", "a1 did not take the new program: keep the present program: no space left", ""},
		{"a node that is not well", func(c *upgradeCluster) { c.unwell = "a1" }, 5 * time.Second,
			"file a1, file n2, file n3, file n1, switch a1, back a1", "a1 did not become well with v2 and is back at v1: not within 5s: the Node is not Ready", v1.RolloutTookBack},
	} {
		t.Run(tt.what, func(t *testing.T) {
			c, a := newUpgradeCluster(t)
			tt.change(c)
			out, err := c.roll(a, tt.limit)
			if err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%v, want %q\n%s", err, tt.want, out)
			}
			c.did(tt.did)
			state := ""
			for _, n := range c.record.Nodes {
				if n.State != v1.RolloutWaiting && n.State != v1.RolloutDone {
					state = n.State
				}
			}
			if c.record.State != v1.RolloutStopped || state != tt.state || !strings.Contains(c.record.Why, tt.want) {
				t.Errorf("it is recorded as %+v", c.record)
			}
		})
	}
}

// A command that was thought dead changes nothing more.
func TestRollIsTaken(t *testing.T) {
	c, a := newUpgradeCluster(t)
	r := &roller{a: a, begun: true, plan: upgradePlan{steps: []upgradeNode{anUpgradeNode("n1", "leader")}}, rec: v1.Rollout{ID: "mine"}, out: &bytes.Buffer{}, limit: time.Minute,
		file: &releaseFile{manifest: releases.Manifest{Version: newRelease}, digest: "digest"}}
	c.taken = true
	if err := r.step(t.Context(), r.plan.steps[0]); err == nil || !strings.Contains(err.Error(), "another command") {
		t.Errorf("%v", err)
	}
	c.did("handover")
}

// TestCloseRecord: where every node has the release already, what a command that was
// killed has left of the roll-out's record is closed; another release's stays.
func TestCloseRecord(t *testing.T) {
	for version, want := range map[string]string{newRelease: v1.RolloutDone, oldRelease: v1.RolloutStopped} {
		c, a := newUpgradeCluster(t)
		c.record = v1.Rollout{ID: "killed", Version: version, State: v1.RolloutStopped}
		file := &releaseFile{manifest: releases.Manifest{Version: newRelease}}
		var out bytes.Buffer
		r := newRoller(a, file, upgradePlan{done: []string{"a1", "n1"}}, time.Minute, time.Minute, &out, &out)
		if err := closeRecord(t.Context(), r); err != nil {
			t.Fatal(err)
		}
		if c.record.State != want || c.record.Version != version || len(c.log) > 0 {
			t.Errorf("%s: %+v, %v", version, c.record, c.log)
		}
	}
}
