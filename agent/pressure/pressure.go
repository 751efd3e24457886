package pressure

import (
	"context"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/slack"
)

// Config of a Guard. Measure, Evict and Reclaim are called one at a time each; Changed
// while what was measured is locked; Candidates may be called for a disk and for
// memory at once.
type Config struct {
	Thresholds []Threshold
	// Period is how often the node is looked at; default 1 s.
	Period time.Duration
	// Transition is how long a condition stays after its cause has gone;
	// default 5 min.
	Transition time.Duration
	// Measure looks at the node. It is cheap: it runs every Period.
	Measure func() map[Signal]Level
	// Candidates lists the pods that run here and what they use, at least of
	// what the signal is about.
	Candidates func(ctx context.Context, of Signal) []Candidate
	// Evict begins to end a pod. hard: at once; else its own grace period
	// counts.
	Evict func(uid types.UID, message string, hard bool)
	// Reclaim frees disk space that no pod needs; nil: there is none.
	Reclaim func(ctx context.Context) error
	// Changed is called when the node's conditions have changed; may be nil.
	Changed func()
}

// Defaults are the hard thresholds of a node that is given none.
const Defaults = "memory.available<100Mi,nodefs.available<10%,nodefs.inodesFree<5%,imagefs.available<10%,pid.available<5%"

// evictionTimeout is how long an evicted pod may take to be gone before another is
// evicted.
const evictionTimeout = 30 * time.Second

// Guard watches over one node.
type Guard struct {
	cfg Config

	looking sync.Mutex // guards watcher
	watcher watcher

	evicting sync.Mutex // guards leaving and since
	leaving  types.UID  // who was evicted last
	since    time.Time

	mu    sync.Mutex // guards under
	under map[v1.NodeConditionType]bool
}

// New returns a Guard; it starts nothing.
func New(cfg Config) *Guard {
	if cfg.Period == 0 {
		cfg.Period = time.Second
	}
	if cfg.Transition == 0 {
		cfg.Transition = 5 * time.Minute
	}
	return &Guard{cfg: cfg, watcher: watcher{thresholds: cfg.Thresholds, transition: cfg.Transition}}
}

// Disk tells whether a signal is about disks, for which directories have to be
// measured.
func (s Signal) Disk() bool { return s.condition() == v1.NodeDiskPressure }

// Under tells whether the node is under a pressure.
func (g *Guard) Under(c v1.NodeConditionType) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.under[c]
}

// Run watches until ctx ends. Disks are relieved beside it: to measure directories and
// to remove images takes long, and memory does not wait.
func (g *Guard) Run(ctx context.Context) error {
	tick := slack.NewTicker(g.cfg.Period)
	defer tick.Stop()
	var disks sync.WaitGroup
	defer disks.Wait()
	var busy atomic.Bool // with disks
	for {
		crossed := g.look(time.Now())
		if first(crossed, Signal.Disk) != nil && busy.CompareAndSwap(false, true) {
			disks.Go(func() {
				defer busy.Store(false)
				g.relieveDisks(ctx)
			})
		}
		if c := first(crossed, func(s Signal) bool { return !s.Disk() }); c != nil {
			g.relieve(ctx, *c)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

func first(crossed []ThresholdMet, of func(Signal) bool) *ThresholdMet {
	if i := slices.IndexFunc(crossed, func(c ThresholdMet) bool { return of(c.Signal) }); i >= 0 {
		return &crossed[i]
	}
	return nil
}

// relieveDisks frees what no pod needs, and evicts a pod if that was not enough.
func (g *Guard) relieveDisks(ctx context.Context) {
	if g.cfg.Reclaim != nil {
		if err := g.cfg.Reclaim(ctx); err != nil {
			klog.FromContext(ctx).Error(err, "Disk space could not be reclaimed")
		}
	}
	if c := first(g.look(time.Now()), Signal.Disk); c != nil && ctx.Err() == nil {
		g.relieve(ctx, *c)
	}
}

// relieve evicts a pod because of c, unless the one that was evicted last is still
// on its way.
func (g *Guard) relieve(ctx context.Context, c ThresholdMet) {
	pods := g.cfg.Candidates(ctx, c.Signal)
	g.evicting.Lock()
	defer g.evicting.Unlock()
	there := slices.ContainsFunc(pods, func(c Candidate) bool { return c.Pod.UID == g.leaving })
	if there && time.Since(g.since) <= evictionTimeout {
		return
	}
	if uid := g.evict(ctx, c, pods, g.leaving); uid != "" {
		g.leaving, g.since = uid, time.Now()
	}
}

// look measures and notes the conditions.
func (g *Guard) look(now time.Time) []ThresholdMet {
	g.looking.Lock()
	defer g.looking.Unlock()
	under, crossed := g.watcher.observe(now, g.cfg.Measure())
	g.mu.Lock()
	changed := !maps.Equal(g.under, under)
	g.under = under
	g.mu.Unlock()
	if changed && g.cfg.Changed != nil {
		g.cfg.Changed()
	}
	return crossed
}

// evict ends the first pod in rank that may be ended, but for the one that is
// on its way.
func (g *Guard) evict(ctx context.Context, c ThresholdMet, pods []Candidate, leaving types.UID) types.UID {
	for _, p := range rank(c.Signal, pods) {
		if Critical(p.Pod) || p.Pod.UID == leaving {
			continue
		}
		klog.FromContext(ctx).Info("Pod is evicted", "namespace", p.Pod.Namespace, "pod", p.Pod.Name, "signal", c.Signal, "available", c.Available)
		used, requested := p.usage(c.Signal)
		g.cfg.Evict(p.Pod.UID, c.message()+useWords(c.Signal, used, requested), c.Grace == 0)
		return p.Pod.UID
	}
	klog.FromContext(ctx).Info("Node is under pressure and no pod can be evicted", "signal", c.Signal, "available", c.Available)
	return ""
}

// systemCritical is the priority from which on pods belong to the system.
const systemCritical = 2_000_000_000

// mirrorAnnotation marks the API's picture of a static pod.
const mirrorAnnotation = "kubernetes.io/config.mirror"

// Critical tells whether the node never evicts the pod: static ones, and those
// of the system's priority classes.
func Critical(pod *v1.Pod) bool {
	if _, ok := pod.Annotations[mirrorAnnotation]; ok {
		return true
	}
	if source := pod.Annotations["kubernetes.io/config.source"]; source != "" && source != "api" {
		return true
	}
	return pod.Spec.Priority != nil && *pod.Spec.Priority >= systemCritical
}

// Refuses says why a node under pressure does not take the pod, "": it does.
// Memory pressure keeps away those who asked for nothing, the others all but
// critical pods.
func Refuses(pod *v1.Pod, qos v1.PodQOSClass, under func(v1.NodeConditionType) bool) string {
	if Critical(pod) {
		return ""
	}
	for _, c := range []v1.NodeConditionType{v1.NodeDiskPressure, v1.NodePIDPressure} {
		if under(c) {
			return "The node had condition: [" + string(c) + "]. "
		}
	}
	if qos != v1.PodQOSBestEffort || !under(v1.NodeMemoryPressure) || tolerates(pod, v1.TaintNodeMemoryPressure) {
		return ""
	}
	return "The node had condition: [" + string(v1.NodeMemoryPressure) + "]. "
}

func tolerates(pod *v1.Pod, key string) bool {
	return slices.ContainsFunc(pod.Spec.Tolerations, func(t v1.Toleration) bool {
		return (t.Key == key || t.Key == "" && t.Operator == v1.TolerationOpExists) && (t.Effect == "" || t.Effect == v1.TaintEffectNoSchedule)
	})
}
