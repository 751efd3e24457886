package checkpoint

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// Config of a Keeper. All fields are required but MaxAge.
type Config struct {
	Store    *Store
	Gate     *Gate
	NodeName string
	// After is how long the API may take to answer before pods are started without it.
	After time.Duration
	// MaxAge is how long ago the node may have had an API for its pods to be started without
	// one; 0: no matter how long. A clock that is behind that time is not gone by.
	MaxAge time.Duration
}

// Agent is what a Keeper works for. Its methods are called one at a time, and may
// take a while.
type Agent interface {
	// Record makes the record of a pod; nil: it is to have none. complete is false
	// while part of what it needs has not been read: then it is asked again.
	Record(uid types.UID) (record *Pod, complete bool)
	// Works reports whether the node runs, starts or ends the pod.
	Works(uid types.UID) bool
	// Node is the node's own object as last known.
	Node() *v1.Node
	// Start starts pods as they are on record; node is the node's own object, nil: it
	// is not on record.
	Start(pods []*v1.Pod, node *v1.Node)
	// Listed is closed when the API's list of the node's pods has been taken.
	Listed() <-chan struct{}
	// Forget is called when a pod is no more and has no record.
	Forget(uid types.UID)
}

// Keeper writes the records, and has the pods started from them if the API does not
// answer.
type Keeper struct {
	cfg      Config
	pods     []*Pod // as loaded
	cluster  *Cluster
	followed []followed

	poke chan struct{} // capacity 1

	mu    sync.Mutex // guards all below
	dirty map[types.UID]bool
	over  map[types.UID]bool // by Ended
	// changed: something that is followed has changed; urgent: it is a policy.
	changed, urgent bool
}

type followed struct {
	kind     string
	informer cache.SharedIndexInformer
	optional bool
}

// NewKeeper reads the records. It starts nothing.
func NewKeeper(ctx context.Context, cfg Config) *Keeper {
	k := &Keeper{cfg: cfg, poke: make(chan struct{}, 1), dirty: map[types.UID]bool{}, over: map[types.UID]bool{}}
	var faults []error
	k.pods, k.cluster, faults = cfg.Store.Load()
	for _, err := range faults {
		klog.FromContext(ctx).Error(err, "A record of what runs here was left out: its pod starts when the API answers")
	}
	return k
}

// Gate is the one that the node's clients go through.
func (k *Keeper) Gate() *Gate { return k.cfg.Gate }

// Pods are the records that were read.
func (k *Keeper) Pods() []*Pod { return k.pods }

// Follow keeps what an informer holds of a kind. An optional one need not be synced for
// the rest to be kept. To be called before Run.
func (k *Keeper) Follow(kind string, informer cache.SharedIndexInformer, optional bool) error {
	if _, ok := kinds[kind]; !ok {
		return fmt.Errorf("checkpoint: kind %q is not known", kind)
	}
	changed := func(urgent bool) {
		k.mu.Lock()
		k.changed = true
		k.urgent = k.urgent || urgent
		k.mu.Unlock()
		k.wake()
	}
	policy := kind == "NetworkPolicy"
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { changed(policy) }, DeleteFunc: func(any) { changed(policy) },
		UpdateFunc: func(a, b any) {
			x, okA := a.(metav1.Object)
			y, okB := b.(metav1.Object)
			changed(policy && !(okA && okB && x.GetGeneration() == y.GetGeneration() && x.GetGeneration() > 0))
		},
	})
	if err != nil {
		return fmt.Errorf("checkpoint: %w", err)
	}
	k.followed = append(k.followed, followed{kind, informer, optional})
	return nil
}

// PodChanged has the record of a pod looked at. It does not block.
func (k *Keeper) PodChanged(uid types.UID) {
	k.mu.Lock()
	k.dirty[uid] = true
	k.mu.Unlock()
	k.wake()
}

func (k *Keeper) wake() {
	select {
	case k.poke <- struct{}{}:
	default:
	}
}

// Run waits for the API, has pods started without it if it does not answer, and keeps
// the records until ctx ends.
func (k *Keeper) Run(ctx context.Context, agent Agent) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	wg.Go(func() {
		select {
		case <-agent.Listed():
			k.cfg.Gate.Open()
		case <-ctx.Done():
		}
	})
	started := k.await(ctx, agent)
	k.keep(ctx, agent, started)
	return nil
}

// await returns when the API has listed the node's pods, or pods were started without it.
func (k *Keeper) await(ctx context.Context, agent Agent) (started []*v1.Pod) {
	log := klog.FromContext(ctx)
	from := time.Now()
	last, unknown := k.cfg.Store.Contact()
	for started == nil {
		if at := k.cfg.Gate.Answered(); at.After(from) {
			from = at
		}
		after := time.NewTimer(k.cfg.After - time.Since(from))
		select {
		case <-ctx.Done():
			after.Stop()
			return nil
		case <-agent.Listed():
			after.Stop()
			return nil
		case <-after.C:
		}
		if k.cfg.Gate.Answered().After(from) {
			continue
		}
		from = time.Now()
		switch {
		case k.cfg.Gate.Refused():
			log.Info("The API refuses this node: no pods are started without it")
		case k.cluster == nil && len(k.pods) > 0:
			log.Info("The API does not answer, and what this node knew of the cluster, policies among it, is not on record: no pods are started without it", "after", k.cfg.After)
		case k.cluster == nil:
			log.Info("The API does not answer, and no pods of this node are on record", "after", k.cfg.After)
		case unknown != nil:
			log.Error(unknown, "The API does not answer, and when this node last had one is not known: no pods are started without it")
		case k.cfg.MaxAge > 0 && time.Since(last) > k.cfg.MaxAge:
			log.Info("The API does not answer, and this node's records are too old to start pods from", "lastAPI", last, "limit", k.cfg.MaxAge)
		default:
			started = k.isolate(ctx, agent, last)
		}
	}
	return started
}

// listed ends what was without the API.
func (k *Keeper) listed(ctx context.Context, started []*v1.Pod) {
	log := klog.FromContext(ctx)
	if started != nil {
		log.Info("The API answers again: the pods that were started without it are confirmed, or end", "pods", len(started))
	}
	if err := k.cfg.Store.MarkUnconfirmed(time.Time{}, nil); err != nil {
		log.Error(err, "Pods are still noted as unconfirmed")
	}
	k.pods, k.cluster = nil, nil
	uids, err := k.cfg.Store.UIDs()
	if err != nil {
		log.Error(err, "Records of deleted pods stay")
	}
	for _, uid := range uids { // of pods that are no more
		k.PodChanged(uid)
	}
	k.wake()
}

// isolate starts what may be started; it returns nil if the API has listed the pods.
func (k *Keeper) isolate(ctx context.Context, agent Agent, last time.Time) []*v1.Pod {
	log := klog.FromContext(ctx)
	ok, err := k.cfg.Gate.Isolate(k.pods, k.cluster)
	if err != nil {
		log.Error(err, "Pods are not started without the API")
	}
	if !ok {
		return nil
	}
	start := []*v1.Pod{}
	var uids []types.UID
	for _, p := range k.pods {
		if err := p.Startable(k.cfg.NodeName); err != nil {
			log.Info("A pod is not started without the API", "pod", klog.KObj(p.Pod), "reason", err.Error())
			continue
		}
		start, uids = append(start, p.Pod), append(uids, p.Pod.UID)
	}
	log.Error(nil, "The API does not answer: this node's last pods are started from their records, unconfirmed", "after", k.cfg.After, "lastAPI", last, "pods", len(start), "heldBack", len(k.pods)-len(start))
	if err := k.cfg.Store.MarkUnconfirmed(time.Now(), uids); err != nil {
		log.Error(err, "Pods cannot be noted as unconfirmed")
	}
	var node *v1.Node
	if k.cluster != nil {
		node = k.cluster.Node
	}
	agent.Start(start, node)
	return start
}

// Times of keep, and its size.
const (
	batch        = time.Second      // changes are gathered for
	readAgain    = 5 * time.Second  // when something had not been read yet
	writeAgain   = 30 * time.Second // when the disk refused
	clusterEvery = time.Minute      // the cluster's record is written at most
	urgentEvery  = 10 * time.Second // the same, when a policy has changed
	contactEvery = 10 * time.Minute // it is noted that the node has an API
	roundSize    = 8                // records are written until the next look at what is to be removed
)

// keep writes what changes. Until the API has listed the node's pods that is of pods alone
// that run here: what the node knows of the rest is of the records themselves.
func (k *Keeper) keep(ctx context.Context, agent Agent, started []*v1.Pod) {
	var clusterAt time.Time // the last look at it
	var again <-chan time.Time
	var failed string // as last logged
	pending := agent.Listed()
	contacts := time.NewTicker(contactEvery)
	defer contacts.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-pending:
			pending = nil
			k.listed(ctx, started)
			k.contact(ctx, time.Now())
			continue
		case <-contacts.C:
			if at := k.cfg.Gate.Answered(); pending == nil && !at.IsZero() {
				k.contact(ctx, at)
			}
			continue
		case <-k.poke:
		case <-again:
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(batch):
		}
		wait := time.Duration(0)
		sooner := func(d time.Duration) {
			if wait == 0 || d < wait {
				wait = d
			}
		}
		var fault error
		for more := true; more && ctx.Err() == nil; {
			var in time.Duration
			var err error
			if more, in, err = k.keepPods(agent, pending == nil); in > 0 {
				sooner(in)
			}
			if err != nil {
				fault, more = err, false
			}
		}
		k.mu.Lock()
		every := clusterEvery
		if k.urgent {
			every = urgentEvery
		}
		due := pending == nil && k.changed && time.Since(clusterAt) >= every
		if due {
			k.changed, k.urgent = false, false
		}
		left := pending == nil && k.changed
		k.mu.Unlock()
		if due {
			clusterAt = time.Now()
			if complete, err := k.keepCluster(agent); err != nil || !complete {
				if fault == nil {
					fault = err
				}
				k.mu.Lock()
				k.changed = true
				k.mu.Unlock()
				every, clusterAt = clusterEvery, clusterAt.Add(readAgain-clusterEvery)
				left = true
			}
		}
		if left {
			sooner(max(time.Until(clusterAt.Add(every)), batch))
		}
		if again = nil; wait > 0 {
			again = time.After(wait)
		}
		if fault != nil && fault.Error() != failed {
			klog.FromContext(ctx).Error(fault, "What this node needs to start its pods without the API is not on disk, will retry")
		}
		failed = ""
		if fault != nil {
			failed = fault.Error()
		}
	}
}

func (k *Keeper) contact(ctx context.Context, at time.Time) {
	if err := k.cfg.Store.PutContact(at); err != nil {
		klog.FromContext(ctx).Error(err, "That the API answers cannot be noted on disk, will retry", "in", contactEvery)
	}
}

// keepPods looks at the pods that have changed: it removes all records that are past, which
// must not wait, and then writes roundSize at most. more: others are left; in: when some are
// to be looked at again, 0: not.
func (k *Keeper) keepPods(agent Agent, listed bool) (more bool, in time.Duration, err error) {
	k.mu.Lock()
	dirty := k.dirty
	k.dirty = map[types.UID]bool{}
	k.mu.Unlock()
	var gone []types.UID
	var write []*Pod
	for uid := range dirty {
		record, complete := agent.Record(uid)
		switch {
		case !complete:
			k.put(uid)
			in = readAgain
		case record != nil:
			write = append(write, record)
		case listed || agent.Works(uid): // else it may have to be started yet
			gone = append(gone, uid)
		}
	}
	if err = k.cfg.Store.RemovePods(gone...); err != nil {
		k.put(gone...)
		in = writeAgain
	} else {
		for _, uid := range gone {
			if !agent.Works(uid) {
				agent.Forget(uid)
				k.mu.Lock()
				delete(k.over, uid)
				k.mu.Unlock()
			}
		}
	}
	for i, p := range write {
		if i == roundSize {
			for _, p := range write[i:] {
				k.put(p.Pod.UID)
			}
			return true, in, err
		}
		if e := k.keepPod(p); e != nil {
			k.put(p.Pod.UID)
			in, err = writeAgain, e
		}
	}
	return false, in, err
}

// put has pods looked at again, without a poke.
func (k *Keeper) put(uids ...types.UID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, uid := range uids {
		k.dirty[uid] = true
	}
}

func (k *Keeper) keepPod(p *Pod) error {
	if err := k.cfg.Store.PutPod(p); err != nil {
		return err
	}
	k.mu.Lock()
	over := k.over[p.Pod.UID]
	k.mu.Unlock()
	if over { // by now
		return k.cfg.Store.RemovePods(p.Pod.UID)
	}
	return nil
}

// Ended removes the record of a pod that has ended for good, before the API hears of it: who
// has read there that the pod ended does not see it run again.
func (k *Keeper) Ended(uid types.UID) error {
	k.mu.Lock()
	k.over[uid] = true
	k.mu.Unlock()
	return k.cfg.Store.RemovePods(uid)
}

func (k *Keeper) keepCluster(agent Agent) (complete bool, err error) {
	c := &Cluster{Node: bare(agent.Node()).(*v1.Node), Lists: map[string][]json.RawMessage{}}
	if c.Node.UID == "" {
		return false, nil // not registered yet
	}
	// What a policy selects has to be known for it to be in force.
	policies := slices.ContainsFunc(k.followed, func(f followed) bool { return f.kind == "NetworkPolicy" && len(f.informer.GetStore().ListKeys()) > 0 })
	for _, f := range k.followed {
		if !f.informer.HasSynced() {
			if f.optional && !(policies && (f.kind == "Pod" || f.kind == "Namespace")) {
				continue
			}
			return false, nil
		}
		objects := f.informer.GetStore().List()
		slices.SortFunc(objects, func(a, b any) int {
			x, y := a.(metav1.Object), b.(metav1.Object)
			return cmp.Or(cmp.Compare(x.GetNamespace(), y.GetNamespace()), cmp.Compare(x.GetName(), y.GetName()))
		})
		list := make([]json.RawMessage, 0, len(objects))
		for _, o := range objects {
			e, err := encode(bare(o.(runtime.Object)))
			if err != nil {
				return true, err
			}
			list = append(list, e.Object)
		}
		c.Lists[f.kind] = list
	}
	return true, k.cfg.Store.PutCluster(c)
}

// bare is a copy of an object without what changes all the time and matters to nobody here, so that
// its record is not written for that. It is of no version of the API's: what is written of it
// conflicts with what others have written since. Without a version it would overwrite that.
func bare(obj runtime.Object) runtime.Object {
	obj = obj.DeepCopyObject()
	if o, ok := obj.(metav1.Object); ok {
		o.SetResourceVersion(replayedVersion)
		o.SetGeneration(0)
		o.SetManagedFields(nil)
	}
	if o, ok := obj.(*v1.Node); ok {
		for i := range o.Status.Conditions {
			o.Status.Conditions[i].LastHeartbeatTime = metav1.Time{}
		}
	}
	return obj
}
