package podstate

import (
	"cmp"
	"net/netip"
	"slices"
	"sort"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/apis/core"
)

// Records are what the runtime holds of one pod.
type Records struct {
	Sandboxes  []api.SandboxStatus
	Containers []api.ContainerStatus
}

// Put replaces or adds a status of the pod; the other of s and c is nil.
func (r *Records) Put(s *api.SandboxStatus, c *api.ContainerStatus) {
	if s != nil {
		for i := range r.Sandboxes {
			if r.Sandboxes[i].Sandbox.ID == s.Sandbox.ID {
				r.Sandboxes[i] = *s
				return
			}
		}
		r.Sandboxes = append(r.Sandboxes, *s)
		return
	}
	for i := range r.Containers {
		if r.Containers[i].Container.ID == c.Container.ID {
			r.Containers[i] = *c
			return
		}
	}
	r.Containers = append(r.Containers, *c)
}

// lostSandbox marks instances known from the API alone.
const lostSandbox = "lost"

// Seed makes the first observation of a pod from what the runtime holds and
// the status that the API last reported. After a restart of the agent this gives back
// the state before it; after a boot the API's running containers are known as
// lost.
func Seed(pod *v1.Pod, rec Records, now time.Time, words func(api.ContainerStatus, *v1.Container) string) Observed {
	o := Observed{Containers: map[string]*Container{}, Strays: map[string]*Stray{}, Allocated: seedAllocation(pod),
		ImageVolumes: SeedImageVolumes(&pod.Spec)}
	if t := pod.Status.StartTime; t != nil {
		o.StartedAt = t.Time
	}
	sandboxes, attempt := bySandboxUse(rec)
	for i, s := range sandboxes {
		if i < len(sandboxes)-1 {
			o.Strays[s.Sandbox.ID] = &Stray{}
			continue
		}
		o.Sandbox = Sandbox{ID: s.Sandbox.ID, Attempt: attempt, Made: true, State: SandboxDead, IPs: parseIPs(s.Sandbox.Labels[LabelIPs]), Limits: s.Sandbox.PodResources}
		if s.State == api.StateRunning {
			o.Sandbox.State = SandboxReady
		}
	}
	byName := map[string][]api.ContainerStatus{}
	for _, c := range rec.Containers {
		byName[c.Container.Name] = append(byName[c.Container.Name], c)
	}
	statuses := map[string]v1.ContainerStatus{}
	for _, list := range [][]v1.ContainerStatus{pod.Status.InitContainerStatuses, pod.Status.ContainerStatuses, pod.Status.EphemeralContainerStatuses} {
		for _, s := range list {
			statuses[s.Name] = s
		}
	}
	if core.FinalPhase(pod.Status.Phase) {
		if o.Final = len(rec.Containers) == 0; !o.Final {
			// By this node, or by another writer: what has exited does not start again.
			o.EndedAs = pod.Status.Phase
		}
	}
	for _, spec := range AllContainers(&pod.Spec) {
		c := &Container{Name: spec.Name}
		o.Containers[spec.Name] = c
		reported, known := statuses[spec.Name]
		if known {
			c.Restarts = reported.RestartCount
		}
		list := byName[spec.Name]
		sort.Slice(list, func(i, j int) bool { return list[i].Container.Attempt < list[j].Container.Attempt })
		for i, st := range list {
			if i < len(list)-2 { // older than the one before the newest
				o.Strays[st.Container.ID] = &Stray{Container: true}
			}
			inst := InstanceOf(st)
			if inst.Running {
				inst.Applied = seedApplied(pod, st.Container.Resources, o.Allocated.Of(spec), reported)
				// Probes will say more; until then the API's word stands.
				inst.Started, inst.Ready = true, true
				if known && reported.ContainerID == ContainerIDPrefix+inst.ID {
					inst.Ready = reported.Ready || spec.ReadinessProbe == nil
					inst.Started = spec.StartupProbe == nil || reported.Started != nil && *reported.Started
				} else {
					inst.Ready = spec.ReadinessProbe == nil
					inst.Started = spec.StartupProbe == nil
				}
			} else {
				inst.Exited(st, words(st, spec), now)
			}
			c.Last, c.Now = c.Now, inst
			if d, err := time.ParseDuration(st.Container.Labels[LabelBackOff]); err == nil {
				c.BackOff = d
			}
			c.Restarts = max(c.Restarts, int32(inst.Attempt))
		}
		if known {
			seedFromAPI(c, reported, now)
		}
	}
	return o
}

// bySandboxUse sorts a pod's sandboxes so that the one to go on with comes
// last: the one with running containers, else a running one, else the newest.
// There is more than one only when the answer to a request was lost. attempt
// is the highest of all.
func bySandboxUse(rec Records) (sandboxes []api.SandboxStatus, attempt uint32) {
	used := map[string]int{}
	for _, c := range rec.Containers {
		if c.State == api.StateRunning {
			used[c.Container.SandboxID]++
		}
	}
	running := func(s api.SandboxStatus) int {
		if s.State == api.StateRunning {
			return 1
		}
		return 0
	}
	sandboxes = slices.SortedFunc(slices.Values(rec.Sandboxes), func(a, b api.SandboxStatus) int {
		return cmp.Or(
			cmp.Compare(used[a.Sandbox.ID], used[b.Sandbox.ID]),
			cmp.Compare(running(a), running(b)),
			cmp.Compare(a.Sandbox.Attempt, b.Sandbox.Attempt),
			cmp.Compare(a.CreatedAt, b.CreatedAt),
			cmp.Compare(a.Sandbox.ID, b.Sandbox.ID),
		)
	})
	for _, s := range sandboxes {
		attempt = max(attempt, s.Sandbox.Attempt)
	}
	return sandboxes, attempt
}

// seedFromAPI fills in what only the API remembers.
func seedFromAPI(c *Container, reported v1.ContainerStatus, now time.Time) {
	if c.Last == nil && reported.LastTerminationState.Terminated != nil {
		c.Last = instanceFromAPI(reported, reported.LastTerminationState.Terminated)
	}
	if c.Now != nil {
		return
	}
	switch {
	case reported.State.Terminated != nil:
		c.Now = instanceFromAPI(reported, reported.State.Terminated)
	case reported.State.Running != nil:
		c.Now = instanceFromAPI(reported, &v1.ContainerStateTerminated{
			ExitCode: 137, Reason: "ContainerStatusUnknown",
			Message:   "The container could not be located when the node's agent came back: its exit code is not known.",
			StartedAt: reported.State.Running.StartedAt, ContainerID: reported.ContainerID,
		})
		c.Now.FinishedAt = now
	case reported.State.Waiting != nil && c.Last != nil:
		// It was between two runs.
		c.Now, c.Last = c.Last, nil
	}
	if c.Now != nil {
		c.Now.EndSeen = endSeen(c.Now.FinishedAt, now)
	}
}

func instanceFromAPI(reported v1.ContainerStatus, t *v1.ContainerStateTerminated) *Instance {
	return &Instance{
		ID: strings.TrimPrefix(t.ContainerID, ContainerIDPrefix), SandboxID: lostSandbox, Attempt: uint32(reported.RestartCount),
		Image: reported.Image, ImageID: reported.ImageID, StartedAt: t.StartedAt.Time, FinishedAt: t.FinishedAt.Time,
		ExitCode: t.ExitCode, Signal: t.Signal, Reason: t.Reason, Message: t.Message,
		User: reported.User, StopSignal: string(ptr.Deref(reported.StopSignal, "")),
	}
}

func parseIPs(s string) []netip.Addr {
	var out []netip.Addr
	for _, f := range strings.Split(s, ",") {
		if ip, err := netip.ParseAddr(f); err == nil {
			out = append(out, ip)
		}
	}
	return out
}

// JoinIPs writes addresses as LabelIPs holds them; Seed reads them.
func JoinIPs(ips []netip.Addr) string {
	var out []string
	for _, ip := range ips {
		out = append(out, ip.String())
	}
	return strings.Join(out, ",")
}
