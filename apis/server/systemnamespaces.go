package server

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/apis/server/admission/namespacelifecycle"
)

// systemNamespaces makes the namespaces that every cluster has. It needs a
// store that takes writes, which may be a while after the process started, so
// it tries until it has succeeded once.
type systemNamespaces struct {
	client func() *rest.Config
	done   atomic.Bool
}

func newSystemNamespaces(client func() *rest.Config) *systemNamespaces {
	return &systemNamespaces{client: client}
}

var errNoSystemNamespaces = errors.New("the system's namespaces have not been created yet")

// check is nil once the namespaces are there.
func (n *systemNamespaces) check() error {
	if n.done.Load() {
		return nil
	}
	return errNoSystemNamespaces
}

// run blocks until the namespaces are there or ctx ends.
func (n *systemNamespaces) run(ctx context.Context) error {
	client, err := v1.NewForConfig(n.client())
	if err != nil {
		return fmt.Errorf("client for the system's namespaces: %w", err)
	}
	backoff := wait.Backoff{Duration: 20 * time.Millisecond, Factor: 1.5, Jitter: 0.2, Steps: 10, Cap: time.Second}
	for {
		err := n.create(ctx, client.Namespaces())
		if err == nil {
			n.done.Store(true)
			return nil
		}
		klog.FromContext(ctx).V(2).Info("System namespaces not created yet, trying again", "err", err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(backoff.Step()):
		}
	}
}

func (n *systemNamespaces) create(ctx context.Context, client v1.NamespaceInterface) error {
	// Most starts find them: one request instead of four.
	known, err := client.List(ctx, metav1.ListOptions{LabelSelector: corev1.LabelMetadataName + " in (" + strings.Join(namespacelifecycle.Immortal, ",") + ")"})
	if err != nil {
		return fmt.Errorf("list the system's namespaces: %w", err)
	}
	for _, name := range namespacelifecycle.Immortal {
		if slices.ContainsFunc(known.Items, func(n corev1.Namespace) bool { return n.Name == name }) {
			continue
		}
		_, err := client.Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("create namespace %s: %w", name, err)
		}
	}
	return nil
}
