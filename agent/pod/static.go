package pod

import (
	"context"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/agent/static"
	"github.com/clusterd/clusterd/apis/core"
)

// Static pods are the node's own: they are run whether there is an API or
// not. In the API each is shown by a *mirror pod* of its name, which this
// agent makes, keeps true and removes. The mirror commands nothing: deleting
// it only brings another one.

// StaticSource reads static pods: *static.Reader.
type StaticSource interface {
	// Run calls set, from one goroutine, with the whole set of pods whenever
	// it changed, until ctx ends; complete is false while more are to come
	// from a place that was not read yet.
	Run(ctx context.Context, set func(pods []*v1.Pod, complete bool)) error
}

// fullName is what a pod shares with its mirror.
func fullName(pod *v1.Pod) string { return pod.Namespace + "/" + pod.Name }

// setStatic takes the whole set of static pods.
func (m *Manager) setStatic(pods []*v1.Pod, complete bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ctx.Err() != nil {
		return
	}
	want := map[types.UID]*v1.Pod{}
	for _, p := range pods {
		want[p.UID] = p
	}
	for uid := range m.static {
		if want[uid] != nil {
			continue
		}
		if w := m.workers[uid]; w != nil {
			w.send(w.endStatic)
		}
	}
	m.static = want
	for _, p := range pods { // in the order of their names
		m.startStatic(p)
	}
	if complete && !m.staticSeen {
		m.staticSeen = true
		close(m.staticRead)
	}
}

// startStatic starts a static pod, unless it runs or another version of it is
// still ending. The caller holds mu.
func (m *Manager) startStatic(pod *v1.Pod) {
	for _, w := range m.workers {
		if w.static && fullName(w.pod) == fullName(pod) {
			return // afterStatic comes when it has ended
		}
	}
	w := m.begin(m.asEnded(pod), true)
	w.mirror.pod = m.mirrors[fullName(pod)]
	m.launch(w)
}

// wantsStatic is the static pod that is to have the name, nil: none is. The
// caller holds mu.
func (m *Manager) wantsStatic(name string) *v1.Pod {
	for _, p := range m.static {
		if fullName(p) == name {
			return p
		}
	}
	return nil
}

// afterStatic follows the end of a static pod: another version of it starts,
// or its mirror goes. The caller holds mu.
func (m *Manager) afterStatic(name string) {
	if p := m.wantsStatic(name); p != nil {
		m.startStatic(p)
	} else {
		m.dropMirror(name)
	}
}

// shows reports whether the API's pod only shows a static one. One that a worker runs
// does not, whatever its annotations say by now.
func (m *Manager) shows(pod *v1.Pod) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return core.IsMirror(pod) && m.workers[pod.UID] == nil
}

// setMirror takes a mirror pod of the watch; gone: the API has it no more.
func (m *Manager) setMirror(pod *v1.Pod, gone bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	name := fullName(pod)
	if gone {
		if have := m.mirrors[name]; have != nil && have.UID == pod.UID {
			delete(m.mirrors, name)
		}
	} else {
		m.mirrors[name] = pod
	}
	now := m.mirrors[name]
	for _, w := range m.workers {
		if w.static && fullName(w.pod) == name {
			w.send(func() { w.setMirror(now) })
			return
		}
	}
	if !gone && m.synced {
		m.dropMirror(name)
	}
}

// dropMirror deletes the mirror pod of that name, unless a static pod has the
// name; it tries until the API says that it is gone. The caller holds mu.
func (m *Manager) dropMirror(name string) {
	if m.mirrors[name] == nil || m.wantsStatic(name) != nil {
		return
	}
	ctx := m.ctx
	m.wg.Go(func() {
		for delay := time.Duration(0); ; {
			m.mu.Lock()
			pod := m.mirrors[name]
			wanted := m.wantsStatic(name) != nil
			m.mu.Unlock()
			if pod == nil || wanted {
				return
			}
			try, cancel := context.WithTimeout(ctx, apiDeadline)
			err := m.deleteMirror(try, pod)
			cancel()
			if err == nil {
				return
			}
			delay = podstate.QuickBackOff(delay)
			klog.FromContext(ctx).Info("Mirror of a deleted static pod was not deleted, will retry", "pod", name, "err", err, "after", delay)
			select {
			case <-time.After(delay):
			case <-ctx.Done():
				return
			}
		}
	})
}

func (m *Manager) deleteMirror(ctx context.Context, pod *v1.Pod) error {
	err := m.cfg.Client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
		GracePeriodSeconds: ptr.To(int64(0)), Preconditions: &metav1.Preconditions{UID: &pod.UID},
	})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil // it is gone, or another has its name
	}
	return err
}

// mirrorState is a static pod's worker's account of its mirror.
type mirrorState struct {
	pod     *v1.Pod // as the API has it; nil: it has none
	busy    bool
	retryAt time.Time
	delay   time.Duration
	fault   string // as last reported
}

// setMirror takes the newest version of the mirror, nil: there is none.
func (w *worker) setMirror(pod *v1.Pod) {
	if have := w.mirror.pod; pod != nil && have != nil && have.UID == pod.UID && !newer(pod, have) {
		return
	}
	w.mirror.pod = pod
}

// endStatic is the disappearance of a static pod from its source: it ends with
// the grace its spec asks for.
func (w *worker) endStatic() {
	pod := *w.pod
	now := metav1.Now()
	grace := int64(defaultGrace)
	if g := pod.Spec.TerminationGracePeriodSeconds; g != nil {
		grace = *g
	}
	pod.DeletionTimestamp, pod.DeletionGracePeriodSeconds = &now, &grace
	w.pod = &pod
}

// reflect keeps the mirror: there is one, it is of this version of the pod,
// it is not being deleted, and it has the status. It returns when it wants to be
// called again.
func (w *worker) reflect(st *v1.PodStatus, now time.Time) (wake time.Time) {
	client := w.m.cfg.Client
	if client == nil || w.mirror.busy || w.obs.TornDown && w.pod.DeletionTimestamp != nil {
		return wake
	}
	if w.mirror.retryAt.After(now) {
		return w.mirror.retryAt
	}
	have := w.mirror.pod
	ns := w.pod.Namespace
	switch {
	case have == nil && w.pod.DeletionTimestamp != nil:
	case have == nil:
		node := w.m.cfg.Node()
		if node.UID == "" {
			w.mirror.retryAt = now.Add(time.Second) // not registered yet
			return w.mirror.retryAt
		}
		mirror := mirrorOf(w.pod, node)
		w.mirrorOp(func(ctx context.Context) (*v1.Pod, error) {
			return client.CoreV1().Pods(ns).Create(ctx, mirror, metav1.CreateOptions{})
		})
	case have.DeletionTimestamp != nil || have.Annotations[v1.MirrorPodAnnotationKey] != string(w.uid):
		w.mirrorOp(func(ctx context.Context) (*v1.Pod, error) { return nil, w.m.deleteMirror(ctx, have) })
	case !podstate.SameStatus(st, &have.Status):
		w.mirrorOp(func(ctx context.Context) (*v1.Pod, error) { return w.m.writeStatus(ctx, have, st) })
	}
	return wake
}

// mirrorOp runs one request about the mirror; what it returns is the mirror
// from now on.
func (w *worker) mirrorOp(do func(ctx context.Context) (*v1.Pod, error)) {
	w.mirror.busy = true
	w.background(apiDeadline, func(ctx context.Context) func() {
		got, err := do(ctx)
		return func() {
			w.mirror.busy = false
			if err == nil || apierrors.IsNotFound(err) {
				w.mirror.pod, w.mirror.retryAt, w.mirror.delay, w.mirror.fault = got, time.Time{}, 0, ""
				return
			}
			w.mirror.delay = podstate.QuickBackOff(w.mirror.delay)
			w.mirror.retryAt = time.Now().Add(w.mirror.delay)
			if w.mirror.fault != err.Error() {
				w.mirror.fault = err.Error()
				klog.FromContext(w.ctx).Info("Mirror of a static pod is not as it should be, will retry", "err", err)
			}
		}
	})
}

// mirrorOf is the API object that shows a static pod.
func mirrorOf(pod *v1.Pod, node *v1.Node) *v1.Pod {
	out := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Name: pod.Name, Namespace: pod.Namespace, Labels: pod.Labels, Annotations: map[string]string{},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID, Controller: ptr.To(true)}},
		},
		Spec: *pod.Spec.DeepCopy(),
	}
	for k, v := range pod.Annotations {
		out.Annotations[k] = v
	}
	out.Annotations[v1.MirrorPodAnnotationKey] = pod.Annotations[static.HashAnnotation]
	return out
}
