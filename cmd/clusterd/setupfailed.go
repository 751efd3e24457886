package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/clusterd/clusterd/agent"
)

// setupError is returned when a part of the agent could not be started, as
// opposed to one that has run and failed.
type setupError struct{ err error }

func (e *setupError) Error() string { return e.err.Error() }
func (e *setupError) Unwrap() error { return e.err }

// kubeletSetupFailed is the reason of the event about it, as a kubelet tells it.
const kubeletSetupFailed = "KubeletSetupFailed"

// setupEvents tells of agents of a node that could not be started, in one event
// that is counted on.
type setupEvents struct {
	node string

	mu   sync.Mutex
	last *corev1.Event
}

// record writes the event. Another error than setupError is none of its.
func (s *setupEvents) record(ctx context.Context, client kubernetes.Interface, why error) error {
	var failed *setupError
	if !errors.As(why, &failed) {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	now := metav1.Now()
	events := client.CoreV1().Events(metav1.NamespaceDefault)
	if s.last != nil && s.last.Message == setupMessage(failed) {
		next := s.last.DeepCopy()
		next.Count++
		next.LastTimestamp = now
		if got, err := events.Update(ctx, next, metav1.UpdateOptions{}); err == nil {
			s.last = got
			return nil
		} // it is gone: another is made
	}
	got, err := events.Create(ctx, setupEvent(s.node, failed, now), metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("tell of it in an event: %w", err)
	}
	s.last = got
	return nil
}

func setupMessage(err error) string {
	const most = 1024 // of the API
	text := fmt.Sprintf("a part of the node's agent could not be started: %v", err)
	return strings.ToValidUTF8(text[:min(len(text), most)], "")
}

func setupEvent(node string, err error, now metav1.Time) *corev1.Event {
	return &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("%s.%x", node, now.UnixNano()), Namespace: metav1.NamespaceDefault,
		},
		InvolvedObject: corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: node, UID: types.UID(node)},
		Reason:         kubeletSetupFailed, Message: setupMessage(err), Type: corev1.EventTypeWarning,
		Source:         corev1.EventSource{Component: agent.EventSource, Host: node},
		FirstTimestamp: now, LastTimestamp: now, Count: 1,
	}
}

// setupTries is how often in a row the agent of a node that is nothing else may
// fail to start before the program ends, so that its starter sees it.
const setupTries = 4
