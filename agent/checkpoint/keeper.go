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

// Config of a Keeper. All fields are required.
type Config struct {
	Store    *Store
	Gate     *Gate
	NodeName string
	// After is how long the API may take to answer before pods are started without it.
	After time.Duration
}

// Agent is what a Keeper works for. Its methods are called one at a time, and may
// take a while.
type Agent interface {
	// Record makes the record of a pod; nil: it is to have none. complete is false
	// while part of what it needs has not been read: then it is asked again.
	Record(uid types.UID) (record *Pod, complete bool)
	// Node is the node's own object as last known.
	Node() *v1.Node
	// Start starts pods as they are on record; node is the node's own object, nil: it
	// is not on record.
	Start(pods []*v1.Pod, node *v1.Node)
	// Listed is closed when the API's list of the node's pods has been taken.
	Listed() <-chan struct{}
	// Forget is called when a pod has no record any more.
	Forget(uid types.UID)
}

// Keeper writes the records, and has the pods started from them if the API does not
// answer.
type Keeper struct {
	cfg      Config
	pods     []*Pod // as loaded, until the API has listed the node's pods
	cluster  *Cluster
	followed []followed

	poke chan struct{} // capacity 1

	mu    sync.Mutex // guards all below
	dirty map[types.UID]bool
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
	k := &Keeper{cfg: cfg, poke: make(chan struct{}, 1), dirty: map[types.UID]bool{}}
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
	changed := func() {
		k.mu.Lock()
		k.changed = true
		k.urgent = k.urgent || kind == "NetworkPolicy"
		k.mu.Unlock()
		k.wake()
	}
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(any) { changed() }, DeleteFunc: func(any) { changed() }, UpdateFunc: func(_, _ any) { changed() },
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
// the records from its first list of the node's pods on, until ctx ends.
func (k *Keeper) Run(ctx context.Context, agent Agent) error {
	log := klog.FromContext(ctx)
	var started []*v1.Pod
	for !closed(k.cfg.Gate.Live()) && started == nil {
		after := time.NewTimer(k.cfg.After)
		select {
		case <-ctx.Done():
			after.Stop()
			return nil
		case <-k.cfg.Gate.Live():
			after.Stop()
		case <-after.C:
			if k.cfg.Gate.Refused() {
				log.Info("The API refuses this node: no pods are started without it")
				continue
			}
			if len(k.pods) == 0 && k.cluster == nil {
				log.Info("The API does not answer, and no pods of this node are on record", "after", k.cfg.After)
				continue
			}
			started = k.isolate(ctx, agent)
		}
	}
	select {
	case <-ctx.Done():
		return nil
	case <-agent.Listed():
	}
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
	k.keep(ctx, agent)
	return nil
}

// isolate starts what may be started; it returns nil if the API has answered.
func (k *Keeper) isolate(ctx context.Context, agent Agent) []*v1.Pod {
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
	log.Error(nil, "The API does not answer: this node's last pods are started from their records, unconfirmed", "after", k.cfg.After, "pods", len(start), "heldBack", len(k.pods)-len(start))
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

// Times of keep.
const (
	batch        = time.Second      // changes are gathered for
	readAgain    = 5 * time.Second  // when something had not been read yet
	writeAgain   = 30 * time.Second // when the disk refused
	clusterEvery = time.Minute      // the cluster's record is written at most; policies at once
)

// keep writes what changes.
func (k *Keeper) keep(ctx context.Context, agent Agent) {
	var clusterAt time.Time // the last look at it
	var again <-chan time.Time
	var failed string // as last logged
	for {
		select {
		case <-ctx.Done():
			return
		case <-k.poke:
		case <-again:
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(batch):
		}
		k.mu.Lock()
		dirty := k.dirty
		k.dirty = map[types.UID]bool{}
		due := k.changed && (k.urgent || time.Since(clusterAt) >= clusterEvery)
		if due {
			k.changed, k.urgent = false, false
		}
		left := k.changed
		k.mu.Unlock()
		wait := time.Duration(0)
		sooner := func(d time.Duration) {
			if wait == 0 || d < wait {
				wait = d
			}
		}
		var fault error
		for uid := range dirty {
			complete, err := k.keepPod(agent, uid)
			if err != nil {
				fault = err
				sooner(writeAgain)
			} else if !complete {
				sooner(readAgain)
			} else {
				continue
			}
			k.mu.Lock()
			k.dirty[uid] = true
			k.mu.Unlock()
		}
		if due {
			clusterAt = time.Now()
			if complete, err := k.keepCluster(agent); err != nil || !complete {
				if fault == nil {
					fault = err
				}
				k.mu.Lock()
				k.changed = true
				k.mu.Unlock()
				clusterAt = clusterAt.Add(readAgain - clusterEvery)
				left = true
			}
		}
		if left {
			sooner(max(time.Until(clusterAt.Add(clusterEvery)), batch))
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

func (k *Keeper) keepPod(agent Agent, uid types.UID) (complete bool, err error) {
	record, complete := agent.Record(uid)
	if !complete {
		return false, nil
	}
	if record == nil {
		err = k.cfg.Store.RemovePod(uid)
		agent.Forget(uid)
		return true, err
	}
	return true, k.cfg.Store.PutPod(record)
}

func (k *Keeper) keepCluster(agent Agent) (complete bool, err error) {
	c := &Cluster{Node: bare(agent.Node()).(*v1.Node), Lists: map[string][]json.RawMessage{}}
	if c.Node.UID == "" {
		return false, nil // not registered yet
	}
	for _, f := range k.followed {
		if !f.informer.HasSynced() {
			if f.optional {
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
			e, err := Encode(bare(o.(runtime.Object)))
			if err != nil {
				return true, err
			}
			list = append(list, e.Object)
		}
		c.Lists[f.kind] = list
	}
	return true, k.cfg.Store.PutCluster(c)
}

// bare is an object without what changes all the time and matters to nobody here.
func bare(obj runtime.Object) runtime.Object {
	switch o := obj.(type) {
	case *v1.Node:
		o = o.DeepCopy()
		o.ResourceVersion, o.ManagedFields = "", nil
		for i := range o.Status.Conditions {
			o.Status.Conditions[i].LastHeartbeatTime = metav1.Time{}
		}
		return o
	case *v1.Pod:
		out := *o
		out.ResourceVersion = ""
		return &out
	}
	return obj
}
