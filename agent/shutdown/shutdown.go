// Package shutdown ends a node's pods in their order before the machine goes down
// (KEP-2000, KEP-2712). systemd's logind tells of it, and waits as long as the node
// holds a lock, but no longer than it is configured to. Without D-Bus, or without
// logind, the package says so once and does nothing.
package shutdown

import (
	"context"
	"fmt"
	"math"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/klog/v2"
)

// Pods are the node's: *pod.Manager. Methods may be called concurrently, and do not
// block.
type Pods interface {
	// SetShutdown says whether new pods are refused.
	SetShutdown(on bool)
	// Active are the pods that have not ended.
	Active() []*v1.Pod
	// Terminate ends a pod within its own grace period and most; left is closed when
	// nothing of it is left.
	Terminate(uid types.UID, most time.Duration) (left <-chan struct{})
	// Seen is closed when all pods of the node are known.
	Seen() <-chan struct{}
}

// Config of a Guard.
type Config struct {
	// Periods are how long pods have to end, by their priority; required.
	Periods []Period
	Pods    Pods // required
	// Member is this machine's membership, which it gives up when it is shut down and
	// not rebooted, after its pods were evicted; nil: it stays a member.
	Member Member
	// Bus is the address of D-Bus; default: the system's.
	Bus string
	// DropInDir is where logind reads its configuration; default DropInDir.
	DropInDir string
	// Changed is called when a shutdown begins or was cancelled: what is to be told of
	// it. It must not block. Optional.
	Changed func(message string)
}

// Guard waits for shutdowns of one machine.
//
//	        ┌──────────── cancelled ◀───────────┐
//	        ▼                                   │
//	lock is held ── PrepareForShutdown ──▶ pods end, group by group ──▶ lock is released
//
// A machine that is shut down for good, and has a Member, evicts its pods before they
// are ended, and leaves the cluster after that.
type Guard struct {
	cfg  Config
	down atomic.Bool

	// Of Run.
	limit  time.Duration // that logind waits; 0: not known
	lock   *os.File      // nil: none is held
	stop   context.CancelFunc
	ending bool           // pods are being ended, or were; stop and work are theirs
	work   sync.WaitGroup // what ends them
	said   string         // the last fault in the log
}

// New returns a Guard; it starts nothing.
func New(cfg Config) *Guard {
	if cfg.DropInDir == "" {
		cfg.DropInDir = DropInDir
	}
	cfg.Periods = slices.Clone(cfg.Periods)
	sortPeriods(cfg.Periods)
	return &Guard{cfg: cfg}
}

// Down reports whether the machine is about to go down.
func (g *Guard) Down() bool { return g.down.Load() }

// Run waits for shutdowns until ctx ends.
func (g *Guard) Run(ctx context.Context) error {
	defer g.release()
	defer g.abandon()
	const first, most = time.Second, time.Minute
	fresh := wait.Backoff{Duration: first, Factor: 2, Steps: math.MaxInt, Cap: most}
	pause := fresh
	for {
		begun := time.Now()
		err := g.follow(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if why := err.Error(); why != g.said {
			g.said = why
			klog.FromContext(ctx).Error(err, "Shutdowns of this machine are not held up: pods get no time of their own to end then; will retry")
		}
		if time.Since(begun) > most {
			pause = fresh
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause.Step()):
		}
	}
}

// follow serves one connection to logind, and says why it ended.
func (g *Guard) follow(ctx context.Context) error {
	l, err := dial(ctx, g.cfg.Bus)
	if err != nil {
		return err
	}
	defer l.close()
	want := g.total()
	limit, err := l.raise(ctx, g.cfg.DropInDir, want)
	if limit == 0 {
		return err
	}
	if g.limit = limit; limit < want {
		klog.FromContext(ctx).Error(err, "Pods have less time to end at a shutdown than is configured: set InhibitDelayMaxSec in /etc/systemd/logind.conf", "configured", want, "logind", limit)
	}
	if err := l.know(ctx); err != nil {
		return err
	}
	on, err := l.preparing(ctx)
	if err != nil {
		return err
	}
	// A lock of before may be one that a new logind knows nothing of.
	before := g.lock
	g.lock = nil
	err = g.take(ctx, l, on)
	if before != nil {
		before.Close()
	}
	for err == nil {
		if on, err = l.next(ctx); err == nil {
			err = g.take(ctx, l, on)
		}
	}
	return err
}

// take makes it so that the machine goes down, or does not.
func (g *Guard) take(ctx context.Context, l *logind, down bool) (err error) {
	if down {
		if !g.ending {
			g.begin(ctx, l.kind)
		}
		return nil
	}
	if g.ending {
		g.cancelled(ctx)
	}
	if g.lock != nil {
		return nil
	}
	if g.lock, err = l.inhibit(ctx); err != nil {
		return err
	}
	g.said = ""
	klog.FromContext(ctx).Info("Shutdowns of this machine wait until its pods have ended", "most", min(g.total(), g.limit))
	return nil
}

// begin begins to end the pods; the lock is released when they have ended. kind is the
// type of the shutdown, empty if it is not known.
func (g *Guard) begin(ctx context.Context, kind string) {
	klog.FromContext(ctx).Info("The machine is about to go down, its pods are ended", "type", kind)
	work, stop := context.WithCancel(ctx)
	lock, limit := g.lock, g.limit
	g.lock, g.stop, g.ending = nil, stop, true
	started.SetToCurrentTime()
	ended.Set(0)
	g.work.Go(func() {
		if lock != nil {
			defer lock.Close()
		}
		g.shutDown(work, kind, limit)
		if work.Err() == nil {
			ended.SetToCurrentTime()
		}
		klog.FromContext(ctx).Info("Pods have been ended, the machine may go down", "whole", work.Err() == nil)
	})
}

// shutDown ends the pods within limit, and leaves the cluster if that is wanted.
func (g *Guard) shutDown(ctx context.Context, kind string, limit time.Duration) {
	const event = "Shutdown manager detected shutdown event"
	start := time.Now()
	if g.cfg.Member == nil || !g.leaves(ctx, kind, limit) {
		g.set(true, event)
		if g.cfg.Member != nil {
			limit -= time.Since(start)
		}
		g.end(ctx, fit(g.cfg.Periods, limit))
		return
	}
	until := start.Add(limit - leaveTime)
	undo := g.cordon(ctx)
	if periods := fit(g.cfg.Periods, time.Until(until)); len(periods) > 0 {
		g.drain(ctx, total(periods)-periods[len(periods)-1].Grace)
	}
	g.set(true, event)
	whole := g.end(ctx, fit(g.cfg.Periods, time.Until(until)))
	if !whole && ctx.Err() == nil {
		klog.FromContext(ctx).Error(nil, "The machine is shut down and stays a member of the cluster, as not all of its pods have ended: clusterctl members rm takes it out")
	}
	if !whole || ctx.Err() != nil || !g.leave(ctx) {
		undo()
	}
}

// cancelled takes the shutdown back. Pods that were asked to end do so.
func (g *Guard) cancelled(ctx context.Context) {
	klog.FromContext(ctx).Info("The machine does not go down after all")
	g.abandon()
	g.set(false, "Shutdown manager detected shutdown cancellation")
}

// abandon gives up waiting for pods.
func (g *Guard) abandon() {
	if g.ending {
		g.stop()
		g.work.Wait()
		g.ending = false
	}
}

func (g *Guard) release() {
	if g.lock != nil {
		g.lock.Close()
		g.lock = nil
	}
}

func (g *Guard) set(down bool, message string) {
	g.down.Store(down)
	g.cfg.Pods.SetShutdown(down)
	if g.cfg.Changed != nil {
		g.cfg.Changed(message)
	}
}

// end ends the pods, those of the lowest priority first. What a group does not need of
// its time is not waited for. It reports whether all have ended.
func (g *Guard) end(ctx context.Context, periods []Period) (whole bool) {
	// An agent that has just started does not know its pods yet.
	known, cancel := context.WithTimeout(ctx, total(periods))
	defer cancel()
	select {
	case <-g.cfg.Pods.Seen():
		whole = true
	case <-known.Done():
	}
	for _, of := range groups(periods, g.cfg.Pods.Active()) {
		if len(of.pods) > 0 && ctx.Err() == nil && !g.endGroup(ctx, of) {
			whole = false
		}
	}
	return whole
}

// endGroup ends the pods of one group, and waits for them for its time. It reports
// whether all have ended.
func (g *Guard) endGroup(ctx context.Context, of group) bool {
	log := klog.FromContext(ctx).WithValues("priority", of.Priority)
	log.Info("Pods are ended for the shutdown", "pods", len(of.pods), "most", of.Grace)
	most := time.NewTimer(of.Grace)
	defer most.Stop()
	left := make([]<-chan struct{}, len(of.pods))
	for i, p := range of.pods {
		left[i] = g.cfg.Pods.Terminate(p.UID, of.Grace)
	}
	for i := range of.pods {
		select {
		case <-left[i]:
		case <-ctx.Done():
			return false
		case <-most.C:
			var more []string
			for j, p := range of.pods[i:] {
				select {
				case <-left[i+j]:
				default:
					more = append(more, fmt.Sprintf("%s/%s", p.Namespace, p.Name))
				}
			}
			log.Info("Pods have not ended within their time", "pods", more)
			return len(more) == 0
		}
	}
	return true
}
