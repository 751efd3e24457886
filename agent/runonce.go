package agent

import (
	"context"
	"fmt"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/agent/pod"
	"github.com/clusterd/clusterd/agent/static"
	"github.com/clusterd/clusterd/apis/core"
)

// PodResult is how a pod of a run-once has ended.
type PodResult struct {
	Name  string
	Phase v1.PodPhase
	// Why it failed, "": it did not.
	Why string
}

// RunOnce runs the pods of cfg's static sources to their end, tears them down
// and returns how each ended. onEnd is called for each as it ends. It is for an
// agent without an API; containers run on if ctx ends before they have.
func RunOnce(ctx context.Context, cfg Config, onEnd func(PodResult)) ([]PodResult, error) {
	once, err := static.ReadOnce(ctx, static.Config{NodeName: cfg.NodeName, Dir: cfg.StaticDir, URL: cfg.StaticURL})
	if err != nil {
		return nil, err
	}
	cfg.statics = once
	a, err := New(cfg)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() {
		defer cancel() // an agent that failed waits for no pod
		done <- a.Run(ctx)
	}()
	results, err := a.untilEnded(ctx, once, onEnd)
	cancel()
	if rerr := <-done; rerr != nil {
		err = rerr
	}
	return results, err
}

// lookAgain is how often the pods of a run-once are looked at.
const lookAgain = 50 * time.Millisecond

// untilEnded waits for the end of each pod, and until nothing is left of them.
func (a *Agent) untilEnded(ctx context.Context, once *static.Once, onEnd func(PodResult)) ([]PodResult, error) {
	tick := time.NewTicker(lookAgain)
	defer tick.Stop()
	results := map[types.UID]PodResult{}
	left := func() (names []string) {
		for _, p := range once.Pods() {
			if _, ended := results[p.UID]; !ended {
				names = append(names, p.Name)
			}
		}
		return names
	}
	for len(left()) > 0 {
		for _, v := range a.pods.Views() {
			if _, known := results[v.Pod.UID]; !known && v.Status != nil && core.FinalPhase(v.Status.Phase) {
				r := resultOf(v)
				results[v.Pod.UID] = r
				onEnd(r)
			}
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("ended before these pods have, whose containers run on: %s", strings.Join(left(), ", "))
		case <-tick.C:
		}
	}
	once.Release()
	for len(a.pods.Views()) > 0 {
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("ended before all was removed of the pods, which have ended")
		case <-tick.C:
		}
	}
	var out []PodResult
	for _, p := range once.Pods() {
		out = append(out, results[p.UID])
	}
	return out, nil
}

// resultOf tells a pod's end in a sentence.
func resultOf(v *pod.View) PodResult {
	r := PodResult{Name: v.Pod.Name, Phase: v.Status.Phase}
	if r.Phase == v1.PodSucceeded {
		return r
	}
	var words []string
	if v.Status.Reason != "" || v.Status.Message != "" {
		words = append(words, strings.TrimSpace(v.Status.Reason+" "+v.Status.Message))
	}
	for _, list := range [][]v1.ContainerStatus{v.Status.InitContainerStatuses, v.Status.ContainerStatuses} {
		for _, c := range list {
			if t := c.State.Terminated; t != nil && t.ExitCode != 0 {
				words = append(words, fmt.Sprintf("container %s: %s, exit code %d", c.Name, t.Reason, t.ExitCode))
			}
		}
	}
	r.Why = strings.Join(words, "; ")
	return r
}
