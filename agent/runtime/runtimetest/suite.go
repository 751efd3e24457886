// Package runtimetest is the contract of a container runtime as the agent sees
// it, as a test suite. The client of the real podmon passes it, and so must
// every twin that stands in for it.
package runtimetest

import (
	"context"
	"errors"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/runtime"
)

// Runtime is what the suite tests: the calls of *runtime.Client.
type Runtime interface {
	CreateSandbox(ctx context.Context, s api.Sandbox) (api.SandboxStatus, error)
	RemoveSandbox(ctx context.Context, id string) error
	StartContainer(ctx context.Context, c api.Container) (api.ContainerStatus, error)
	Signal(ctx context.Context, s api.Signal) error
	RemoveContainer(ctx context.Context, id string) error
	List(ctx context.Context) ([]api.SandboxStatus, []api.ContainerStatus, error)
	Events(ctx context.Context) (<-chan api.Event, error)
	Exec(ctx context.Context, e api.Exec, eio runtime.ExecIO) (int, error)
}

// Harness is a Runtime without sandboxes, and how to fill it.
type Harness struct {
	Runtime Runtime
	// Sandbox describes a pod's sandbox.
	Sandbox func(id string) api.Sandbox
	// Container describes a container that runs until SIGTERM, and then ends
	// with TermCode.
	Container func(sandboxID, id string) api.Container
	TermCode  int
	// Ready returns when a started container hears SIGTERM. Nil: it does at once.
	Ready func(id string)
	// Broken describes one that cannot be started: its command is "foo", which
	// does not exist. Nil: the Runtime has no such thing.
	Broken func(sandboxID, id string) api.Container
}

// Run runs the suite; each test gets a Harness of its own from open.
func Run(t *testing.T, open func(t *testing.T) Harness) {
	for _, test := range []struct {
		name string
		f    func(*suite)
	}{
		{"Lifecycle", testLifecycle},
		{"Codes", testCodes},
		{"KilledContainer", testKilled},
		{"BrokenContainer", testBroken},
		{"RemoveSandboxEndsEverything", testRemoveSandbox},
		{"EventsEndWithContext", testEventsEnd},
	} {
		t.Run(test.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			test.f(&suite{T: t, Harness: open(t), ctx: ctx})
		})
	}
}

type suite struct {
	*testing.T
	Harness
	ctx context.Context
}

func (s *suite) sandbox(id string) api.Sandbox {
	s.Helper()
	spec := s.Sandbox(id)
	spec.Labels = map[string]string{"note": id}
	st, err := s.Runtime.CreateSandbox(s.ctx, spec)
	if err != nil {
		s.Fatal(err)
	}
	if st.State != api.StateRunning || st.Sandbox.ID != id || st.CreatedAt == 0 {
		s.Fatalf("new sandbox: %+v", st)
	}
	return spec
}

func (s *suite) start(sandboxID, id string) api.ContainerStatus {
	s.Helper()
	spec := s.Container(sandboxID, id)
	spec.Labels = map[string]string{"note": id}
	st, err := s.Runtime.StartContainer(s.ctx, spec)
	if err != nil {
		s.Fatal(err)
	}
	if st.State != api.StateRunning || st.Container.ID != id || st.StartedAt == 0 || st.StartError != "" {
		s.Fatalf("new container: %+v", st)
	}
	if s.Ready != nil {
		s.Ready(id)
	}
	return st
}

// next waits for the next event about id.
func (s *suite) next(events <-chan api.Event, kind, id string) api.Event {
	s.Helper()
	for {
		select {
		case e, ok := <-events:
			if !ok {
				s.Fatalf("events ended before %s of %s", kind, id)
			}
			if e.Kind == kind && e.ID == id {
				return e
			}
		case <-s.ctx.Done():
			s.Fatalf("no %s of %s", kind, id)
		}
	}
}

func (s *suite) wantCode(what string, err error, code string) {
	s.Helper()
	var e *api.Error
	if !errors.As(err, &e) || e.Code != code {
		s.Errorf("%s: got %v, want code %s", what, err, code)
	}
}

// term ends a container in order.
func (s *suite) term(id string, events <-chan api.Event) api.ContainerStatus {
	s.Helper()
	if err := s.Runtime.Signal(s.ctx, api.Signal{ID: id, Signal: int(syscall.SIGTERM)}); err != nil {
		s.Fatal(err)
	}
	e := s.next(events, "containerExited", id)
	if e.Container == nil {
		s.Fatal("event without the container's status")
	}
	return *e.Container
}

func testLifecycle(s *suite) {
	events, err := s.Runtime.Events(s.ctx)
	if err != nil {
		s.Fatal(err)
	}
	s.sandbox("p")
	s.start("p", "c")
	if e := s.next(events, "containerStarted", "c"); e.Container == nil || e.Container.State != api.StateRunning {
		s.Errorf("event of a start: %+v", e)
	}
	sandboxes, containers, err := s.Runtime.List(s.ctx)
	if err != nil || len(sandboxes) != 1 || len(containers) != 1 {
		s.Fatalf("list: %v %v %v", sandboxes, containers, err)
	}
	if sandboxes[0].Sandbox.Labels["note"] != "p" || containers[0].Container.Labels["note"] != "c" {
		s.Errorf("labels: %v %v", sandboxes[0].Sandbox.Labels, containers[0].Container.Labels)
	}
	st := s.term("c", events)
	if st.State != api.StateExited || st.ExitCode != s.TermCode || st.FinishedAt < st.StartedAt || st.OOMKilled || st.Lost {
		s.Errorf("ended container: %+v", st)
	}
	// It is kept until it is removed.
	if _, containers, err = s.Runtime.List(s.ctx); err != nil || len(containers) != 1 || containers[0].State != api.StateExited {
		s.Errorf("list after the end: %v %v", containers, err)
	}
	for range 2 { // idempotent
		if err := s.Runtime.RemoveContainer(s.ctx, "c"); err != nil {
			s.Error(err)
		}
		if err := s.Runtime.RemoveSandbox(s.ctx, "p"); err != nil {
			s.Error(err)
		}
	}
	if sandboxes, containers, err = s.Runtime.List(s.ctx); err != nil || len(sandboxes)+len(containers) > 0 {
		s.Errorf("list after removal: %v %v %v", sandboxes, containers, err)
	}
	s.sandbox("p") // its name is free again
	s.start("p", "c")
	if err := s.Runtime.RemoveSandbox(s.ctx, "p"); err != nil {
		s.Error(err)
	}
}

func testCodes(s *suite) {
	s.sandbox("p")
	s.start("p", "c")
	_, err := s.Runtime.CreateSandbox(s.ctx, s.Sandbox("p"))
	s.wantCode("create a second time", err, api.CodeExists)
	_, err = s.Runtime.StartContainer(s.ctx, s.Container("p", "c"))
	s.wantCode("start a second time", err, api.CodeExists)
	_, err = s.Runtime.StartContainer(s.ctx, s.Container("none", "d"))
	s.wantCode("start nowhere", err, api.CodeNotFound)
	s.wantCode("signal to nobody", s.Runtime.Signal(s.ctx, api.Signal{ID: "none", Signal: 15}), api.CodeNotFound)
	s.wantCode("remove a running one", s.Runtime.RemoveContainer(s.ctx, "c"), api.CodeBusy)
	_, err = s.Runtime.Exec(s.ctx, api.Exec{ContainerID: "none", Args: []string{"x"}}, runtime.ExecIO{})
	s.wantCode("exec nowhere", err, api.CodeNotFound)
	if err := s.Runtime.RemoveSandbox(s.ctx, "p"); err != nil {
		s.Error(err)
	}
}

func testKilled(s *suite) {
	events, err := s.Runtime.Events(s.ctx)
	if err != nil {
		s.Fatal(err)
	}
	s.sandbox("p")
	s.start("p", "c")
	if err := s.Runtime.Signal(s.ctx, api.Signal{ID: "c", Signal: int(syscall.SIGKILL)}); err != nil {
		s.Fatal(err)
	}
	e := s.next(events, "containerExited", "c")
	if e.Container == nil || e.Container.ExitCode != 137 || e.Container.Signal != 9 || e.Container.OOMKilled {
		s.Errorf("event of a kill: %+v", e.Container)
	}
	s.wantCode("signal after the end", s.Runtime.Signal(s.ctx, api.Signal{ID: "c", Signal: 15}), api.CodeNotRunning)
	_, err = s.Runtime.Exec(s.ctx, api.Exec{ContainerID: "c", Args: []string{"x"}}, runtime.ExecIO{})
	s.wantCode("exec after the end", err, api.CodeNotRunning)
	if err := s.Runtime.RemoveSandbox(s.ctx, "p"); err != nil {
		s.Error(err)
	}
}

func testBroken(s *suite) {
	if s.Broken == nil {
		s.Skip("this runtime starts everything")
	}
	s.sandbox("p")
	st, err := s.Runtime.StartContainer(s.ctx, s.Broken("p", "c"))
	if err != nil {
		s.Fatal(err)
	}
	if st.State != api.StateExited || st.ExitCode != 128 || !strings.Contains(st.StartError, `exec: "foo": executable file not found in $PATH`) {
		s.Errorf("status: %+v", st)
	}
	if _, containers, err := s.Runtime.List(s.ctx); err != nil || len(containers) != 1 || containers[0].StartError != st.StartError {
		s.Errorf("list: %v %v", containers, err)
	}
	if err := s.Runtime.RemoveSandbox(s.ctx, "p"); err != nil {
		s.Error(err)
	}
}

func testRemoveSandbox(s *suite) {
	s.sandbox("p")
	s.sandbox("q")
	s.start("p", "a")
	s.start("p", "b")
	s.start("q", "other")
	if err := s.Runtime.RemoveSandbox(s.ctx, "p"); err != nil {
		s.Fatal(err)
	}
	sandboxes, containers, err := s.Runtime.List(s.ctx)
	if err != nil || len(sandboxes) != 1 || len(containers) != 1 || containers[0].Container.ID != "other" || containers[0].State != api.StateRunning {
		s.Errorf("list: %v %v %v", sandboxes, containers, err)
	}
	if err := s.Runtime.RemoveSandbox(s.ctx, "q"); err != nil {
		s.Error(err)
	}
}

func testEventsEnd(s *suite) {
	ctx, cancel := context.WithCancel(s.ctx)
	events, err := s.Runtime.Events(ctx)
	if err != nil {
		s.Fatal(err)
	}
	cancel()
	for {
		select {
		case _, ok := <-events:
			if !ok {
				return
			}
		case <-s.ctx.Done():
			s.Fatal("events go on after their context has ended")
		}
	}
}
