package node

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/resourceversion"
	"k8s.io/apimachinery/pkg/util/wait"
)

// changes wakes callers that wait for a change of the node's object.
type changes struct {
	mu             sync.Mutex // guards all below
	next           chan struct{}
	asked, written uint64 // statuses that StatusWritten waits for; the first written of them are the API's
}

// wait returns a channel that is closed with the next change.
func (n *changes) wait() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.next == nil {
		n.next = make(chan struct{})
	}
	return n.next
}

func (n *changes) wake() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.next != nil {
		close(n.next)
		n.next = nil
	}
}

// ask returns the number that written has to reach.
func (n *changes) ask() uint64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.asked++
	return n.asked
}

// begun is to be called before a status is made, its result when the API has it.
func (n *changes) begun() (done func()) {
	n.mu.Lock()
	asked := n.asked
	n.mu.Unlock()
	return func() {
		n.mu.Lock()
		n.written = max(n.written, asked)
		n.mu.Unlock()
		n.wake()
	}
}

func (n *changes) reached(number uint64) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.written >= number
}

// StatusWritten returns when a status that was made after the call is the API's.
func (n *Node) StatusWritten(ctx context.Context) error {
	number := n.changes.ask()
	n.Poke()
	for {
		changed := n.changes.wait()
		if n.changes.reached(number) {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

// Until waits for an object that cond holds for.
func (n *Node) Until(ctx context.Context, cond func(*v1.Node) bool) error {
	for {
		changed := n.changes.wait()
		if cond(n.Object()) {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		}
	}
}

// Read reads the node's object from the API, so that Object returns what it is
// now and not what the watch has brought so far. It tries until it succeeds, the
// object does not exist, or ctx ends.
func (n *Node) Read(ctx context.Context) {
	_ = wait.PollUntilContextCancel(ctx, time.Second, true, func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, n.cfg.Period)
		defer cancel()
		node, err := n.cfg.Client.CoreV1().Nodes().Get(ctx, n.cfg.Name, metav1.GetOptions{})
		if err == nil {
			n.take(node)
		}
		return err == nil || apierrors.IsNotFound(err), nil
	})
}

// SetLabels has the node carry labels beside its others. They stay when it
// registers again.
func (n *Node) SetLabels(ctx context.Context, labels map[string]string) error {
	node := n.Object()
	if node.UID == "" {
		return errors.New("the node is not registered yet")
	}
	n.mu.Lock()
	if n.labels == nil {
		n.labels = map[string]string{}
	}
	for k, v := range labels {
		n.labels[k] = v
	}
	n.mu.Unlock()
	if holds(node.Labels, labels) {
		return nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"uid": node.UID, "labels": labels}})
	if err != nil {
		return err
	}
	got, err := n.cfg.Client.CoreV1().Nodes().Patch(ctx, n.cfg.Name, types.MergePatchType, patch, metav1.PatchOptions{})
	if err != nil {
		n.mu.Lock()
		for k := range labels {
			delete(n.labels, k)
		}
		n.mu.Unlock()
		return err
	}
	n.take(got)
	return nil
}

// older reports whether a is an earlier version of b. Objects with other UIDs
// are others.
func older(a, b *v1.Node) bool {
	if a.UID != b.UID || a.ResourceVersion == "" || b.ResourceVersion == "" {
		return false
	}
	order, err := resourceversion.CompareResourceVersion(a.ResourceVersion, b.ResourceVersion)
	return err == nil && order < 0
}
