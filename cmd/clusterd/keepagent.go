package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// An agent that failed is started again after a pause that doubles from
// minAgentPause to maxAgentPause; one that ran for steadyAgent starts at minAgentPause again.
// maxAgentPause is below the time after which a node that says nothing is
// Unknown, so that its own reason stays to be seen.
const (
	minAgentPause = time.Second
	maxAgentPause = 20 * time.Second
	steadyAgent   = 5 * time.Minute
)

// agentKeeper runs a node's agent, and again when it has failed: the store, the
// API and the votes of this node do not depend on it.
type agentKeeper struct {
	log *slog.Logger
	// start builds an agent.
	start func(context.Context) (startedAgent, error)
	// failed tells the cluster why this node has no agent.
	failed func(context.Context, error)
	// handler of the agent that runs, nil while none does.
	handler atomic.Pointer[http.Handler]
	// minPause and maxPause are as the constants say.
	minPause, maxPause time.Duration
	// tries is how often in a row an agent may fail to start before Run gives up;
	// 0: without a limit, as more than the agent depends on this process.
	tries int
}

// startedAgent is an agent that was built, to be run once and closed.
type startedAgent interface {
	Handler() http.Handler
	run(context.Context) error
	close()
}

func newAgentKeeper(log *slog.Logger, start func(context.Context) (startedAgent, error), failed func(context.Context, error)) *agentKeeper {
	return &agentKeeper{log: log, start: start, failed: failed, minPause: minAgentPause, maxPause: maxAgentPause}
}

// Run keeps an agent running until ctx ends.
func (k *agentKeeper) Run(ctx context.Context) error {
	pause, failed := k.minPause, 0
	for {
		began := time.Now()
		err := k.once(ctx)
		if ctx.Err() != nil {
			return err
		}
		if err == nil {
			err = errEndedEarly
		}
		if time.Since(began) >= steadyAgent {
			pause = k.minPause
		}
		var setup *setupError
		if failed++; !errors.As(err, &setup) {
			failed = 0
		}
		if failed > 0 && failed == k.tries {
			k.failed(ctx, err)
			return fmt.Errorf("the node's agent could not be started, %d times in a row: containers run on: %w", failed, err)
		}
		k.log.Error("the node's agent failed: containers run on, and it is started again", "in", pause, "err", err)
		k.failed(ctx, err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(pause):
		}
		pause = min(2*pause, k.maxPause)
	}
}

func (k *agentKeeper) once(ctx context.Context) error {
	a, err := k.start(ctx)
	if err != nil {
		return &setupError{err}
	}
	defer a.close()
	h := a.Handler()
	k.handler.Store(&h)
	defer k.handler.Store(nil)
	return a.run(ctx)
}

// runs reports whether an agent runs now.
func (k *agentKeeper) runs() bool { return k.handler.Load() != nil }

// ServeHTTP answers the node's calls: it listens whether or not an agent runs.
func (k *agentKeeper) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if h := k.handler.Load(); h != nil {
		(*h).ServeHTTP(w, r)
		return
	}
	w.Header().Set("Retry-After", "1")
	http.Error(w, "the agent of this node does not run at the moment: see the node's Ready condition", http.StatusServiceUnavailable)
}

// agentFailed is the reason of a Ready condition without an agent.
const agentFailed = "AgentFailed"

// reportNotReady writes into the Node why it takes no pods. The agent's own
// status follows once it runs again.
func reportNotReady(log *slog.Logger, name string, clients *rest.Config) func(context.Context, error) {
	events := setupEvents{node: name}
	return func(ctx context.Context, why error) {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		err := func() error {
			client, err := kubernetes.NewForConfig(clients)
			if err != nil {
				return err
			}
			if err := events.record(ctx, client, why); err != nil {
				log.Warn("the start that failed is in the log alone", "err", err)
			}
			node, err := client.CoreV1().Nodes().Get(ctx, name, metav1.GetOptions{})
			if apierrors.IsNotFound(err) {
				return nil // it has never been ready
			}
			if err != nil {
				return err
			}
			notReady(node, why, metav1.Now())
			_, err = client.CoreV1().Nodes().UpdateStatus(ctx, node, metav1.UpdateOptions{})
			return err
		}()
		if err != nil && ctx.Err() == nil {
			log.Warn("the failure of the agent could not be written to the Node", "err", err)
		}
	}
}

// notReady sets the Ready condition of a Node whose agent failed.
func notReady(node *corev1.Node, why error, now metav1.Time) {
	c := corev1.NodeCondition{
		Type: corev1.NodeReady, Status: corev1.ConditionFalse, Reason: agentFailed,
		Message: fmt.Sprintf("the node's agent failed and is started again: %v", why), LastHeartbeatTime: now, LastTransitionTime: now,
	}
	for i := range node.Status.Conditions {
		old := &node.Status.Conditions[i]
		if old.Type != c.Type {
			continue
		}
		if old.Status == c.Status {
			c.LastTransitionTime = old.LastTransitionTime
		}
		*old = c
		return
	}
	node.Status.Conditions = append(node.Status.Conditions, c)
}
