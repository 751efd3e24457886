package main

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// work is what the parts of the node did in some time.
type work struct {
	took   time.Duration
	agent  time.Duration // processor time of this process: the agent and the API in memory
	podmon time.Duration // of podmon and its keeper
	apps   time.Duration // of the pods' processes, what runs in them for exec included
	bytes  float64       // allocated by this process
	probes float64       // asked
}

// during measures the node while do runs.
func (n *node) during(do func() error) (work, error) {
	before, err := n.work()
	if err != nil {
		return work{}, err
	}
	if err := do(); err != nil {
		return work{}, err
	}
	after, err := n.work()
	return work{
		took: after.took - before.took, agent: after.agent - before.agent, podmon: after.podmon - before.podmon,
		apps: after.apps - before.apps, bytes: after.bytes - before.bytes, probes: after.probes - before.probes,
	}, err
}

var start = time.Now()

// work is all that was done so far.
func (n *node) work() (w work, err error) {
	if w.agent, err = ownCPU(); err != nil {
		return w, err
	}
	all, err := cgroupCPU(n.cgroup)
	if err != nil {
		return w, err
	}
	if w.podmon, err = cgroupCPU(n.cgroup + "/podmon"); err != nil { // where podmon puts itself
		return w, err
	}
	if w.probes, err = n.asked(); err != nil {
		return w, err
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	w.apps, w.bytes, w.took = all-w.podmon, float64(m.TotalAlloc), time.Since(start)
	return w, nil
}

// pct is a processor time in percent of one core.
func (w work) pct(d time.Duration) *float64 { return num(100 * d.Seconds() / w.took.Seconds()) }

// idle is what a full node costs when nothing happens.
func (m *measurement) idle(ctx context.Context) error {
	const pods, rest = 500, time.Minute // the agent's longest round but the five minutes of the node's status
	name := func(i int) string { return fmt.Sprintf("idle-%d", i) }
	var up, down result
	if err := up.all(ctx, m.node, 16, pods, name, m.node.up); err != nil {
		return err
	}
	for i := range pods {
		if err := m.node.settle(ctx, name(i)); err != nil {
			return err
		}
	}
	if err := sleep(ctx, 5*time.Second); err != nil { // late events, held back statuses, the garbage of the starts
		return err
	}
	runtime.GC()
	var w work
	err := m.profiled("idle", func() (err error) {
		w, err = m.node.during(func() error { return sleep(ctx, rest) })
		return err
	})
	if err != nil {
		return err
	}
	if err := down.all(ctx, m.node, 16, pods, name, m.node.down); err != nil {
		return err
	}
	figure{
		Case: "idle", Pods: pods, PerS: up.perS(), CPU: w.pct(w.agent + w.podmon),
		AgentCPU: w.pct(w.agent), PodmonCPU: w.pct(w.podmon), AppsCPU: w.pct(w.apps), BytesPerS: num(w.bytes / w.took.Seconds()),
	}.print()
	fmt.Fprintf(os.Stderr, "bench agent: %d pods: up %.0f/s, down %.0f/s\n", pods, *up.perS(), *down.perS())
	return nil
}

// probes is what probes cost: ten thousand a minute of those over the network,
// a tenth of it by exec.
func (m *measurement) probes(ctx context.Context) error {
	for _, c := range []struct {
		name string
		pods int
		ask  v1.ProbeHandler
	}{
		{"http", 84, v1.ProbeHandler{HTTPGet: &v1.HTTPGetAction{Path: "/", Port: intstr.FromInt32(8080)}}},
		{"tcp", 84, v1.ProbeHandler{TCPSocket: &v1.TCPSocketAction{Port: intstr.FromInt32(8080)}}},
		{"grpc", 84, v1.ProbeHandler{GRPC: &v1.GRPCAction{Port: 8081}}},
		{"exec", 8, v1.ProbeHandler{Exec: &v1.ExecAction{Command: []string{"/bin/box", "true"}}}},
	} {
		if err := m.probed(ctx, c.name, c.pods, c.ask); err != nil {
			return fmt.Errorf("%s: %w", c.name, err)
		}
	}
	return nil
}

// probed has two probes a second of each pod, beside the same pods at rest.
func (m *measurement) probed(ctx context.Context, kind string, pods int, ask v1.ProbeHandler) error {
	const rest = 20 * time.Second
	round := func(phase string, p *v1.Probe) (w work, err error) {
		name := func(i int) string { return fmt.Sprintf("probe-%s-%s-%d", kind, phase, i) }
		var r result
		up := func(ctx context.Context, name string) (time.Duration, error) {
			return m.node.upWith(ctx, name, func(c *v1.Container) {
				c.Command, c.LivenessProbe, c.ReadinessProbe = []string{"/bin/app"}, p, p
			})
		}
		if err := r.all(ctx, m.node, 16, pods, name, up); err != nil {
			return w, err
		}
		for i := range pods {
			if err := m.node.settle(ctx, name(i)); err != nil {
				return w, err
			}
		}
		if err := sleep(ctx, 3*time.Second); err != nil {
			return w, err
		}
		runtime.GC()
		err = m.profiled("probes-"+kind+"-"+phase, func() (err error) {
			w, err = m.node.during(func() error { return sleep(ctx, rest) })
			return err
		})
		if err != nil {
			return w, err
		}
		return w, r.all(ctx, m.node, 16, pods, name, m.node.down)
	}
	idle, err := round("none", nil)
	if err != nil {
		return err
	}
	w, err := round("asked", &v1.Probe{ProbeHandler: ask, PeriodSeconds: 1, TimeoutSeconds: 1, SuccessThreshold: 1, FailureThreshold: 10})
	if err != nil {
		return err
	}
	// What the same pods cost without probes is taken off.
	less := idle.took.Seconds() / w.took.Seconds()
	w.agent -= time.Duration(float64(idle.agent) / less)
	w.podmon -= time.Duration(float64(idle.podmon) / less)
	w.apps -= time.Duration(float64(idle.apps) / less)
	each := func(d time.Duration) *float64 { return num(float64(d.Microseconds()) / w.probes) }
	figure{
		Case: "probes_" + kind, Pods: pods, PerS: num(w.probes / w.took.Seconds()), CPU: w.pct(w.agent + w.podmon),
		AgentCPU: w.pct(w.agent), PodmonCPU: w.pct(w.podmon), AppsCPU: w.pct(w.apps),
		AgentEach: each(w.agent), PodmonEach: each(w.podmon), AppsEach: each(w.apps), BytesEach: num((w.bytes - idle.bytes/less) / w.probes),
	}.print()
	return nil
}
