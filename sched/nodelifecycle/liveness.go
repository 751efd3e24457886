package nodelifecycle

import (
	"context"
	"errors"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/sched/loop"
)

// Liveness reports nodes that seem dead; see sched.Liveness.
type Liveness interface {
	Suspects() <-chan string
	Confirm(ctx context.Context, node string) error
}

const (
	// confirmTries questions decide whether a suspected node is dead, each with its
	// own deadline: together at most 1.5 s. The next follows when the time of the one
	// before is over.
	confirmTries   = 2
	confirmTimeout = 750 * time.Millisecond
	// refusedTries takes their place while connections are refused: the machine is
	// there, and clusterd may be starting again while the containers run on.
	refusedTries = 6
	// A question that ends lateBy after its deadline shows that this server has no
	// processor to hear an answer with: up to lateTries of them do not count.
	lateBy    = confirmTimeout / 4
	lateTries = 4
	// asksInFlight bounds how many nodes are asked at once.
	asksInFlight = 32
	// againEvery is how often a node taken for dead is asked again.
	againEvery = 5 * time.Second
)

// listen follows up suspicions until ctx ends. A suspicion alone changes
// nothing: overloaded members are known to accuse healthy ones.
//
//	alive ── gossip suspects ──► asked ── answers ──► alive
//	                               │ two silences
//	                               ▼
//	              dead ── answers, or a heartbeat ──► alive
func (c *controller) listen(ctx context.Context) {
	var asks errgroup.Group
	asks.SetLimit(asksInFlight)
	defer asks.Wait() //nolint:errcheck // asks return nil

	var mu sync.Mutex
	asking := map[string]bool{} // true: asked for again meanwhile
	ask := func(node string) {
		mu.Lock()
		_, busy := asking[node]
		asking[node] = busy
		mu.Unlock()
		if busy {
			return
		}
		asks.Go(func() error {
			for more := true; more && ctx.Err() == nil; {
				c.confirm(ctx, node)
				mu.Lock()
				if more = asking[node]; more {
					asking[node] = false
				} else {
					delete(asking, node)
				}
				mu.Unlock()
			}
			return nil
		})
	}

	// A new leader has missed the suspicions of its predecessor's time, not the
	// least those about its predecessor: it asks all nodes once.
	for _, node := range c.allNodes() {
		ask(node)
	}
	again := time.NewTicker(againEvery)
	defer again.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case node, ok := <-c.cfg.Liveness.Suspects():
			if !ok {
				return
			}
			ask(node)
		case <-again.C:
			for _, node := range c.deadNodes() {
				ask(node)
			}
		}
	}
}

func (c *controller) allNodes() (out []string) {
	nodes, err := c.nodes.List(labels.Everything())
	if err != nil {
		return nil
	}
	for _, node := range nodes {
		out = append(out, node.Name)
	}
	return out
}

func (c *controller) deadNodes() (out []string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for name, s := range c.seen {
		if s.dead {
			out = append(out, name)
		}
	}
	return out
}

// confirm asks the node and notes the outcome.
func (c *controller) confirm(ctx context.Context, node string) {
	begin := c.clock.Now()
	err := c.question(ctx, node)
	if ctx.Err() != nil {
		return
	}
	if _, missing := c.nodes.Get(node); missing != nil {
		return // no such Node: gossip knows members that are none
	}
	c.mu.Lock()
	s := c.entry(node)
	// A heartbeat that came while we were asking is an answer too.
	dead := err != nil && !s.heartbeat.After(begin)
	changed := s.dead != dead
	s.dead = dead
	c.count(s)
	c.mu.Unlock()
	if !changed {
		return
	}
	klog.FromContext(ctx).Info("suspected node was asked", "node", node, "dead", dead, "took", c.clock.Since(begin), "err", err)
	c.Enqueue(loop.Key{Name: node})
}

// question asks the node until it answers or is to be taken for dead: then it returns
// the last error, as when ctx has ended.
func (c *controller) question(ctx context.Context, node string) (err error) {
	for try, late := 1, 0; ; try++ {
		began, over := time.Now(), time.After(confirmTimeout)
		err = c.ask(ctx, node)
		if late < lateTries && err != nil && ctx.Err() == nil && time.Since(began) > confirmTimeout+lateBy {
			late++
			try--
			continue
		}
		tries := confirmTries
		if errors.Is(err, syscall.ECONNREFUSED) {
			tries = refusedTries
		}
		if err == nil || try >= tries || ctx.Err() != nil {
			break
		}
		select {
		case <-over:
		case <-ctx.Done():
		}
	}
	return err
}

func (c *controller) ask(ctx context.Context, node string) error {
	ctx, cancel := context.WithTimeout(ctx, confirmTimeout)
	defer cancel()
	return c.cfg.Liveness.Confirm(ctx, node)
}
