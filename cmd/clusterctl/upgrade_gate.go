package main

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
)

// runningContainers are the containers that run on a node, by what names them.
type runningContainers map[string]string // pod's UID/container's name → container's id

// containersOf takes down what runs of the pods of a node. A container that failed
// before will do so again, and says nothing of the node.
func containersOf(pods []corev1.Pod) runningContainers {
	run := runningContainers{}
	for _, p := range pods {
		for _, s := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
			if last := s.LastTerminationState.Terminated; s.State.Running != nil && (last == nil || last.ExitCode == 0) {
				run[containerKey(p, s)] = s.ContainerID
			}
		}
	}
	return run
}

func containerKey(p corev1.Pod, s corev1.ContainerStatus) string { return string(p.UID) + "/" + s.Name }

// lost names a container that ran before and does not run on: it was started again, or
// ended badly. One whose pod is gone or goes, and one that has done its work, are none.
func (before runningContainers) lost(now []corev1.Pod) error {
	for _, p := range now {
		if p.DeletionTimestamp != nil {
			continue
		}
		for _, s := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
			id, ran := before[containerKey(p, s)]
			if !ran {
				continue
			}
			end := s.State.Terminated
			switch {
			case s.ContainerID != id:
				return fmt.Errorf("container %s of pod %s/%s was started again: %s before, %s now", s.Name, p.Namespace, p.Name, id, s.ContainerID)
			case end != nil && end.ExitCode != 0:
				return fmt.Errorf("container %s of pod %s/%s ended with exit code %d (%s)", s.Name, p.Namespace, p.Name, end.ExitCode, end.Reason)
			}
		}
	}
	return nil
}

// permanentError is an error that waiting does not change.
type permanentError struct{ error }

// upgradeGate is what a node has to pass with the new version.
type upgradeGate struct {
	node    upgradeNode
	version string // the new one
	before  runningContainers
	// since is when the last failure was, before the switch.
	since time.Time

	// Taken down when the new version is first heard:
	heard bool
	lease time.Time // when the node's lease was renewed last
	index uint64    // how far the others' stores were
}

// judge says what a node still lacks, by what was asked of it.
func (g *upgradeGate) judge(now observation) error {
	if err := g.judgeProgram(now.release); err != nil {
		return err
	}
	if !g.heard {
		g.heard, g.lease, g.index = true, now.renewed, now.furthest
	}
	if g.node.member.Role == v1.RoleAgent {
		if now.member.Gossip != "answers" {
			return fmt.Errorf("the agent is %s", orNone(now.member.Gossip))
		}
	} else if err := g.judgeStore(now); err != nil {
		return err
	}
	switch {
	case !now.release.AgentRuns:
		return errors.New("the node's agent does not run")
	case !now.ready:
		return errors.New("the Node is not Ready")
	case !now.renewed.After(g.lease):
		return errors.New("the node's lease was not renewed since")
	}
	if err := g.before.lost(now.pods); err != nil {
		return &permanentError{err}
	}
	return nil
}

func (g *upgradeGate) judgeProgram(r v1.NodeRelease) error {
	if r.Version == g.version {
		return nil
	}
	if f := r.Failure; f != nil && f.Version == g.version && !f.At.Equal(g.since) { // the node's clock may have been set back
		return &permanentError{&rolledBackError{f.Why}}
	}
	return fmt.Errorf("the node runs %s", r.Version)
}

func (g *upgradeGate) judgeStore(now observation) error {
	m := now.member
	switch {
	case m.Gossip != "alive":
		return fmt.Errorf("gossip calls it %s", orNone(m.Gossip))
	case m.Version != g.version:
		return fmt.Errorf("gossip has version %s of it", orNone(m.Version))
	case m.Role != v1.RoleVoter && m.Role != v1.RoleNonvoter:
		return fmt.Errorf("its store is %s", m.Role)
	case m.Applied == nil || *m.Applied < g.index:
		return fmt.Errorf("its store has applied %s of %d entries", known(m.Applied), g.index)
	case !now.release.StoreReady:
		return errors.New("its store does not read what the leader has")
	case now.leader == "":
		return errors.New("there is no leader")
	}
	return nil
}

// rolledBackError is returned when the node went back to the version before by itself.
type rolledBackError struct{ why string }

func (t *rolledBackError) Error() string { return "the node went back by itself: " + t.why }

// observation is a node as it is now.
type observation struct {
	release  v1.NodeRelease
	member   v1.Member
	leader   string
	furthest uint64 // that any server has applied
	ready    bool
	renewed  time.Time
	pods     []corev1.Pod
}

// observe asks for all of that.
func observe(ctx context.Context, a *api, name string) (observation, error) {
	var o observation
	ctx, cancel := context.WithTimeout(ctx, askFor)
	defer cancel()
	err := a.do(ctx, http.MethodGet, pathOf("upgrade", "nodes", name), nil, &o.release)
	if err != nil {
		return o, err
	}
	var list v1.MemberList
	if err := a.do(ctx, http.MethodGet, pathOf("members"), nil, &list); err != nil {
		return o, err
	}
	o.leader = list.Leader
	for _, m := range list.Members {
		if m.Name == name {
			o.member = m
		}
		if m.Applied != nil {
			o.furthest = max(o.furthest, *m.Applied)
		}
	}
	var node corev1.Node
	if err := a.do(ctx, http.MethodGet, "/api/v1/nodes/"+url.PathEscape(name), nil, &node); err != nil {
		return o, err
	}
	o.ready = nodeIsReady(&node)
	var lease coordinationv1.Lease
	if err := a.do(ctx, http.MethodGet, "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/"+url.PathEscape(name), nil, &lease); err != nil {
		return o, err
	}
	if lease.Spec.RenewTime != nil {
		o.renewed = lease.Spec.RenewTime.Time
	}
	o.pods, err = podsOn(ctx, a, name)
	return o, err
}

// askFor bounds one round of questions.
const askFor = 10 * time.Second

func nodeIsReady(n *corev1.Node) bool {
	return slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

func podsOn(ctx context.Context, a *api, node string) ([]corev1.Pod, error) {
	var list corev1.PodList
	err := a.do(ctx, http.MethodGet, "/api/v1/pods?fieldSelector="+url.QueryEscape("spec.nodeName="+node), nil, &list)
	return list.Items, err
}
