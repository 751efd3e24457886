package agent_test

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent"
	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/users"
)

// stopwatch takes the times of what a pod's start is made of.
type stopwatch struct {
	mu   sync.Mutex
	took map[string][]time.Duration
	at   map[string]time.Time // container running, by pod UID
}

func (s *stopwatch) note(what string, began time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.took[what] = append(s.took[what], time.Since(began))
}

// report gives each part's median in milliseconds.
func (s *stopwatch) report(b *testing.B) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for what, d := range s.took {
		slices.Sort(d)
		b.ReportMetric(float64(d[len(d)/2].Microseconds())/1000, what+"-p50-ms")
		if what == "running" {
			b.ReportMetric(float64(d[len(d)*99/100].Microseconds())/1000, what+"-p99-ms")
		}
	}
}

type timedRuntime struct {
	agent.Runtime
	w *stopwatch
}

func (r timedRuntime) CreateSandbox(ctx context.Context, s api.Sandbox) (api.SandboxStatus, error) {
	defer r.w.note("sandbox", time.Now())
	return r.Runtime.CreateSandbox(ctx, s)
}

func (r timedRuntime) StartContainer(ctx context.Context, c api.Container) (api.ContainerStatus, error) {
	began := time.Now()
	st, err := r.Runtime.StartContainer(ctx, c)
	r.w.note("start", began)
	r.w.mu.Lock()
	r.w.at[c.SandboxID] = time.Now()
	r.w.at["last"] = time.Now()
	r.w.mu.Unlock()
	return st, err
}

type timedImages struct {
	agent.Images
	w *stopwatch
}

func (i timedImages) Mount(ctx context.Context, img image.Image, id string) (string, error) {
	defer i.w.note("mount", time.Now())
	return i.Images.Mount(ctx, img, id)
}

func (i timedImages) MountMapped(ctx context.Context, img image.Image, id string, users *os.File) (string, error) {
	defer i.w.note("mount", time.Now())
	return i.Images.MountMapped(ctx, img, id, users)
}

type timedNetwork struct {
	agent.Network
	w *stopwatch
}

func (n timedNetwork) Attach(ctx context.Context, uid string, host bool) (string, []netip.Addr, error) {
	defer n.w.note("attach", time.Now())
	return n.Network.Attach(ctx, uid, host)
}

func (n timedNetwork) AttachUsers(ctx context.Context, uid string, ids users.Range) (string, []netip.Addr, error) {
	defer n.w.note("attach", time.Now())
	return n.Network.AttachUsers(ctx, uid, ids)
}

func (m *machine) wrapRuntime() agent.Runtime {
	if m.watch == nil {
		return m.runtime
	}
	return timedRuntime{m.runtime, m.watch}
}

func (m *machine) wrapImages() agent.Images {
	if m.watch == nil {
		return m.images
	}
	return timedImages{m.images, m.watch}
}

func (m *machine) wrapNetwork(n agent.Network) agent.Network {
	if m.watch == nil {
		return n
	}
	return timedNetwork{n, m.watch}
}

// BenchmarkRootPodStart: one pod at a time, from its creation in the API to
// its container running, with what that is made of.
func BenchmarkRootPodStart(b *testing.B) {
	benchmarkPodStart(b, func(p *v1.Pod) *v1.Pod { return p })
}

// BenchmarkRootPodStartUsers is the same with a user namespace for each pod.
func BenchmarkRootPodStartUsers(b *testing.B) { benchmarkPodStart(b, inside) }

func benchmarkPodStart(b *testing.B, change func(*v1.Pod) *v1.Pod) {
	w := &stopwatch{took: map[string][]time.Duration{}, at: map[string]time.Time{}}
	m := newTimedMachine(b, w)
	m.create(change(newPod("first", app("web"))))
	m.ready("first")
	w.mu.Lock()
	clear(w.took)
	w.mu.Unlock()
	i := 0
	for b.Loop() {
		i++
		name := fmt.Sprintf("p%d", i)
		began := time.Now()
		m.create(change(newPod(name, app("web"))))
		m.ready(name)
		w.mu.Lock()
		w.took["running"] = append(w.took["running"], w.at["last"].Sub(began))
		w.mu.Unlock()
		w.note("ready", began)
		b.StopTimer()
		m.delete(name, 1)
		m.eventually("deletion", func() bool { return m.get(name) == nil })
		b.StartTimer()
	}
	w.report(b)
}
