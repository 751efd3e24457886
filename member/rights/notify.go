package rights

import (
	"context"
	"errors"
	"math"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/apimachinery/pkg/util/wait"
)

const (
	// notifyRetry is after how long an agent that did not answer is notified again, at first, and
	// notifyRetryMost at last. notifyTimeout is how long it may take.
	notifyRetry     = time.Second
	notifyRetryMost = 30 * time.Second
	notifyTimeout   = 5 * time.Second
	// notifyAtOnce bounds how many are notified at the same time.
	notifyAtOnce = 64
)

// ErrUnsupported is returned by Send when the agent cannot be notified because its version knows
// no such call. It asks by itself, every half minute.
var ErrUnsupported = errors.New("the agent cannot be notified of removed servers")

// Notifier notifies agents of removed servers as soon as this server has applied the removal, and
// those that connect. One server's notification is enough, and every server sends one: the
// removed one cannot keep an agent from learning of it.
type Notifier struct {
	// Rights has the ids of removed servers that agents must refuse.
	Rights *Rights
	// Agents are those that are connected: names by id.
	Agents func() map[string]string
	// Arrivals is signalled when an agent has connected.
	Arrivals func() <-chan struct{}
	// Send sends an agent, by name, the ids. It may block until ctx ends, and is called concurrently.
	Send func(ctx context.Context, name string, ids []string) error

	// confirmed is what each agent that is connected has confirmed to know, by its id; of
	// Run's goroutine.
	confirmed map[string][]string
}

// Run works until ctx ends.
func (n *Notifier) Run(ctx context.Context) error {
	retry := notifyBackoff()
	for {
		changed := n.Rights.Changed()
		var again <-chan time.Time
		if n.notify(ctx, n.Rights.RemovedServers()) {
			retry = notifyBackoff()
		} else {
			again = time.After(retry.Step())
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
			retry = notifyBackoff()
		case <-n.Arrivals():
		case <-again:
		}
	}
}

func notifyBackoff() wait.Backoff {
	return wait.Backoff{Duration: notifyRetry, Factor: 2, Jitter: 0.1, Steps: math.MaxInt32, Cap: notifyRetryMost}
}

// notify sends the ids to those who lack one, and reports whether all know them now.
func (n *Notifier) notify(ctx context.Context, ids []string) (all bool) {
	agents := n.Agents()
	if len(ids) == 0 {
		n.confirmed = nil
		return true
	}
	confirmed := map[string][]string{}
	var mu sync.Mutex // guards confirmed, all
	sending, all := errgroup.Group{}, true
	sending.SetLimit(notifyAtOnce)
	for id, name := range agents {
		has := n.confirmed[id]
		if !slices.ContainsFunc(ids, func(one string) bool { return !slices.Contains(has, one) }) {
			mu.Lock()
			confirmed[id] = has
			mu.Unlock()
			continue
		}
		sending.Go(func() error {
			ctx, cancel := context.WithTimeout(ctx, notifyTimeout)
			defer cancel()
			err := n.Send(ctx, name, ids)
			mu.Lock()
			defer mu.Unlock()
			if err == nil || errors.Is(err, ErrUnsupported) {
				confirmed[id] = ids
			} else {
				all = false
			}
			return nil
		})
	}
	_ = sending.Wait()
	n.confirmed = confirmed
	return all
}
