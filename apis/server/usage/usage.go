// Package usage answers metrics.k8s.io: what nodes and pods use now, which is
// what `kubectl top` shows. Nothing is stored and nothing is sampled between
// requests: a request goes to the nodes concerned, which read their
// counters of processor time. Two readings some time apart make a rate.
package usage

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime"
)

const (
	// fresh is how long an answer counts: until then others get the same.
	fresh = 15 * time.Second
	// window is the shortest time over which a rate is reported. Who asks a node
	// that has not been asked of late waits that long.
	window = time.Second
	// oldest is how old a reading may be for a rate to begin with it: a rate
	// of now is no average over an hour.
	oldest = time.Minute
	// nodeTimeout bounds the requests to one node, the window between included.
	nodeTimeout = 10 * time.Second
	// limit is how much of a node's answer is read, in bytes.
	limit = 64 << 20
)

// Transport reaches the agent of a node: a transport, and the base URL to use
// with it. It may block and is called concurrently.
type Transport func(ctx context.Context, node string) (http.RoundTripper, *url.URL, error)

// Source asks nodes what they use. Its methods may be called concurrently;
// each node is asked by one of them at a time.
type Source struct {
	transport Transport

	mu    sync.Mutex // guards nodes
	nodes map[string]*node
}

// node is what is known of one.
type node struct {
	turn  chan struct{} // holds one token: who has it may use the rest
	last  *reading      // nil: it was never asked
	usage *Usage        // made with last; nil: none
}

// NewSource returns a Source that has asked no node yet.
func NewSource(transport Transport) *Source {
	return &Source{transport: transport, nodes: map[string]*node{}}
}

// Usage is what a node and the pods on it use. It is read-only.
type Usage struct {
	Node Sample
	Pods map[Pod]PodUsage
}

// Pod names a pod.
type Pod struct{ Namespace, Name string }

// PodUsage is what the running containers of a pod use, by their names.
type PodUsage map[string]Sample

// Sample is what something uses.
type Sample struct {
	At     time.Time
	Window time.Duration // over which CPU was measured, up to At
	CPU    float64       // processors
	Memory uint64        // working set, bytes
}

// list is the sample as the API says amounts.
func (s Sample) list() corev1.ResourceList {
	return corev1.ResourceList{
		corev1.ResourceCPU:    *resource.NewScaledQuantity(int64(s.CPU*1e9), resource.Nano),
		corev1.ResourceMemory: *resource.NewQuantity(int64(s.Memory), resource.BinarySI),
	}
}

// Of is what a node and its pods use, measured at most fifteen seconds ago.
// The error says why the node does not tell.
func (s *Source) Of(ctx context.Context, name string) (*Usage, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, nodeTimeout, fmt.Errorf("it has not answered within %s", nodeTimeout))
	defer cancel()
	s.mu.Lock()
	n := s.nodes[name]
	if n == nil {
		n = &node{turn: make(chan struct{}, 1)}
		n.turn <- struct{}{}
		s.nodes[name] = n
	}
	s.mu.Unlock()
	select {
	case <-n.turn:
		defer func() { n.turn <- struct{}{} }()
	case <-ctx.Done():
		return nil, fmt.Errorf("node %s: %w", name, context.Cause(ctx))
	}
	if n.usage != nil && time.Since(n.last.at) < fresh {
		return n.usage, nil
	}
	usage, last, err := s.measure(ctx, name, n.last)
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		return nil, fmt.Errorf("node %s: %w", name, err)
	}
	n.usage, n.last = usage, last
	return usage, nil
}

// Keep forgets the nodes that are none of these keys.
func (s *Source) Keep(names map[string]runtime.Object) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name := range s.nodes {
		if _, ok := names[name]; !ok {
			delete(s.nodes, name)
		}
	}
}

// measure makes rates from the last reading on. If that is no good for all
// there is now, it reads twice, a window apart.
func (s *Source) measure(ctx context.Context, name string, last *reading) (*Usage, *reading, error) {
	now, err := s.read(ctx, name)
	if err != nil {
		return nil, nil, err
	}
	var base reading
	if last != nil && now.at.Sub(last.at) >= window && now.at.Sub(last.at) <= oldest {
		base = *last
	}
	if u, all := now.since(base); all {
		return u, now, nil
	}
	select {
	case <-time.After(window):
	case <-ctx.Done():
		return nil, nil, ctx.Err()
	}
	later, err := s.read(ctx, name)
	if err != nil {
		return nil, nil, err
	}
	// What has started in between is reported the next time.
	u, _ := later.since(*now)
	return u, later, nil
}

// read asks the node.
func (s *Source) read(ctx context.Context, name string) (*reading, error) {
	if s.transport == nil {
		return nil, errors.New("this server has no way to reach it")
	}
	transport, base, err := s.transport(ctx, name)
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, base.JoinPath("/metrics/resource").String(), nil)
	if err != nil {
		return nil, err
	}
	resp, err := transport.RoundTrip(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body := http.MaxBytesReader(nil, resp.Body, limit)
	if resp.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("it answers %s", resp.Status)
	}
	return parse(body, time.Now())
}
