package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"
)

type testAgent struct {
	runs   func(context.Context) error
	closed func()
}

func (a testAgent) Handler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "agent") })
}
func (a testAgent) run(ctx context.Context) error { return a.runs(ctx) }
func (a testAgent) close()                        { a.closed() }

// TestAgentKeeper: an agent that cannot start, fails, or ends is started again;
// calls are answered all the time; what was built is closed.
func TestAgentKeeper(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var mu sync.Mutex
	var reported []string
	built, closed := 0, 0
	up := make(chan struct{})
	start := func(context.Context) (startedAgent, error) {
		built++
		a := testAgent{closed: func() { closed++ }}
		switch built {
		case 1:
			return nil, errors.New("no podmon")
		case 2:
			a.runs = func(context.Context) error { return errors.New("node: out of memory") }
		case 3:
			a.runs = func(context.Context) error { return nil }
		default:
			a.runs = func(ctx context.Context) error { close(up); <-ctx.Done(); return nil }
		}
		return a, nil
	}
	k := newAgentKeeper(slog.New(slog.DiscardHandler), start, func(_ context.Context, err error) {
		mu.Lock()
		defer mu.Unlock()
		reported = append(reported, err.Error())
	})
	k.minPause, k.maxPause = time.Millisecond, 2*time.Millisecond
	ask := func() (int, string) {
		w := httptest.NewRecorder()
		k.ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/pods", nil))
		return w.Code, w.Body.String()
	}
	if code, text := ask(); code != http.StatusServiceUnavailable {
		t.Errorf("before: %d %s", code, text)
	}
	done := make(chan error, 1)
	go func() { done <- k.Run(ctx) }()
	<-up
	if code, text := ask(); code != http.StatusOK || text != "agent" {
		t.Errorf("while it runs: %d %s", code, text)
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
	if code, _ := ask(); code != http.StatusServiceUnavailable {
		t.Errorf("after: %d", code)
	}
	mu.Lock()
	defer mu.Unlock()
	if want := []string{"no podmon", "node: out of memory", errEndedEarly.Error()}; !slices.Equal(reported, want) || built != 4 || closed != 3 {
		t.Errorf("reported %q, built %d, closed %d", reported, built, closed)
	}
}

// TestAgentKeeperGivesUp: an agent that cannot be started ends the program where
// nothing else is done by it, and one that has run does not.
func TestAgentKeeperGivesUp(t *testing.T) {
	built := 0
	start := func(context.Context) (startedAgent, error) {
		if built++; built == 2 { // the count starts again
			return testAgent{runs: func(context.Context) error { return errors.New("it ran and failed") }, closed: func() {}}, nil
		}
		return nil, errors.New("no podmon")
	}
	reported := 0
	k := newAgentKeeper(slog.New(slog.DiscardHandler), start, func(_ context.Context, err error) {
		var setup *setupError
		if reported++; errors.As(err, &setup) == (reported == 2) {
			t.Errorf("the %d. failure is reported as %v", reported, err)
		}
	})
	k.minPause, k.maxPause, k.tries = time.Millisecond, time.Millisecond, 3
	if err := k.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "no podmon") || built != 5 || reported != 5 {
		t.Errorf("%v after %d, reported %d", err, built, reported)
	}
}

// TestSetupEvents: one event, counted on; another cause is another one.
func TestSetupEvents(t *testing.T) {
	client := fake.NewClientset()
	s := setupEvents{node: "n1"}
	for _, why := range []error{errors.New("it ran"), &setupError{errors.New("a")}, &setupError{errors.New("a")}, fmt.Errorf("w: %w", &setupError{errors.New("b")})} {
		if err := s.record(t.Context(), client, why); err != nil {
			t.Fatal(err)
		}
	}
	list, err := client.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, e := range list.Items {
		got = append(got, fmt.Sprintf("%s %s %s %d", e.Reason, e.InvolvedObject.Name, e.Message, e.Count))
	}
	slices.Sort(got)
	want := []string{"KubeletSetupFailed n1 a part of the node's agent could not be started: a 2", "KubeletSetupFailed n1 a part of the node's agent could not be started: b 1"}
	if !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

func TestNotReady(t *testing.T) {
	then, now := metav1.NewTime(time.Unix(100, 0)), metav1.NewTime(time.Unix(200, 0))
	node := &corev1.Node{Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{
		{Type: corev1.NodeDiskPressure, Status: corev1.ConditionFalse},
		{Type: corev1.NodeReady, Status: corev1.ConditionTrue, LastTransitionTime: then},
	}}}
	notReady(node, errors.New("a"), now)
	c := node.Status.Conditions[1]
	if len(node.Status.Conditions) != 2 || c.Status != corev1.ConditionFalse || c.Reason != agentFailed || c.LastTransitionTime != now {
		t.Errorf("%+v", node.Status.Conditions)
	}
	later := metav1.NewTime(time.Unix(300, 0))
	notReady(node, errors.New("b"), later)
	if c := node.Status.Conditions[1]; c.LastTransitionTime != now || c.LastHeartbeatTime != later || c.Message != "the node's agent failed and is started again: b" {
		t.Errorf("%+v", c)
	}
	empty := &corev1.Node{}
	notReady(empty, errors.New("a"), now)
	if len(empty.Status.Conditions) != 1 {
		t.Errorf("%+v", empty.Status)
	}
}

// TestTogether: a part that ends without an error takes the others with it. The agent
// did not: its node was never Ready, and nothing said why.
func TestTogether(t *testing.T) {
	waits := func(ctx context.Context) error { <-ctx.Done(); return nil }
	ends := func(context.Context) error { return nil }
	done := make(chan error, 1)
	go func() { done <- together(t.Context(), []func(context.Context) error{waits, ends}) }()
	select {
	case err := <-done:
		if !errors.Is(err, errEndedEarly) {
			t.Error(err)
		}
	case <-time.After(time.Minute):
		t.Fatal("the others go on")
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := together(ctx, []func(context.Context) error{waits, waits}); err != nil {
		t.Error(err)
	}
}
