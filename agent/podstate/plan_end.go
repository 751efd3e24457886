package podstate

import "time"

// end plans a pod that is to stop for good: give up starts, stop the app
// containers, then the sidecars in reverse order, store the last status, tear
// down, and delete the API object if deletion was asked for.
func (p *planner) end() {
	if p.o.Devices.Preparing {
		p.add(CancelDevices{})
	}
	pulls := p.cancelImageVolumes()
	if !p.stopAll() || !pulls || len(p.o.Strays) > 0 {
		return
	}
	// Who reads in the API that a pod has ended gives its devices to others. Of one
	// that is gone from it nothing is read: its sandbox, addresses and processors do
	// not wait for a driver that may never come back.
	released := p.releaseDevices()
	if p.o.Devices.Preparing || !released && !p.d.Gone {
		return
	}
	deleted := p.d.Gone || p.d.Pod.DeletionTimestamp != nil
	if !p.o.TornDown {
		// The last exit codes are in podmon only until the teardown: the API
		// must have them first.
		if p.o.TearingDown || p.held(p.o.TeardownErr) || !(p.o.StatusStored || p.d.Gone) ||
			p.o.Volumes.Busy || p.o.Sandbox.State == SandboxCreating || p.o.Sandbox.State == SandboxRemoving {
			return
		}
		p.add(Teardown{})
		return
	}
	if deleted && released && !p.o.Finishing && !p.held(p.o.FinishErr) {
		p.add(Finish{})
	}
}

// stopAll plans the stops and reports whether nothing runs any more.
func (p *planner) stopAll() bool {
	quiet := true
	grace := p.endGrace()
	sidecars := map[string]bool{}
	for i := range p.spec.InitContainers {
		if c := &p.spec.InitContainers[i]; InitKind(c) == KindSidecar {
			sidecars[c.Name] = true
		}
	}
	for _, spec := range p.all() {
		if c := p.o.Containers[spec.Name]; c.Op == OpPull || c.Op == OpStart {
			p.add(Cancel{c.Name})
			quiet = false
		}
	}
	for _, spec := range p.all() {
		if !sidecars[spec.Name] && !p.stop(p.o.Containers[spec.Name], grace) {
			quiet = false
		}
	}
	for i := len(p.spec.InitContainers) - 1; i >= 0; i-- {
		name := p.spec.InitContainers[i].Name
		if !sidecars[name] {
			continue
		}
		if !quiet {
			return false
		}
		quiet = p.stop(p.o.Containers[name], p.sidecarGrace(p.o.Containers[name], grace))
	}
	return quiet
}

// minSidecarGrace is what a sidecar gets when the others have used up the time.
const minSidecarGrace = 2 * time.Second

// sidecarGrace is what is left of the pod's one grace period when the sidecar's turn
// comes (KEP-753).
func (p *planner) sidecarGrace(c *Container, grace time.Duration) time.Duration {
	if p.o.EndSince.IsZero() {
		return grace
	}
	turn := p.now
	if c.Op == OpStop {
		turn = c.OpSince
	}
	return min(grace, max(grace-turn.Sub(p.o.EndSince), minSidecarGrace))
}

// stop plans the stop of one container and reports whether it is down. A stop
// under way is only repeated to make it sooner.
func (p *planner) stop(c *Container, grace time.Duration) bool {
	if !c.Running() {
		return c.Op == OpNone
	}
	if c.Op == OpNone || c.Op == OpStop && grace < c.StopGrace {
		p.add(Stop{Container: c.Name, ID: c.Now.ID, At: p.now, Grace: grace, Cause: StopPod,
			Message: "Stopping container " + c.Name})
	}
	return false
}

// endGrace is how long containers get to end.
func (p *planner) endGrace() time.Duration {
	pod := p.d.Pod
	switch {
	case pod.DeletionTimestamp != nil && pod.DeletionGracePeriodSeconds != nil:
		return Grace(*pod.DeletionGracePeriodSeconds)
	case p.d.Gone:
		return 2 * time.Second // deleted by force: no client waits for it
	case p.o.EvictGrace != nil:
		return *p.o.EvictGrace
	}
	return p.specGrace()
}
