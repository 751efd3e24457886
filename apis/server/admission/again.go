package admission

import (
	"context"

	"k8s.io/apiserver/pkg/admission"
)

// again asks a chain a second time, once, where a plugin of it wants that: when a
// webhook or a policy whose reinvocationPolicy is IfNeeded was asked before others
// changed the object. Which of them are asked again they find in the request's
// ReinvocationContext; plugins of the list are asked both times and have to leave
// what they completed as it is. The library's own of this kind is not exported.
type again struct{ admission.Interface }

var (
	_ admission.MutationInterface   = again{}
	_ admission.ValidationInterface = again{}
)

// Admit implements admission.MutationInterface.
func (c again) Admit(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
	chain, ok := c.Interface.(admission.MutationInterface)
	if !ok {
		return nil
	}
	if err := chain.Admit(ctx, a, o); err != nil {
		return err
	}
	round := a.GetReinvocationContext()
	if !round.ShouldReinvoke() {
		return nil
	}
	round.SetIsReinvoke()
	return chain.Admit(ctx, a, o)
}

// Validate implements admission.ValidationInterface.
func (c again) Validate(ctx context.Context, a admission.Attributes, o admission.ObjectInterfaces) error {
	if chain, ok := c.Interface.(admission.ValidationInterface); ok {
		return chain.Validate(ctx, a, o)
	}
	return nil
}
