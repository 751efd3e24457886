package resource

import (
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/kind"
)

// TestTogether: objects go together if a deletion of each would leave nothing of it
// behind, and nothing to do.
func TestTogether(t *testing.T) {
	orphans := kind.Kind{OrphansByDefault: true}
	for _, tt := range []struct {
		name    string
		kind    kind.Kind
		options *metav1.DeleteOptions
		want    bool
	}{
		{"no options", kind.Kind{}, nil, false},
		{"no policy", kind.Kind{}, &metav1.DeleteOptions{}, true},
		{"background", kind.Kind{}, &metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)}, true},
		{"foreground", kind.Kind{}, &metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationForeground)}, false},
		{"dry run", kind.Kind{}, &metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}}, false},
		{"a kind that orphans, no policy", orphans, &metav1.DeleteOptions{}, false},
		{"a kind that orphans, background", orphans, &metav1.DeleteOptions{PropagationPolicy: ptr.To(metav1.DeletePropagationBackground)}, true},
	} {
		if got := together(t.Context(), strategy{kind: tt.kind}, tt.options); got != tt.want {
			t.Errorf("%s: %t, want %t", tt.name, got, tt.want)
		}
	}
}
