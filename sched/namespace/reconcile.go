package namespace

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Sweep is what one pass over a namespace's content found.
type Sweep struct {
	// Discovery are the groups that could not be asked what they serve.
	Discovery []error
	// Failures are the kinds whose objects could not be listed or deleted.
	Failures []error
	// Left counts the objects that are still there, by kind.
	Left map[schema.GroupResource]int
	// Finalizers counts the finalizers that hold them.
	Finalizers map[string]int
}

// Empty reports whether the namespace may go: nothing is left, and everybody
// was asked.
func (s *Sweep) Empty() bool {
	return len(s.Discovery) == 0 && len(s.Failures) == 0 && len(s.Left) == 0
}

// conditionsOf describes the sweep the way `kubectl describe namespace` shows it.
func conditionsOf(s *Sweep, old []corev1.NamespaceCondition, now time.Time) []corev1.NamespaceCondition {
	out := slices.Clone(old)
	set := func(kind corev1.NamespaceConditionType, bad bool, reason, message, fine, fineMessage string) {
		c := corev1.NamespaceCondition{Type: kind, Status: corev1.ConditionFalse, Reason: fine, Message: fineMessage, LastTransitionTime: metav1.NewTime(now)}
		if bad {
			c.Status, c.Reason, c.Message = corev1.ConditionTrue, reason, message
		}
		i := slices.IndexFunc(out, func(o corev1.NamespaceCondition) bool { return o.Type == kind })
		if i < 0 {
			out = append(out, c)
			return
		}
		if out[i].Status == c.Status {
			c.LastTransitionTime = out[i].LastTransitionTime
		}
		out[i] = c
	}
	set(corev1.NamespaceDeletionDiscoveryFailure, len(s.Discovery) > 0, "DiscoveryFailed",
		"Discovery failed for some groups, "+join(s.Discovery), "ResourcesDiscovered", "All resources successfully discovered")
	set(corev1.NamespaceDeletionGVParsingFailure, false, "", "", "ParsedGroupVersions", "All legacy kube types successfully parsed")
	set(corev1.NamespaceDeletionContentFailure, len(s.Failures) > 0, "ContentDeletionFailed",
		"Failed to delete all resource types, "+join(s.Failures), "ContentDeleted", "All content successfully deleted, may be waiting on finalization")
	set(corev1.NamespaceContentRemaining, len(s.Left) > 0, "SomeResourcesRemain",
		"Some resources are remaining: "+strings.Join(left(s.Left), ", "), "ContentRemoved", "All content successfully removed")
	set(corev1.NamespaceFinalizersRemaining, len(s.Finalizers) > 0, "SomeFinalizersRemain",
		"Some content in the namespace has finalizers remaining: "+strings.Join(finalizers(s.Finalizers), ", "), "ContentHasNoFinalizers", "All content-preserving finalizers finished")
	return out
}

func join(errs []error) string {
	words := make([]string, len(errs))
	for i, err := range errs {
		words[i] = err.Error()
	}
	slices.Sort(words)
	return fmt.Sprintf("%d remaining: %s", len(errs), strings.Join(words, ", "))
}

func left(counts map[schema.GroupResource]int) (out []string) {
	for gr, n := range counts {
		out = append(out, fmt.Sprintf("%s has %d resource instances", gr, n))
	}
	slices.Sort(out)
	return out
}

func finalizers(counts map[string]int) (out []string) {
	for name, n := range counts {
		out = append(out, fmt.Sprintf("%s in %d resource instances", name, n))
	}
	slices.Sort(out)
	return out
}
