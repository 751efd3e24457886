// Package fence keeps a node's promise that pods whose volumes other nodes can
// use too do not run on when the node cannot renew its Lease: it tells podmon
// which pods these are and until when they may run. It ends nothing itself:
// podmon does, with this process alive or not.
//
// A renewal that succeeded counts from when it was begun, by CLOCK_BOOTTIME: the
// leader, which counts from when it has seen it, is later.
package fence

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

// Podmon holds the list of fenced pods and their deadline: *runtime.Client.
type Podmon interface {
	Fence(ctx context.Context, f api.Fence) (api.FenceStatus, error)
}

// Config of a Fence. All fields are required but Claims.
type Config struct {
	NodeName string
	Client   kubernetes.Interface
	Podmon   Podmon
	// Volume finds the volume that a pod's claim is bound to.
	Volume func(ctx context.Context, pod *v1.Pod, claim string) (*v1.PersistentVolume, error)
	// RenewDeadline is how long pods may run after a renewal was begun: well
	// below the Lease's duration.
	RenewDeadline time.Duration
	// Claims: pods with claims are fenced unless they say that they are not.
	// Else just those that say that they are.
	Claims bool
	// Dirs are the directories in which a pod's volumes are mounted.
	Dirs func(uid types.UID) []string
	// Fail ends a pod for good because it was fenced. It must not block, and may
	// be called for the same pod again, and of pods that are no more.
	Fail     func(uid types.UID)
	Recorder record.EventRecorder
	// Now is CLOCK_BOOTTIME in nanoseconds; default: the kernel's.
	Now func() int64
}

// Reason and Message are what is said of a pod that was fenced.
const (
	Reason  = "NodeFenced"
	Message = "The node could not renew its lease in time and has ended the pod: its volumes may be used on another node."
)

// Fence keeps the promise. Its methods may be called concurrently.
type Fence struct {
	cfg Config

	asking sync.Mutex // one request to podmon at a time: deadlines come in order; taken before mu

	mu       sync.Mutex // guards below
	loaded   bool       // podmon has answered
	deadline int64
	pods     map[string]api.FencedPodStatus
	moved    chan struct{} // closed when the deadline is moved
}

// New returns a Fence; it starts nothing.
func New(cfg Config) *Fence {
	if cfg.Now == nil {
		cfg.Now = BootTime
	}
	return &Fence{cfg: cfg, pods: map[string]api.FencedPodStatus{}, moved: make(chan struct{})}
}

// BootTime is CLOCK_BOOTTIME in nanoseconds: it goes on while the machine sleeps.
func BootTime() int64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		panic(err) // the kernel has had it since 2.6.39
	}
	return ts.Nano()
}

// ask makes one request of podmon and notes the answer.
func (f *Fence) ask(ctx context.Context, req api.Fence) error {
	f.asking.Lock()
	defer f.asking.Unlock()
	st, err := f.cfg.Podmon.Fence(ctx, req)
	if err != nil {
		return err
	}
	var failed []types.UID
	f.mu.Lock()
	if st.Deadline != f.deadline {
		close(f.moved)
		f.moved = make(chan struct{})
	}
	f.loaded, f.deadline = true, st.Deadline
	clear(f.pods)
	for _, p := range st.Pods {
		f.pods[p.UID] = p
		if p.Fenced {
			failed = append(failed, types.UID(p.UID))
		}
	}
	f.mu.Unlock()
	for _, uid := range failed {
		f.cfg.Fail(uid)
	}
	return nil
}

// load asks podmon unless it has answered before.
func (f *Fence) load(ctx context.Context) error {
	f.mu.Lock()
	loaded := f.loaded
	f.mu.Unlock()
	if loaded {
		return nil
	}
	return f.ask(ctx, api.Fence{})
}

// Guard puts a pod on podmon's list if it is one to be fenced, before anything of
// it is mounted or started. It waits until the node has its Lease.
func (f *Fence) Guard(ctx context.Context, pod *v1.Pod) (guarded bool, err error) {
	if err := f.load(ctx); err != nil {
		return false, err
	}
	uid := string(pod.UID)
	f.mu.Lock()
	known, ok := f.pods[uid]
	f.mu.Unlock()
	if ok {
		if known.Fenced {
			f.cfg.Fail(pod.UID)
			return true, errors.New(Message)
		}
		return true, nil
	}
	want := Guarded(pod) // it has been promised
	if !want {
		if want, err = f.wants(ctx, pod); err != nil || !want {
			return false, err
		}
	}
	for {
		f.mu.Lock()
		moved, held := f.moved, f.cfg.Now() < f.deadline
		f.mu.Unlock()
		if held {
			err := f.ask(ctx, api.Fence{Add: []api.FencedPod{{UID: uid, Dirs: f.cfg.Dirs(pod.UID)}}})
			if err == nil {
				return true, nil
			}
			if !api.IsCode(err, api.CodeFenced) { // else the deadline has passed just now
				return true, err
			}
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return true, fmt.Errorf("the node's lease is not renewed: %w", ctx.Err())
		}
	}
}

// wants looks at the pod and its volumes.
func (f *Fence) wants(ctx context.Context, pod *v1.Pod) (bool, error) {
	asked, wanted := wish(pod, f.cfg.Claims)
	if !wanted {
		return false, nil
	}
	for _, name := range claimsOf(pod) {
		v, err := f.cfg.Volume(ctx, pod, name)
		if err != nil {
			return false, err
		}
		if NodeBound(v) {
			if asked {
				f.cfg.Recorder.Eventf(pod, v1.EventTypeWarning, "NotSelfFencing", "Pod will not be self-fenced: PersistentVolume %q belongs to this node, and the pod cannot run elsewhere", v.Name)
			}
			return false, nil
		}
	}
	return true, nil
}

// Drop takes a pod off the list that has left the node.
func (f *Fence) Drop(ctx context.Context, uid types.UID) error {
	if err := f.load(ctx); err != nil {
		return ignoreUnknown(err)
	}
	f.mu.Lock()
	_, ok := f.pods[string(uid)]
	f.mu.Unlock()
	if !ok {
		return nil
	}
	return f.ask(ctx, api.Fence{Drop: []string{string(uid)}})
}

// Sweep takes all pods off the list but those that are on the node.
func (f *Fence) Sweep(ctx context.Context, here func(types.UID) bool) error {
	if err := f.load(ctx); err != nil {
		return ignoreUnknown(err)
	}
	var gone []string
	f.mu.Lock()
	for uid := range f.pods {
		if !here(types.UID(uid)) {
			gone = append(gone, uid)
		}
	}
	f.mu.Unlock()
	if len(gone) == 0 {
		return nil
	}
	return f.ask(ctx, api.Fence{Drop: gone})
}

// Now is the clock of deadlines, in nanoseconds.
func (f *Fence) Now() int64 { return f.cfg.Now() }

// renewTimeout is how long a renewal of the Lease waits for podmon: one that hangs
// must not make the node look dead.
const renewTimeout = 2 * time.Second

// Promises reports whether podmon is one that fences.
func (f *Fence) Promises(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, renewTimeout)
	defer cancel()
	err := f.load(ctx)
	if err != nil {
		klog.FromContext(ctx).Info("The node promises to fence no pods", "err", err)
	}
	return err == nil
}

// Held reports whether pods may run now: then no leader can have taken the Lease.
func (f *Fence) Held(ctx context.Context) bool {
	if f.load(ctx) != nil {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.cfg.Now() < f.deadline
}

// Renewed moves the deadline on: a renewal that was begun then has succeeded.
func (f *Fence) Renewed(ctx context.Context, began int64) {
	ctx, cancel := context.WithTimeout(ctx, renewTimeout)
	defer cancel()
	if err := f.ask(ctx, api.Fence{Deadline: began + int64(f.cfg.RenewDeadline)}); err != nil {
		klog.FromContext(ctx).Error(err, "extend the deadline of fenced pods")
	}
}

// End ends all pods on the list and waits for it.
func (f *Fence) End(ctx context.Context) error {
	const passed = 1 // nanosecond after the boot
	if err := f.ask(ctx, api.Fence{Deadline: passed}); err != nil {
		return ignoreUnknown(err)
	}
	for {
		left := 0
		f.mu.Lock()
		for _, p := range f.pods {
			if !p.Ended {
				left++
			}
		}
		f.mu.Unlock()
		if left == 0 {
			return nil
		}
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
			return fmt.Errorf("%d fenced pods have not ended yet: %w", left, ctx.Err())
		}
		if err := f.ask(ctx, api.Fence{}); err != nil {
			return err
		}
	}
}

// Settle says of every pod that may have been replaced that it has failed. The
// node has its Lease again, so no other is replaced; what is bound to it from
// now on is not touched.
func (f *Fence) Settle(ctx context.Context) error {
	pods, err := f.cfg.Client.CoreV1().Pods("").List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("spec.nodeName", f.cfg.NodeName).String(), // from the store, not from a cache
	})
	if err != nil {
		return fmt.Errorf("list the node's pods: %w", err)
	}
	failed := 0
	for i := range pods.Items {
		pod := &pods.Items[i]
		if !Guarded(pod) || pod.Status.Phase == v1.PodFailed || pod.Status.Phase == v1.PodSucceeded {
			continue
		}
		f.cfg.Fail(pod.UID)
		patch, err := json.Marshal(map[string]any{
			"metadata": map[string]any{"uid": pod.UID},
			"status":   map[string]any{"phase": v1.PodFailed, "reason": Reason, "message": Message},
		})
		if err != nil {
			return err
		}
		_, err = f.cfg.Client.CoreV1().Pods(pod.Namespace).Patch(ctx, pod.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) { // it is gone, or another has its name
			return fmt.Errorf("say that pod %s/%s has failed: %w", pod.Namespace, pod.Name, err)
		}
		failed++
	}
	if failed > 0 {
		node := &v1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: f.cfg.NodeName, UID: types.UID(f.cfg.NodeName)}
		f.cfg.Recorder.Eventf(node, v1.EventTypeWarning, Reason, "The node had lost its lease: %d pods whose volumes may be used elsewhere were ended", failed)
	}
	return nil
}

// ignoreUnknown: a podmon that knows nothing of fencing has fenced nothing.
func ignoreUnknown(err error) error {
	if api.IsCode(err, api.CodeInvalid) {
		return nil
	}
	return err
}
