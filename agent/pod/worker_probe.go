package pod

import (
	"context"
	"errors"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/agent/probe"
	"github.com/clusterd/clusterd/agent/runtime"
)

// probing is the probe loops of one instance.
type probing struct {
	cancel       context.CancelFunc
	stopLiveness context.CancelFunc
}

// target says where an instance is asked.
func (w *worker) target(spec *v1.Container, id string, s podstate.Sandbox) probe.Target {
	t := probe.Target{ContainerID: id, Namespace: w.pod.Namespace, Pod: w.pod.Name, PodUID: string(w.uid)}
	if spec != nil {
		t.Ports, t.Container = spec.Ports, spec.Name
	}
	switch {
	case len(s.IPs) > 0:
		t.PodIP = s.IPs[0].String()
	case len(w.m.cfg.NodeIPs) > 0:
		t.PodIP = w.m.cfg.NodeIPs[0].String()
	}
	return t
}

// startProbes starts the loops that the instance's state asks for: startup
// alone first, then liveness and readiness.
func (w *worker) startProbes(c *podstate.Container) {
	i, spec := c.Now, w.spec(c.Name)
	if spec == nil || w.kind(c.Name) == podstate.KindInit || w.kind(c.Name) == podstate.KindEphemeral {
		return
	}
	w.stopProbes(i.ID)
	ctx, cancel := context.WithCancel(w.ctx)
	live, stopLive := context.WithCancel(ctx)
	w.probes[i.ID] = &probing{cancel: cancel, stopLiveness: stopLive}
	t := w.target(spec, i.ID, w.obs.Sandbox)
	t.StartedAt = i.StartedAt
	loop := func(ctx context.Context, kind probe.Kind, p *v1.Probe, eager bool, verdict func(ok bool)) {
		w.wg.Go(func() {
			w.m.cfg.Probes.Loop(ctx, kind, p, t, eager, func(r probe.Round) {
				switch {
				case r.Unknown:
					w.send(func() {
						w.containerEvent(c.Name, v1.EventTypeWarning, "Unhealthy", "%s probe errored and resulted in unknown state: %s", kind, r.Message)
					})
				case !r.OK:
					w.send(func() {
						w.containerEvent(c.Name, v1.EventTypeWarning, "Unhealthy", "%s probe failed: %s", kind, r.Message)
					})
				case r.Warning:
					w.send(func() {
						w.containerEvent(c.Name, v1.EventTypeWarning, "ProbeWarning", "%s probe warning: %s", kind, r.Message)
					})
				}
			}, func(ok bool, _ string) {
				w.send(func() {
					if c.Now == i && i.Running {
						verdict(ok)
					}
				})
			})
		})
	}
	sick := func(what string, p *v1.Probe) func(bool) {
		return func(ok bool) {
			if !ok {
				i.Sick, i.SickGrace = "failed "+what+" probe", p.TerminationGracePeriodSeconds
			}
		}
	}
	if p := spec.StartupProbe; p != nil && !i.Started {
		loop(live, probe.Startup, p, true, func(ok bool) {
			if !ok {
				sick("startup", p)(false)
				return
			}
			i.Started = true
			w.startProbes(c) // ends this loop and starts the others
		})
		return
	}
	if p := spec.LivenessProbe; p != nil {
		loop(live, probe.Liveness, p, false, sick("liveness", p))
	}
	if p := spec.ReadinessProbe; p != nil {
		loop(ctx, probe.Readiness, p, !i.Ready, func(ok bool) { i.Ready = ok })
	}
}

func (w *worker) stopProbes(id string) {
	if p := w.probes[id]; p != nil {
		p.cancel()
		delete(w.probes, id)
	}
}

func within(deadline time.Duration) string {
	if deadline == 0 {
		return "before it was given up"
	}
	return "within " + deadline.String()
}

// runHook runs a postStart or preStop handler; deadline 0: until ctx ends.
func (m *Manager) runHook(ctx context.Context, h *v1.LifecycleHandler, t probe.Target, deadline time.Duration) error {
	if deadline > 0 {
		var cancel func()
		ctx, cancel = context.WithTimeout(ctx, deadline)
		defer cancel()
	}
	switch {
	case h.Exec != nil:
		out, code, err := m.ExecProbe(ctx, t.ContainerID, h.Exec.Command)
		switch {
		case ctx.Err() != nil:
			return fmt.Errorf("command %q did not end %s", h.Exec.Command, within(deadline))
		case err != nil:
			return fmt.Errorf("command %q: %w", h.Exec.Command, err)
		case code != 0:
			return fmt.Errorf("command %q exited with %d: %s", h.Exec.Command, code, out)
		}
		return nil
	case h.HTTPGet != nil:
		ctx, cancel := context.WithTimeout(ctx, httpHookDeadline)
		defer cancel()
		// Any answer will do: a hook tells something, it does not ask.
		_, _, err := m.cfg.Probes.HTTP(ctx, h.HTTPGet, t)
		return err
	case h.Sleep != nil:
		select {
		case <-time.After(time.Duration(h.Sleep.Seconds) * time.Second):
			return nil
		case <-ctx.Done():
			return fmt.Errorf("sleep of %d s did not end %s", h.Sleep.Seconds, within(deadline))
		}
	case h.TCPSocket != nil:
		return errors.New("tcpSocket is not supported as a lifecycle hook: use exec, httpGet or sleep")
	}
	return errors.New("hook without an action")
}

// maxProbeOutput bounds what is kept of a probe's or hook's output.
const maxProbeOutput = 10 << 10

// cannotExecute is a shell's exit code for a command that cannot be started.
const cannotExecute = 126

// ExecProbe runs a command in a container and collects its output; see
// probe.Execer.
func (m *Manager) ExecProbe(ctx context.Context, id string, command []string) ([]byte, int, error) {
	var out capped
	code, err := m.cfg.Runtime.Exec(ctx, api.Exec{ContainerID: id, Args: command, HasStdout: true, HasStderr: true},
		runtime.ExecIO{Stdout: &out, Stderr: &out})
	if ctx.Err() != nil {
		return out.Bytes(), code, ctx.Err()
	}
	if refused := (*api.Error)(nil); errors.As(err, &refused) && refused.Code == api.CodeStartFailed {
		return []byte(refused.Message), cannotExecute, nil
	}
	return out.Bytes(), code, err
}
