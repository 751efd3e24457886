package pod

import (
	"context"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// handlerRunc is the one way in which this node runs pods: libcontainer, the
// library of runc.
const handlerRunc = "runc"

// RuntimeHandlers are the ways in which this node can run pods, for the Node's
// status. The one without a name is for pods without a RuntimeClass (KEP-585).
// What they can do beside the usual (features) is the same for all.
func RuntimeHandlers(features *v1.NodeRuntimeHandlerFeatures) []v1.NodeRuntimeHandler {
	return []v1.NodeRuntimeHandler{{Name: "", Features: features}, {Name: handlerRunc, Features: features}}
}

// checkHandler looks whether the node has the handler that the pod's
// RuntimeClass names. The class is read when a sandbox is made: a running pod
// keeps what it was made with.
func (m *Manager) checkHandler(ctx context.Context, pod *v1.Pod) error {
	class := pod.Spec.RuntimeClassName
	if class == nil || *class == "" {
		return nil
	}
	if m.cfg.Client == nil {
		return fmt.Errorf("RuntimeClass %q cannot be read, because this node has no API: remove spec.runtimeClassName", *class)
	}
	// A copy that is a moment old will do: a handler is never changed.
	found, err := m.cfg.Client.NodeV1().RuntimeClasses().Get(ctx, *class, metav1.GetOptions{ResourceVersion: "0"})
	switch {
	case apierrors.IsNotFound(err):
		return fmt.Errorf("RuntimeClass %q not found", *class)
	case err != nil:
		return fmt.Errorf("read RuntimeClass %q: %w", *class, err)
	}
	var names []string
	for _, h := range RuntimeHandlers(nil) {
		if h.Name != "" {
			names = append(names, h.Name)
		}
	}
	if !slices.Contains(names, found.Handler) {
		return fmt.Errorf("no runtime for %q is configured: RuntimeClass %q asks for that handler, and this node has %s", found.Handler, *class, strings.Join(names, ", "))
	}
	return nil
}
