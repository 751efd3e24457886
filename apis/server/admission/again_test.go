package admission

import (
	"context"
	"errors"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
)

// rounds is a plugin that wants to be asked again, and says in which rounds it was.
type rounds struct {
	*admission.Handler
	again  bool
	refuse error
	asked  []bool // whether it was a second time
}

func (r *rounds) Admit(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	r.asked = append(r.asked, a.GetReinvocationContext().IsReinvoke())
	if r.again {
		a.GetReinvocationContext().SetShouldReinvoke()
	}
	return r.refuse
}

// TestAgain: a chain is asked a second time if a plugin wants it, never a third
// time, and not after a refusal.
func TestAgain(t *testing.T) {
	refusal := errors.New("no")
	for name, tt := range map[string]struct {
		plugin rounds
		want   []bool
	}{
		"not wanted": {rounds{}, []bool{false}},
		"wanted":     {rounds{again: true}, []bool{false, true}},
		"refused":    {rounds{again: true, refuse: refusal}, []bool{false}},
	} {
		p := &tt.plugin
		p.Handler = admission.NewHandler(admission.Create)
		chain := again{admission.NewChainHandler(p)}
		a := admission.NewAttributesRecord(&corev1.ConfigMap{}, nil, schema.GroupVersionKind{}, "ns", "x", schema.GroupVersionResource{}, "", admission.Create, nil, false, nil)
		if err := chain.Admit(t.Context(), a, nil); !errors.Is(err, p.refuse) {
			t.Errorf("%s: %v", name, err)
		}
		if !slices.Equal(p.asked, tt.want) {
			t.Errorf("%s: asked %v, want %v", name, p.asked, tt.want)
		}
		if !chain.Handles(admission.Create) || chain.Handles(admission.Delete) {
			t.Errorf("%s: it handles what its chain does not", name)
		}
		if err := chain.Validate(t.Context(), a, nil); err != nil {
			t.Errorf("%s: validate: %v", name, err)
		}
	}
}
