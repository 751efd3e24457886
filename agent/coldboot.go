package agent

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/agent/checkpoint"
	"github.com/clusterd/clusterd/agent/claim"
	"github.com/clusterd/clusterd/agent/dns"
	"github.com/clusterd/clusterd/agent/object"
	"github.com/clusterd/clusterd/agent/static"
)

// coldBoot joins the records of what runs here to the parts of the agent that know it:
// it is the checkpoint.Agent.
type coldBoot struct {
	a           *Agent
	keeper      *checkpoint.Keeper
	unconfirmed chan []*v1.Pod // capacity 1

	mu     sync.Mutex // guards claims
	claims map[types.UID]map[string]checkpoint.Claim
}

// newColdBoot takes up what the records hold of pods that may still run.
func newColdBoot(a *Agent, keeper *checkpoint.Keeper) *coldBoot {
	c := &coldBoot{a: a, keeper: keeper, unconfirmed: make(chan []*v1.Pod, 1), claims: map[types.UID]map[string]checkpoint.Claim{}}
	for _, p := range keeper.Pods() {
		a.tokens.recall(p.Pod.UID, p.Tokens)
		for _, k := range p.Claims {
			c.note(p.Pod.UID, k)
		}
	}
	a.tokens.given = keeper.PodChanged
	return c
}

// follow keeps what the node's name server follows by itself, if there are both.
func (c *coldBoot) follow(server *dns.Server) error {
	if c == nil || server == nil {
		return nil
	}
	for kind, informer := range server.Informers() {
		// Without the settings it goes by the node's, without namespaces it answers nothing.
		if err := c.keeper.Follow(kind, informer, kind == "ConfigMap"); err != nil {
			return err
		}
	}
	return nil
}

func (c *coldBoot) note(pod types.UID, k checkpoint.Claim) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.claims[pod] == nil {
		c.claims[pod] = map[string]checkpoint.Claim{}
	}
	c.claims[pod][k.Claim.Name] = k
}

// found is for claim.Config.
func (c *coldBoot) found(pod *v1.Pod, claim *v1.PersistentVolumeClaim, v *v1.PersistentVolume) {
	c.note(pod.UID, checkpoint.Claim{Claim: claim, Volume: v})
	c.keeper.PodChanged(pod.UID)
}

// run keeps the records until ctx ends.
func (c *coldBoot) run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		select {
		case <-c.keeper.Gate().Live():
			c.a.tokens.renewEnded()
		case <-ctx.Done():
		}
	})
	return c.keeper.Run(ctx, c)
}

// Listed implements checkpoint.Agent.
func (c *coldBoot) Listed() <-chan struct{} { return c.a.pods.Listed() }

// Works implements checkpoint.Agent.
func (c *coldBoot) Works(uid types.UID) bool {
	_, ok := c.a.pods.View(uid)
	return ok
}

// Node implements checkpoint.Agent.
func (c *coldBoot) Node() *v1.Node { return c.a.node.Object() }

// Start implements checkpoint.Agent.
func (c *coldBoot) Start(pods []*v1.Pod, node *v1.Node) {
	if node != nil {
		c.a.node.Recall(node)
	}
	c.unconfirmed <- pods
}

// Forget implements checkpoint.Agent.
func (c *coldBoot) Forget(uid types.UID) {
	c.a.tokens.forget(uid)
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.claims, uid)
}

// Record implements checkpoint.Agent.
func (c *coldBoot) Record(uid types.UID) (*checkpoint.Pod, bool) {
	if static.IsUID(uid) {
		return nil, true // its source is on this node
	}
	view, ok := c.a.pods.View(uid)
	if !ok {
		return nil, true
	}
	p := *view.Pod
	p.Status = *view.Status
	if !checkpoint.Keeps(&p) || p.Status.StartTime == nil {
		return nil, true
	}
	objects, absent, complete := c.a.objects.Held(uid)
	if !complete {
		return nil, false
	}
	rec := &checkpoint.Pod{Pod: &p, Tokens: c.a.tokens.of(uid)}
	for _, o := range objects {
		e, err := checkpoint.Encode(o)
		if err != nil {
			klog.Background().Error(err, "Part of a pod is not kept", "pod", klog.KObj(&p))
			continue
		}
		rec.Objects = append(rec.Objects, e)
	}
	slices.SortFunc(rec.Objects, func(a, b checkpoint.Object) int {
		return strings.Compare(a.Kind+string(a.Object), b.Kind+string(b.Object))
	})
	for _, r := range absent {
		rec.Absent = append(rec.Absent, absence(r))
	}
	slices.SortFunc(rec.Absent, func(a, b checkpoint.Absent) int {
		return cmp.Or(strings.Compare(a.Kind, b.Kind), strings.Compare(a.Name, b.Name), strings.Compare(a.Signer, b.Signer))
	})
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range p.Spec.Volumes {
		if k, ok := c.claims[uid][claim.NameOf(&p, &p.Spec.Volumes[i])]; ok {
			rec.Claims = append(rec.Claims, k)
		}
	}
	return rec, true
}

func absence(r object.Ref) checkpoint.Absent {
	switch r.Resource {
	case object.ConfigMaps:
		return checkpoint.Absent{Kind: "ConfigMap", Namespace: r.Namespace, Name: r.Name}
	case object.Secrets:
		return checkpoint.Absent{Kind: "Secret", Namespace: r.Namespace, Name: r.Name}
	case object.TrustBundles:
		return checkpoint.Absent{Kind: "ClusterTrustBundle", Name: r.Name}
	}
	return checkpoint.Absent{Kind: "ClusterTrustBundle", Signer: r.Name}
}
