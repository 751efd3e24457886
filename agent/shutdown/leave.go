package shutdown

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
)

// Member is this machine as a member of its cluster, which it leaves when it is shut
// down for good. Methods end with ctx.
type Member interface {
	// MayLeave returns why the cluster cannot do without it; nil: it can.
	MayLeave(ctx context.Context) error
	// Leave takes it out of the cluster.
	Leave(ctx context.Context) error
	// Cordon keeps new pods away from it, or no longer. It reports whether that is new.
	Cordon(ctx context.Context, on bool) (changed bool, err error)
	// Evict asks for the eviction of one of its pods.
	Evict(ctx context.Context, pod *v1.Pod) error
}

const (
	// leaveTime is how long MayLeave, and Leave, may take.
	leaveTime  = 10 * time.Second
	cordonTime = 5 * time.Second
	// evictAgain is how long after an eviction that a budget forbids the next is tried.
	evictAgain = time.Second
	// lookAgain is how often is looked whether an evicted pod has left.
	lookAgain = 200 * time.Millisecond
)

// forGood reports whether a machine does not come back by itself after a shutdown of
// that type, as logind calls them. known: it is one of those that a Guard knows.
func forGood(kind string) (good, known bool) {
	switch kind {
	case "poweroff", "halt":
		return true, true
	case "reboot", "kexec", "soft-reboot", "factory-reset":
		return false, true
	}
	return false, false
}

// total is how long a shutdown may take altogether.
func (g *Guard) total() time.Duration {
	sum := total(g.cfg.Periods)
	if g.cfg.Member != nil {
		sum += 2 * leaveTime
	}
	return sum
}

// leaves reports whether the machine leaves the cluster at this shutdown.
// logind waits for limit.
func (g *Guard) leaves(ctx context.Context, kind string, limit time.Duration) bool {
	if g.cfg.Member == nil {
		return false
	}
	log := klog.FromContext(ctx)
	good, known := forGood(kind)
	switch {
	case !known:
		log.Error(nil, "The machine stays a member of the cluster: logind does not report whether it is shut down or rebooted, which systemd 255 and later do; if it is shut down for good: clusterctl members rm", "type", kind)
		return false
	case !good:
		log.Info("The machine stays a member of the cluster: it is rebooted", "type", kind)
		return false
	case limit < g.total():
		log.Error(nil, "The machine is shut down and stays a member of the cluster: logind does not wait until it could have left: set InhibitDelayMaxSec in /etc/systemd/logind.conf", "needed", g.total(), "logind", limit)
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, leaveTime)
	defer cancel()
	if err := g.cfg.Member.MayLeave(ctx); err != nil {
		log.Error(err, "The machine is shut down and stays a member of the cluster, which cannot do without it or did not answer")
		return false
	}
	return true
}

// leave takes the machine out of the cluster.
func (g *Guard) leave(ctx context.Context) (left bool) {
	most, cancel := context.WithTimeout(ctx, leaveTime)
	defer cancel()
	switch err := g.cfg.Member.Leave(most); {
	case ctx.Err() != nil: // the process ends, as that of a removed member does
		return err == nil
	case err != nil:
		klog.FromContext(ctx).Error(err, "The machine is shut down and may still be a member of the cluster: see clusterctl members; clusterctl members rm takes it out")
		return false
	}
	return true
}

// cordon keeps new pods away. The node is ready meanwhile, so that its pods count as
// healthy until they are evicted. undo takes it back.
func (g *Guard) cordon(ctx context.Context) (undo func()) {
	log := klog.FromContext(ctx)
	set := func(ctx context.Context, on bool) bool {
		ctx, cancel := context.WithTimeout(ctx, cordonTime)
		defer cancel()
		changed, err := g.cfg.Member.Cordon(ctx, on)
		if err != nil {
			log.Error(err, "Whether the scheduler may place pods on this node was not changed", "unschedulable", on)
		}
		return changed
	}
	if !set(ctx, true) {
		return func() {}
	}
	return func() { set(context.WithoutCancel(ctx), false) }
}

// drain evicts the pods that can run elsewhere, and waits for at most that time until
// they have left. Disruption budgets hold meanwhile; what is left is ended afterwards.
func (g *Guard) drain(ctx context.Context, most time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	select {
	case <-g.cfg.Pods.Seen():
	case <-ctx.Done():
	}
	var work sync.WaitGroup
	for _, p := range g.cfg.Pods.Active() {
		if movable(p) {
			work.Go(func() { g.evict(ctx, p) })
		}
	}
	work.Wait()
}

// movable reports whether a pod can run elsewhere: static ones, and those of a
// DaemonSet, cannot.
func movable(p *v1.Pod) bool {
	if source := p.Annotations["kubernetes.io/config.source"]; source != "" && source != "api" {
		return false
	}
	owner := metav1.GetControllerOf(p)
	return owner == nil || owner.Kind != "DaemonSet"
}

// evict evicts one pod, and waits until it has left.
func (g *Guard) evict(ctx context.Context, p *v1.Pod) {
	log := klog.FromContext(ctx).WithValues("pod", fmt.Sprintf("%s/%s", p.Namespace, p.Name))
	var last error
	err := wait.PollUntilContextCancel(ctx, evictAgain, true, func(ctx context.Context) (bool, error) {
		last = g.cfg.Member.Evict(ctx, p)
		switch {
		case last == nil || apierrors.IsNotFound(last):
			return true, nil
		case apierrors.IsForbidden(last) || apierrors.IsInvalid(last):
			return false, last
		}
		return false, nil // a budget, or a server that does not answer: tried again
	})
	if err != nil {
		log.Info("A pod was not evicted and is ended with the machine", "err", cmp.Or(last, err))
		return
	}
	err = wait.PollUntilContextCancel(ctx, lookAgain, true, func(context.Context) (bool, error) {
		return !slices.ContainsFunc(g.cfg.Pods.Active(), func(o *v1.Pod) bool { return o.UID == p.UID }), nil
	})
	if err != nil {
		log.Info("An evicted pod has not ended within its time and is ended with the machine")
	}
}
