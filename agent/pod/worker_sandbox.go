package pod

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/object"
	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podspec"
	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/agent/volume"
	"github.com/clusterd/clusterd/apis/core"
)

// isNotFound reports whether podmon does not know the thing.
func isNotFound(err error) bool { return api.IsCode(err, api.CodeNotFound) }

// faulted makes the next fault of a row: delay is kept by the caller in the
// fault before.
func faulted(before *podstate.Fault, reason string, err error) *podstate.Fault {
	now := time.Now()
	var d time.Duration
	reported := now
	if before != nil {
		d = before.RetryAt.Sub(before.At)
		if before.Message == err.Error() && now.Sub(before.Reported) < podstate.ReportAgain {
			reported = before.Reported
		}
	}
	return &podstate.Fault{Reason: reason, Message: err.Error(), At: now, RetryAt: now.Add(podstate.QuickBackOff(d)), Reported: reported}
}

func (w *worker) createSandbox(attempt uint32) {
	w.obs.Sandbox.State, w.obs.Sandbox.Since = podstate.SandboxCreating, time.Now()
	before, pod, id := w.obs.Sandbox.Err, podstate.Granted(w.pod, w.obs.Allocated), podspec.NewID()
	w.making = id
	w.m.routeTo(id, w.uid)
	w.background(sandboxDeadline, func(ctx context.Context) func() {
		var warnings []warning
		warn := func(reason, message string) { warnings = append(warnings, warning{reason, message}) }
		ips, left, err := w.m.createSandbox(ctx, pod, id, attempt, warn)
		return func() {
			w.making = ""
			for _, n := range warnings {
				if before == nil { // reported once, not with every attempt
					w.event(v1.EventTypeWarning, n.reason, "%s", n.message)
				}
			}
			if left {
				w.stray(id, false)
			} else if err != nil {
				w.m.unroute(id)
			}
			if err != nil {
				w.obs.Sandbox.State = podstate.SandboxAbsent
				reason := "FailedCreatePodSandBox"
				if errors.Is(err, podstate.ErrNetworkNotReady) {
					reason = "NetworkNotReady"
				}
				w.obs.Sandbox.Err = faulted(before, reason, err)
				if w.obs.Sandbox.Err.News() {
					w.event(v1.EventTypeWarning, reason, "%s", sandboxWords(reason, err))
				}
				return
			}
			w.obs.Sandbox = podstate.Sandbox{ID: id, State: podstate.SandboxReady, Attempt: attempt, Made: true, MadeAt: time.Now(), IPs: ips, Limits: podstate.PodResources(pod, w.m.cfg.PidsLimit)}
		}
	})
}

func sandboxWords(reason string, err error) string {
	if reason == "NetworkNotReady" {
		return err.Error()
	}
	return "Failed to create pod sandbox: " + err.Error()
}

// warning is something that the pod's owner should know and that stops nothing.
type warning struct{ reason, message string }

// createSandbox makes network, files and pause. What it made before it failed
// is taken back; left says that podmon may still hold the sandbox. warn is called with
// what is not as the pod wants it.
func (m *Manager) createSandbox(ctx context.Context, pod *v1.Pod, id string, attempt uint32, warn func(reason, message string)) (ips sandboxIPs, left bool, err error) {
	release, err := m.slot(ctx)
	if err != nil {
		return nil, false, err
	}
	defer release()
	// Before the sandbox, as a kubelet does: who follows logs finds the directory of a pod
	// whose sandbox cannot be made.
	if err := os.MkdirAll(m.spec.PodLogs(pod), 0o755); err != nil {
		return nil, false, err
	}
	if err := m.cfg.PodLogLinks.setPod(m.spec.PodLogs(pod)); err != nil {
		klog.FromContext(ctx).Error(err, "No link to a pod's log folder") // its logs are where they are
	}
	if !m.isUnconfirmed(pod.UID) { // else it was looked at when the pod was first made
		if err := m.checkHandler(ctx, pod); err != nil {
			return nil, false, err
		}
	}
	name, err := podspec.Hostname(pod, m.cfg.NodeName, m.cfg.ClusterDomain)
	if err != nil {
		return nil, false, err
	}
	netns, ips, ids, err := m.attach(ctx, pod)
	if err != nil {
		return nil, false, err
	}
	undo := func() {
		// The deadline of the failed attempt must not keep us from cleaning.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), apiDeadline)
		defer cancel()
		if derr := m.cfg.Network.Detach(ctx, string(pod.UID)); derr != nil {
			klog.FromContext(ctx).Error(derr, "Network of a sandbox that was not made could not be detached")
		}
	}
	if ports := podstate.HostPorts(pod); len(ports) > 0 && !pod.Spec.HostNetwork && len(ips) > 0 {
		if err := m.cfg.Network.Publish(ctx, string(pod.UID), ips, ports); err != nil {
			undo()
			return nil, false, fmt.Errorf("host ports: %w", err)
		}
	}
	if err := m.limit(ctx, pod); err != nil {
		undo()
		return nil, false, err
	}
	if err := m.spec.WriteFiles(pod, ips, warn); err != nil {
		undo()
		return nil, false, err
	}
	sysctls := map[string]string{}
	if sc := pod.Spec.SecurityContext; sc != nil {
		for _, s := range sc.Sysctls {
			sysctls[s.Name] = s.Value
		}
	}
	grace := int64(30)
	if g := pod.Spec.TerminationGracePeriodSeconds; g != nil {
		grace = *g
	}
	limits := podstate.PodResources(pod, m.cfg.PidsLimit)
	limits.Hugepages = podstate.Hugepages(core.Requests(pod), m.cfg.Node().Status.Capacity)
	made, err := m.cfg.Runtime.CreateSandbox(ctx, api.Sandbox{
		ID: id, PodUID: string(pod.UID), Namespace: pod.Namespace, Name: pod.Name, Attempt: attempt,
		Hostname: name, NetNS: netns, Users: ids, HostIPC: pod.Spec.HostIPC, HostPID: pod.Spec.HostPID,
		SharePID: ptr.Deref(pod.Spec.ShareProcessNamespace, false), Sysctls: sysctls,
		CgroupParent: podstate.CgroupParent(m.cfg.CgroupRoot, pod), PodResources: limits,
		Labels: map[string]string{podstate.LabelIPs: podstate.JoinIPs(ips), podstate.LabelGrace: strconv.FormatInt(grace, 10)},
	})
	if err == nil && ids != nil && made.Sandbox.Users == nil {
		err = errors.New("podmon is of an older version that knows no user namespaces (see the node's event RuntimeNotUpgraded)")
	}
	if err != nil {
		err = fmt.Errorf("create pause: %w", err)
		if errors.Is(ctx.Err(), context.Canceled) {
			return nil, true, err // the agent stops; the next one finds what has become of it
		}
		// It may have been made and only the answer lost: it would hold the
		// pod's network.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), apiDeadline)
		defer cancel()
		if rerr := m.cfg.Runtime.RemoveSandbox(ctx, id); rerr != nil && !isNotFound(rerr) {
			return nil, true, err
		}
		undo()
		return nil, false, err
	}
	m.weigh(ctx)
	return ips, false, nil
}

// stray records a sandbox or container of the pod that its spec does not ask for.
func (w *worker) stray(id string, container bool) {
	if w.obs.Strays[id] == nil {
		w.obs.Strays[id] = &podstate.Stray{Container: container}
	}
}

// findStrays looks through what podmon listed for what nothing here stands
// for. The answer to the request that made it was lost: podmon was killed, or
// the agent, or a deadline was over.
func (w *worker) findStrays(listed podstate.Records) {
	if w.obs.Finished {
		return
	}
	for _, s := range listed.Sandboxes {
		if id := s.Sandbox.ID; id != w.obs.Sandbox.ID && id != w.making {
			w.stray(id, false)
		}
	}
	known := map[string]bool{}
	for name, c := range w.obs.Containers {
		known[w.starting[name]] = true
		for _, i := range []*podstate.Instance{c.Now, c.Last} {
			if i != nil {
				known[i.ID] = true
			}
		}
	}
	for _, c := range listed.Containers {
		if id := c.Container.ID; !known[id] {
			w.stray(id, true)
		}
	}
}

func (w *worker) endStray(id string) {
	s := w.obs.Strays[id]
	s.Busy = true
	before := s.Err
	w.background(teardownDeadline, func(ctx context.Context) func() {
		err := w.m.endStray(ctx, id, s.Container)
		return func() {
			s.Busy = false
			if err != nil {
				s.Err = faulted(before, podstate.ReasonKillPod, err)
				if s.Err.News() {
					w.event(v1.EventTypeWarning, "FailedKillPod", "error killing a left-over of the pod: %v", err)
				}
				return
			}
			delete(w.obs.Strays, id)
			if id != w.obs.Sandbox.ID {
				w.m.unroute(id)
			}
		}
	})
}

// endStray kills and removes a container or sandbox, running or not, or gone.
func (m *Manager) endStray(ctx context.Context, id string, container bool) error {
	if !container {
		err := m.cfg.Runtime.RemoveSandbox(ctx, id)
		if isNotFound(err) {
			err = nil
		}
		return err
	}
	for again := 10 * time.Millisecond; ; again = min(2*again, time.Second) {
		err := m.cfg.Runtime.Signal(ctx, api.Signal{ID: id, Signal: podspec.SigKill, All: true})
		if err != nil && !isNotFound(err) && !api.IsCode(err, api.CodeNotRunning) {
			return err
		}
		if err = m.removeContainer(ctx, id); !api.IsCode(err, api.CodeBusy) {
			return err
		}
		select { // it is about to end
		case <-time.After(again):
		case <-ctx.Done():
			return err
		}
	}
}

// removeSandbox clears the way for another one.
func (w *worker) removeSandbox(id string) {
	w.obs.Sandbox.State, w.obs.Sandbox.Since = podstate.SandboxRemoving, time.Now()
	before := w.obs.Sandbox.Err
	w.event(v1.EventTypeNormal, "SandboxChanged", "Pod sandbox changed, it will be killed and re-created.")
	w.background(sandboxDeadline, func(ctx context.Context) func() {
		err := w.m.cfg.Runtime.RemoveSandbox(ctx, id)
		if isNotFound(err) {
			err = nil
		}
		if err == nil {
			err = w.m.cfg.Network.Detach(ctx, string(w.uid))
		}
		return func() {
			if err != nil {
				w.obs.Sandbox.State = podstate.SandboxDead
				w.obs.Sandbox.Err = faulted(before, podstate.ReasonKillPod, err)
				w.event(v1.EventTypeWarning, "FailedKillPod", "error killing pod: %v", err)
				return
			}
			w.m.unroute(id)
			w.obs.Sandbox.State, w.obs.Sandbox.Err, w.obs.Sandbox.IPs, w.obs.Sandbox.ID = podstate.SandboxAbsent, nil, nil, ""
		}
	})
}

// onSandbox takes news of a sandbox.
func (w *worker) onSandbox(st api.SandboxStatus) {
	s := &w.obs.Sandbox
	if st.Sandbox.ID == s.ID && s.State == podstate.SandboxReady && st.State != api.StateRunning {
		s.State = podstate.SandboxDead
	}
}

// lostPause takes the disappearance of the sandbox from podmon's list.
func (w *worker) lostPause(listed map[string]bool, asOf time.Time) {
	s := &w.obs.Sandbox
	if s.State == podstate.SandboxReady && !listed[s.ID] && s.MadeAt.Before(asOf) {
		s.State = podstate.SandboxDead
	}
}

func (w *worker) setupVolumes() {
	w.obs.Volumes.Busy, w.obs.Volumes.Since = true, time.Now()
	before, pod, static := w.obs.Volumes.Err, podstate.Granted(w.pod, w.obs.Allocated), w.static
	w.background(volumeDeadline, func(ctx context.Context) func() {
		guarded, err := w.m.guard(ctx, pod, static)
		if err == nil {
			err = w.m.cfg.Volumes.Setup(ctx, pod)
		}
		return func() {
			w.obs.Volumes.Busy = false
			w.obs.SelfFencing = w.obs.SelfFencing || guarded
			if err == nil {
				w.obs.Volumes = podstate.Volumes{Ready: true}
				return
			}
			w.obs.Volumes.Err = faulted(before, "FailedMount", err)
			if errors.Is(err, volume.ErrUnsupported) {
				w.obs.Volumes.Err.RetryAt = time.Now().Add(podstate.BackOffMax)
			}
			if w.obs.Volumes.Err.News() {
				w.event(v1.EventTypeWarning, "FailedMount", "%s", err)
			}
		}
	})
}

// refreshState keeps one rendering of the changing volumes under way.
type refreshState struct {
	busy, again bool
	due         time.Time // tokens and certificates are renewed then
}

// tokenRefresh is how often projected tokens and certificates are looked at.
const tokenRefresh = 5 * time.Minute

// refresh renders ConfigMap, Secret and downward volumes again.
func (w *worker) refresh() {
	if !w.obs.Volumes.Ready || w.obs.TearingDown || w.obs.TornDown {
		return
	}
	if w.fresh.busy {
		w.fresh.again = true
		return
	}
	w.fresh.busy, w.fresh.due = true, time.Now().Add(tokenRefresh)
	w.obs.Volumes.Busy = true // the teardown waits
	pod := podstate.Granted(w.pod, w.obs.Allocated)
	w.background(volumeDeadline, func(ctx context.Context) func() {
		err := w.m.cfg.Volumes.Refresh(ctx, pod)
		return func() {
			w.fresh.busy, w.obs.Volumes.Busy = false, false
			if err != nil {
				klog.FromContext(w.ctx).Info("Volumes keep their old content", "err", err)
			}
			if w.fresh.again {
				w.fresh.again = false
				w.refresh()
			}
		}
	})
}

// refreshDue renews tokens and certificates in time.
func (w *worker) refreshDue(now time.Time) time.Time {
	if !expires(w.pod) || !w.obs.Volumes.Ready || w.obs.TornDown || w.obs.TearingDown {
		return time.Time{}
	}
	if w.fresh.due.IsZero() {
		w.fresh.due = now.Add(tokenRefresh)
	}
	if !w.fresh.due.After(now) && !w.fresh.busy {
		w.refresh()
	}
	return w.fresh.due
}

// expires reports whether the pod's volumes hold what has to be renewed.
func expires(pod *v1.Pod) bool {
	for _, v := range pod.Spec.Volumes {
		if v.Projected == nil {
			continue
		}
		for _, s := range v.Projected.Sources {
			if s.ServiceAccountToken != nil || s.PodCertificate != nil {
				return true
			}
		}
	}
	return false
}

// refs are the objects to watch for this pod.
func (w *worker) refs() []object.Ref {
	if w.gone || w.obs.Final {
		return nil
	}
	return object.RefsOf(w.pod)
}

// onObject: a ConfigMap or Secret of the pod changed, or is there at last.
func (w *worker) onObject() {
	if f := w.obs.Volumes.Err; f != nil {
		f.RetryAt = time.Time{}
	}
	for _, c := range w.obs.Containers {
		if c.StartErr != nil && c.StartErr.Reason == "CreateContainerConfigError" {
			c.StartErr.RetryAt = time.Time{}
		}
	}
	w.refresh()
}

// teardown removes everything the node holds for the pod.
func (w *worker) teardown() {
	w.obs.TearingDown = true
	w.teardownAt("Removing its containers")
	before := w.obs.TeardownErr
	var ids []string
	for _, c := range w.obs.Containers {
		for _, i := range []*podstate.Instance{c.Now, c.Last} {
			if i != nil && i.Recorded {
				ids = append(ids, i.ID)
			}
		}
	}
	var sandboxes []string
	if w.obs.Sandbox.ID != "" {
		sandboxes = append(sandboxes, w.obs.Sandbox.ID)
	}
	for _, p := range w.probes {
		p.cancel()
	}
	w.background(teardownDeadline, func(ctx context.Context) func() {
		err := w.m.teardown(ctx, string(w.uid), ids, sandboxes, func(part string) {
			w.send(func() { w.teardownAt(part) })
		})
		return func() {
			w.obs.TearingDown = false
			if err != nil {
				w.obs.TeardownErr = faulted(before, podstate.ReasonKillPod, err)
				w.event(v1.EventTypeWarning, "FailedKillPod", "error killing pod: %v", err)
				return
			}
			for _, c := range w.obs.Containers {
				for _, i := range []*podstate.Instance{c.Now, c.Last} {
					if i != nil {
						i.Recorded = false
					}
				}
			}
			w.obs.TornDown, w.obs.TeardownErr = true, nil
			w.obs.Sandbox = podstate.Sandbox{Attempt: w.obs.Sandbox.Attempt, Made: w.obs.Sandbox.Made}
			w.obs.Volumes, w.obs.ImageVolumes = podstate.Volumes{}, podstate.SeedImageVolumes(&w.pod.Spec)
			w.m.cfg.Objects.Release(w.uid)
			w.m.release(w.uid)
		}
	})
}

// teardownAt notes what the teardown is at, for the status.
func (w *worker) teardownAt(part string) {
	w.obs.TeardownPart, w.obs.TeardownSince = part, time.Now()
}

// teardown removes containers, sandboxes, network, mounts and directories of a
// pod, and tells at what it is. Every part is tried; what is gone already is
// fine.
func (m *Manager) teardown(ctx context.Context, uid string, containers, sandboxes []string, at func(part string)) error {
	var errs []error
	note := func(what string, err error) {
		if err != nil && !isNotFound(err) {
			errs = append(errs, fmt.Errorf("%s: %w", what, err))
		}
	}
	for _, id := range containers {
		note("remove container", m.removeContainer(ctx, id))
	}
	at("Removing its sandbox")
	for _, id := range sandboxes {
		note("remove sandbox", m.cfg.Runtime.RemoveSandbox(ctx, id))
	}
	if len(errs) > 0 {
		return errors.Join(errs...) // network and directories are still in use
	}
	at("Detaching its network")
	note("detach network", m.cfg.Network.Detach(ctx, uid))
	at("Unmounting its volumes")
	note("unmount image volumes", m.cfg.Images.UnmountVolumes(ctx, uid))
	note("remove volumes", m.cfg.Volumes.Teardown(ctx, volumeUID(uid)))
	if len(errs) == 0 {
		note("forget its deadline", m.unguard(ctx, uid))
	}
	if len(errs) == 0 {
		m.freeUsers(uid)
		for _, id := range sandboxes {
			m.unroute(id)
		}
	}
	return errors.Join(errs...)
}

// removeContainer drops an exited container's record and root file system.
func (m *Manager) removeContainer(ctx context.Context, id string) error {
	if err := m.cfg.Runtime.RemoveContainer(ctx, id); err != nil && !isNotFound(err) {
		return err
	}
	if err := m.cfg.LogLinks.remove(id); err != nil {
		return err
	}
	return m.cfg.Images.Unmount(ctx, id)
}
