package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/member/releases"
)

const (
	oldRelease = "v1"
	newRelease = "v2"
	releaseKey = "1A2B3C4D5E6F7081"
)

// anUpgradeNode is one that is well and runs the old version.
func anUpgradeNode(name, role string, change ...func(*upgradeNode)) upgradeNode {
	n := upgradeNode{
		member:  v1.Member{Name: name, Role: v1.RoleVoter, Gossip: "alive", Leader: role == "leader"},
		ready:   true,
		release: &v1.NodeRelease{Name: name, Version: oldRelease, Arch: "amd64", Keys: []string{releaseKey}, KeysFrom: v1.KeysFromCluster},
	}
	if role == v1.RoleAgent {
		n.member.Role, n.member.Gossip = v1.RoleAgent, "answers"
	}
	for _, do := range change {
		do(&n)
	}
	return n
}

func planFor(change ...func(*planOptions)) planOptions {
	w := planOptions{release: releases.Manifest{Version: newRelease, Arch: "amd64"}, key: releaseKey}
	for _, do := range change {
		do(&w)
	}
	return w
}

func TestPlanUpgrade(t *testing.T) {
	hasIt := func(n *upgradeNode) { n.release.Version = newRelease }
	five := []upgradeNode{
		anUpgradeNode("n1", "leader"), anUpgradeNode("a2", "agent"), anUpgradeNode("n3", "follower"), anUpgradeNode("n2", "follower"), anUpgradeNode("a1", "agent"),
	}
	for _, tt := range []struct {
		what  string
		nodes []upgradeNode
		wish  planOptions
		want  string // the order; or what the error says
	}{
		{"an agent first, the leader last", five, planFor(), "a1 n2 n3 a2 n1"},
		{"a canary of the user's", five, planFor(func(w *planOptions) { w.canary = "n3" }), "n3 n2 a1 a2 n1"},
		{"some left out", five, planFor(func(w *planOptions) { w.except = []string{"a1", "n2"} }), "a2 n3 n1"},
		{"servers alone", five[:1:1], planFor(), "n1"},
		{"a follower is the canary where there is no agent", []upgradeNode{five[0], five[2], five[3]}, planFor(), "n2 n3 n1"},
		{"those that have it", []upgradeNode{five[0], anUpgradeNode("a1", "agent", hasIt), five[2]}, planFor(), "n3 n1"},
		{"one that is on trial with it", []upgradeNode{five[0], anUpgradeNode("a1", "agent", hasIt, func(n *upgradeNode) {
			n.release.Trial = &v1.ReleaseTrial{Version: newRelease, From: oldRelease}
		})}, planFor(), "a1 n1"},
		{"one that is on trial with it, before the canary", []upgradeNode{five[0], five[1], anUpgradeNode("n3", "follower", hasIt, func(n *upgradeNode) {
			n.release.Trial = &v1.ReleaseTrial{Version: newRelease, From: oldRelease}
		}), five[3]}, planFor(), "n3 a2 n2 n1"},
		{"a leader that is on trial with it", []upgradeNode{anUpgradeNode("n1", "leader", hasIt, func(n *upgradeNode) {
			n.release.Trial = &v1.ReleaseTrial{Version: newRelease, From: oldRelease}
		}), five[2], five[3]}, planFor(func(w *planOptions) { w.canary = "n3" }), "n1 n3 n2"},
		{"one that is on trial with another", []upgradeNode{anUpgradeNode("a1", "agent", func(n *upgradeNode) {
			n.release.Trial = &v1.ReleaseTrial{Version: "v3", From: oldRelease}
		})}, planFor(), "a1: version v3 is on trial there"},
		{"one for another machine", []upgradeNode{five[0], anUpgradeNode("a1", "agent", func(n *upgradeNode) { n.release.Arch = "arm64" })}, planFor(),
			"a1: it is linux/arm64, and the file is for linux/amd64"},
		{"another key", []upgradeNode{anUpgradeNode("n1", "leader", func(n *upgradeNode) { n.release.Keys = nil })}, planFor(), "n1: it does not trust key " + releaseKey + ", which has signed the file (it trusts none)"},
		{"another key of its own", []upgradeNode{anUpgradeNode("n1", "leader", func(n *upgradeNode) { n.release.Keys, n.release.KeysFrom = []string{"X"}, v1.KeysFromNode })}, planFor(), "--release-keys of that node"},
		{"one that is not Ready", []upgradeNode{anUpgradeNode("n1", "leader", func(n *upgradeNode) { n.ready = false })}, planFor(), "n1: it is not Ready"},
		{"one that is dead", []upgradeNode{anUpgradeNode("n1", "leader", func(n *upgradeNode) { n.member.Gossip = "dead" })}, planFor(), "n1: it is not Ready (dead)"},
		{"one that does not answer", []upgradeNode{anUpgradeNode("n1", "leader", func(n *upgradeNode) { n.release, n.problem = nil, "it is away" })}, planFor(), "n1: it is away"},
		{"one that does not answer, left out", append([]upgradeNode{anUpgradeNode("n9", "follower", func(n *upgradeNode) { n.release = nil })}, five...), planFor(func(w *planOptions) { w.except = []string{"n9"} }), "a1 n2 n3 a2 n1"},
		{"one with an obstacle", []upgradeNode{anUpgradeNode("n1", "leader", func(n *upgradeNode) { n.release.Obstacle = "it was not started so" })}, planFor(), "n1: it was not started so"},
		{"a name that no member has", five, planFor(func(w *planOptions) { w.canary = "n7" }), "n7: no member"},
	} {
		plan, err := planUpgrade(tt.nodes, tt.wish)
		var order []string
		for _, n := range plan.steps {
			order = append(order, n.name())
		}
		var no *planError
		if passing := strings.Contains(tt.want, "not Ready") || strings.Contains(tt.want, "is away"); errors.As(err, &no) && no.passing != passing {
			t.Errorf("%s: passing %v, want %v", tt.what, no.passing, passing)
		}
		if err != nil && strings.Contains(err.Error(), tt.want) || err == nil && strings.Join(order, " ") == tt.want {
			continue
		}
		t.Errorf("%s: %v, %v; want %q", tt.what, order, err, tt.want)
	}
}

func TestQuorumWithout(t *testing.T) {
	voters := func(gossip ...string) (l v1.MemberList) {
		for i, g := range gossip {
			l.Members = append(l.Members, v1.Member{Name: fmt.Sprint("n", i+1), Role: v1.RoleVoter, Gossip: g})
		}
		l.Members = append(l.Members, v1.Member{Name: "a1", Role: v1.RoleAgent, Gossip: "answers"}, v1.Member{Name: "s1", Role: v1.RoleNonvoter, Gossip: "alive"})
		return l
	}
	for _, tt := range []struct {
		list v1.MemberList
		name string
		want string
	}{
		{voters("alive", "alive", "alive"), "n1", ""},
		{voters("alive", "alive", "dead"), "n1", "1 of 3 voters, and 2 are needed: start clusterd on n3"},
		{voters("alive", "alive", "dead"), "a1", ""},
		{voters("alive", "alive", "dead"), "s1", ""},
		{voters("alive", "alive", "alive", "alive", "dead"), "n1", ""},
		{voters("alive"), "n1", ""},
		{voters("alive", "alive"), "n1", "1 of 2 voters, and both are needed: join a third server"},
	} {
		err := quorumWithout(tt.list, tt.name)
		if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s of %+v: %v, want %q", tt.name, tt.list.Members, err, tt.want)
		}
	}
}

func TestPlanTable(t *testing.T) {
	plan, err := planUpgrade([]upgradeNode{
		anUpgradeNode("n1", "leader"), anUpgradeNode("n2", "follower"), anUpgradeNode("a1", "agent"),
		anUpgradeNode("n3", "follower", func(n *upgradeNode) { n.release.Version = newRelease }),
	}, planFor(func(w *planOptions) { w.except = []string{"n2"} }))
	if err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := plan.table(&out); err != nil {
		t.Fatal(err)
	}
	want := `NODE   ROLE     FROM   TO    NOTE
a1     agent    v1     v2    canary
n1     leader   v1     v2    hands over first
n3              v2     v2    has it already
n2                           left out
`
	if diff := cmp.Diff(want, out.String()); diff != "" {
		t.Error(diff)
	}
}

func aRunningPod(name, id string, change ...func(*corev1.ContainerStatus)) corev1.Pod {
	s := corev1.ContainerStatus{Name: "c", ContainerID: id, State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}}
	for _, do := range change {
		do(&s)
	}
	return corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("uid-" + name)},
		Status:     corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{s}},
	}
}

func ended(code int32) func(*corev1.ContainerStatus) {
	return func(s *corev1.ContainerStatus) {
		s.State = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: code, Reason: "Error"}}
	}
}

// A container that failed before says nothing of the node.
func TestContainersOf(t *testing.T) {
	failed := func(s *corev1.ContainerStatus) {
		s.LastTerminationState = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 1}}
	}
	got := containersOf([]corev1.Pod{aRunningPod("p", "id1"), aRunningPod("q", "id2", failed), aRunningPod("r", "id3", ended(0))})
	if diff := cmp.Diff(runningContainers{"uid-p/c": "id1"}, got); diff != "" {
		t.Error(diff)
	}
}

// A node passes when the new version runs, all of it, and its containers run on.
func TestUpgradeGate(t *testing.T) {
	began := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	index := uint64(100)
	well := func() observation {
		return observation{
			release: v1.NodeRelease{Version: newRelease, AgentRuns: true, StoreReady: true},
			member:  v1.Member{Name: "n2", Role: v1.RoleVoter, Gossip: "alive", Version: newRelease, Applied: &index},
			leader:  "n1", furthest: index, ready: true, renewed: began.Add(time.Second), pods: []corev1.Pod{aRunningPod("p", "id1")},
		}
	}
	behind := index - 1
	for _, tt := range []struct {
		what   string
		agent  bool
		change func(*observation)
		want   string // the error; "": it passes
		never  bool   // waiting changes nothing
	}{
		{what: "well", change: func(*observation) {}},
		{what: "the version before", change: func(o *observation) { o.release.Version = oldRelease }, want: "the node runs v1"},
		{what: "a failure of long ago", change: func(o *observation) {
			o.release.Version, o.release.Failure = oldRelease, &v1.ReleaseFailure{Version: newRelease, At: began}
		}, want: "the node runs v1"},
		{what: "gone back", change: func(o *observation) {
			o.release.Version, o.release.Failure = oldRelease, &v1.ReleaseFailure{Version: newRelease, Why: "it ended", At: began.Add(time.Minute)}
		}, want: "went back by itself: it ended", never: true},
		{what: "gone back, after its clock was set back", change: func(o *observation) {
			o.release.Version, o.release.Failure = oldRelease, &v1.ReleaseFailure{Version: newRelease, Why: "it ended", At: began.Add(-time.Hour)}
		}, want: "went back by itself: it ended", never: true},
		{what: "no agent", change: func(o *observation) { o.release.AgentRuns = false }, want: "agent does not run"},
		{what: "not Ready", change: func(o *observation) { o.ready = false }, want: "not Ready"},
		{what: "Ready of before", change: func(o *observation) { o.renewed = began }, want: "lease was not renewed"},
		{what: "gossip does not see it", change: func(o *observation) { o.member.Gossip = "dead" }, want: "gossip calls it dead"},
		{what: "gossip knows the one before", change: func(o *observation) { o.member.Version = oldRelease }, want: "version v1"},
		{what: "a store that lags", change: func(o *observation) { o.member.Applied = &behind }, want: "applied 99 of 100"},
		{what: "a store that says nothing", change: func(o *observation) { o.member.Applied = nil }, want: "applied - of 100"},
		{what: "a store without a leader", change: func(o *observation) { o.leader = "" }, want: "no leader"},
		{what: "a store that cannot read", change: func(o *observation) { o.release.StoreReady = false }, want: "does not read"},
		{what: "an agent", agent: true, change: func(o *observation) { o.member = v1.Member{Gossip: "answers"} }},
		{what: "a silent agent", agent: true, change: func(o *observation) { o.member = v1.Member{Gossip: "silent"} }, want: "the agent is silent"},
		{what: "a container that was started again", change: func(o *observation) { o.pods = []corev1.Pod{aRunningPod("p", "id2")} }, want: "id1 before, id2 now", never: true},
		{what: "a container that ended badly", change: func(o *observation) { o.pods = []corev1.Pod{aRunningPod("p", "id1", ended(137))} }, want: "exit code 137", never: true},
		{what: "a container that has done its work", change: func(o *observation) { o.pods = []corev1.Pod{aRunningPod("p", "id1", ended(0))} }},
		{what: "a pod that goes", change: func(o *observation) {
			o.pods[0] = aRunningPod("p", "id1", ended(137))
			o.pods[0].DeletionTimestamp = &metav1.Time{Time: began}
		}},
		{what: "a pod that is gone, and a new one", change: func(o *observation) { o.pods = []corev1.Pod{aRunningPod("q", "id9")} }},
	} {
		role := "follower"
		if tt.agent {
			role = v1.RoleAgent
		}
		first := well()
		first.renewed = began
		g := upgradeGate{node: anUpgradeNode("n2", role), version: newRelease, since: began, before: containersOf(first.pods)}
		if tt.agent {
			first.member = v1.Member{Gossip: "answers"}
		}
		if err := g.judge(first); err == nil {
			t.Errorf("%s: it passed before its lease was renewed", tt.what)
		}
		now := well()
		tt.change(&now)
		err := g.judge(now)
		var never *permanentError
		if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) || errors.As(err, &never) != tt.never {
			t.Errorf("%s: %v, want %q (never %v)", tt.what, err, tt.want, tt.never)
		}
	}
}

func TestRolloutTable(t *testing.T) {
	now := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	r := v1.Rollout{Version: newRelease, State: v1.RolloutRunning, Updated: now.Add(-5 * time.Second), Nodes: []v1.RolloutNode{
		{Name: "a1", Role: "agent", From: oldRelease, State: v1.RolloutDone}, {Name: "n1", Role: "leader", From: oldRelease, State: v1.RolloutTrial},
	}}
	nodes := []upgradeNode{anUpgradeNode("n1", "leader", func(n *upgradeNode) {
		n.release.Version, n.release.Trial = newRelease, &v1.ReleaseTrial{}
	})}
	for _, tt := range []struct {
		state string
		after time.Duration
		want  string
	}{
		{v1.RolloutRunning, 0, "running, heard 5s ago"},
		{v1.RolloutRunning, time.Hour, "run clusterctl upgrade --to again"},
		{v1.RolloutStopped, 0, "stopped: n1 is not well"},
		{v1.RolloutDone, 0, "State:   done"},
	} {
		r.State, r.Why = tt.state, "n1 is not well"
		var out bytes.Buffer
		if err := rolloutTable(&out, r, nodes, now.Add(tt.after)); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(out.String(), tt.want) || !strings.Contains(out.String(), "v2 (on trial)") {
			t.Errorf("%s: %s", tt.state, out.String())
		}
	}
}

// A release that was signed here is what its signature says.
func TestUpgradeSign(t *testing.T) {
	dir := t.TempDir()
	run := func(args ...string) (string, error) {
		var out bytes.Buffer
		root := newRoot(genericiooptions.IOStreams{In: &bytes.Buffer{}, Out: &out, ErrOut: &out}, kubeconfigSearch{})
		root.SetArgs(append([]string{"upgrade"}, args...))
		err := root.Execute()
		return out.String(), err
	}
	key := filepath.Join(dir, "release.key")
	public, err := run("key", key)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := run("key", key); err == nil {
		t.Error("a key was written over another")
	}
	if info, err := os.Stat(key); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", info, err)
	}
	file := filepath.Join(dir, "r.tar.gz")
	if err := os.WriteFile(file, []byte("no tarball"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := run("sign", file, "--key", key); err == nil || !strings.Contains(err.Error(), "tarball") {
		t.Errorf("no tarball was signed: %v", err)
	}
	if _, err := run("sign", file); err == nil || !strings.Contains(err.Error(), "--key") {
		t.Errorf("signed with nothing: %v", err)
	}
	if _, err := openRelease(file, ""); err == nil || !strings.Contains(err.Error(), "clusterctl upgrade sign") {
		t.Errorf("a file without a signature: %v", err)
	}
	if k, err := releases.ParseKey(public); err != nil || k.Name() == "" {
		t.Errorf("%q: %v", public, err)
	}
}
