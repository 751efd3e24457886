package pressure

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/slack"
)

// LocalPod is a pod that may take only so much of the node's disks. A limit of
// zero is none.
type LocalPod struct {
	UID             types.UID
	Namespace, Name string
	// Volumes are its emptyDirs on disk.
	Volumes []LocalVolume
	// Containers are the running ones.
	Containers []LocalContainer
	// Others are directories that count for the pod as a whole alone.
	Others []string
	// Limit is what all of it together may take.
	Limit resource.Quantity
}

// LocalVolume is a directory and what it may hold.
type LocalVolume struct {
	Name, Dir string
	Limit     resource.Quantity
}

// LocalContainer is a container, the directories of what it has written and of its
// logs, and what they may hold together.
type LocalContainer struct {
	Name  string
	Dirs  []string
	Limit resource.Quantity
}

// Limited reports whether anything of the pod has a limit: else it need not be
// measured.
func (p *LocalPod) Limited() bool {
	limited := !p.Limit.IsZero()
	for _, v := range p.Volumes {
		limited = limited || !v.Limit.IsZero()
	}
	for _, c := range p.Containers {
		limited = limited || !c.Limit.IsZero()
	}
	return limited
}

// over says why the pod has to go, "": it need not; in the order and words of
// Kubernetes. used measures directories, in bytes.
func (p *LocalPod) over(used func(dirs ...string) (int64, error)) (string, error) {
	var total int64
	exceeds := func(bytes int64, limit resource.Quantity) bool { return !limit.IsZero() && bytes > limit.Value() }
	for _, v := range p.Volumes {
		if v.Limit.IsZero() && p.Limit.IsZero() {
			continue
		}
		n, err := used(v.Dir)
		if err != nil {
			return "", err
		}
		if exceeds(n, v.Limit) {
			return fmt.Sprintf("Usage of EmptyDir volume %q exceeds the limit %q. ", v.Name, v.Limit.String()), nil
		}
		total += n
	}
	of := make([]int64, len(p.Containers))
	for i, c := range p.Containers {
		if c.Limit.IsZero() && p.Limit.IsZero() {
			continue
		}
		n, err := used(c.Dirs...)
		if err != nil {
			return "", err
		}
		of[i] = n
		total += n
	}
	if !p.Limit.IsZero() {
		n, err := used(p.Others...)
		if err != nil {
			return "", err
		}
		if exceeds(total+n, p.Limit) {
			return fmt.Sprintf("Pod ephemeral local storage usage exceeds the total limit of containers %s. ", p.Limit.String()), nil
		}
	}
	for i, c := range p.Containers {
		if exceeds(of[i], c.Limit) {
			return fmt.Sprintf("Container %s exceeded its local ephemeral storage limit %q. ", c.Name, c.Limit.String()), nil
		}
	}
	return "", nil
}

// LocalConfig is that of a LocalGuard.
type LocalConfig struct {
	// Period is how often a pod is measured; default 10 s. One whose directories
	// take long is measured less often: see restFactor.
	Period time.Duration
	// Pods lists the node's pods. It is called from Run alone.
	Pods func() []LocalPod
	// Use adds up what directories take of the disk, in bytes. It is called for
	// several pods at once, and may hang as long as it likes.
	Use func(ctx context.Context, dirs ...string) (int64, error)
	// Evict ends a pod that is over a limit. It must not block; the same pod may
	// be named again.
	Evict func(uid types.UID, message string)
}

const (
	// walks is how many pods are measured at a time.
	walks = 2
	// walkTimeout is how long a walk may keep others from theirs. One that
	// hangs in the kernel goes on alone: its pod alone is not measured.
	walkTimeout = 30 * time.Second
	// restFactor is how many times the length of its last walk a pod is left
	// alone: walking takes a twentieth of a processor per pod at most.
	restFactor = 20
)

// LocalGuard ends pods that take more of the node's disks than they may. There
// is no quota in the kernel behind it: directories are walked, those of pods with a
// limit alone, so that a pod may be over its limit for as long as a period.
type LocalGuard struct {
	cfg   LocalConfig
	turns chan struct{} // a token per walk under way that others wait for

	mu      sync.Mutex // guards all below
	walking map[types.UID]bool
	next    map[types.UID]time.Time // not to be measured before
}

// NewLocal returns a LocalGuard; it starts nothing.
func NewLocal(cfg LocalConfig) *LocalGuard {
	if cfg.Period == 0 {
		cfg.Period = 10 * time.Second
	}
	return &LocalGuard{cfg: cfg, turns: make(chan struct{}, walks), walking: map[types.UID]bool{}, next: map[types.UID]time.Time{}}
}

// Run measures until ctx ends. It does not wait for a walk that hangs.
func (g *LocalGuard) Run(ctx context.Context) error {
	tick := slack.NewTicker(g.cfg.Period)
	defer tick.Stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		for _, p := range g.due(time.Now()) {
			wg.Go(func() { g.measure(ctx, p) })
		}
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
	}
}

// due takes the pods whose time has come, and forgets those that are no more.
func (g *LocalGuard) due(now time.Time) []LocalPod {
	g.mu.Lock()
	defer g.mu.Unlock()
	var out []LocalPod
	here := map[types.UID]bool{}
	for _, p := range g.cfg.Pods() {
		if !p.Limited() {
			continue
		}
		here[p.UID] = true
		if !g.walking[p.UID] && !now.Before(g.next[p.UID]) {
			g.walking[p.UID] = true
			out = append(out, p)
		}
	}
	for uid := range g.next {
		if !here[uid] {
			delete(g.next, uid)
		}
	}
	return out
}

// measure waits for a turn and walks the pod's directories. It returns when that is
// done, or has taken so long that others must not wait for it.
func (g *LocalGuard) measure(ctx context.Context, p LocalPod) {
	select {
	case g.turns <- struct{}{}:
	case <-ctx.Done():
		g.done(p.UID, 0)
		return
	}
	defer func() { <-g.turns }()
	done := make(chan struct{})
	go func() { // outlives this call when it hangs: nothing can end it
		defer close(done)
		began := time.Now()
		g.judge(ctx, p)
		g.done(p.UID, time.Since(began))
	}()
	timer := time.NewTimer(walkTimeout)
	defer timer.Stop()
	select {
	case <-done:
	case <-ctx.Done():
	case <-timer.C:
		klog.FromContext(ctx).Info("Folders of a pod take long to measure", "namespace", p.Namespace, "pod", p.Name, "limit", walkTimeout)
	}
}

func (g *LocalGuard) judge(ctx context.Context, p LocalPod) {
	message, err := p.over(func(dirs ...string) (int64, error) { return g.cfg.Use(ctx, dirs...) })
	switch {
	case ctx.Err() != nil:
	case err != nil:
		klog.FromContext(ctx).Error(err, "Disk use of a pod is not known", "namespace", p.Namespace, "pod", p.Name)
	case message != "":
		klog.FromContext(ctx).Info("Pod is evicted", "namespace", p.Namespace, "pod", p.Name, "why", message)
		g.cfg.Evict(p.UID, message)
	}
}

func (g *LocalGuard) done(uid types.UID, took time.Duration) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.walking, uid)
	g.next[uid] = time.Now().Add(took * restFactor)
}
