// Package devices refuses claims and classes of resource.k8s.io whose CEL
// expressions do not compile, may cost too much or make quantities of texts that
// are not known beforehand, and claims that ask for access for administrators in a
// namespace that is not for it.
package devices

import (
	"context"
	"fmt"

	celgo "github.com/google/cel-go/cel"
	"github.com/google/cel-go/common/ast"
	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/cel/environment"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/quantity"
)

// Namespaces finds a namespace, or fails with a NotFound StatusError.
type Namespaces interface {
	Namespace(ctx context.Context, name string) (*corev1.Namespace, error)
}

type plugin struct {
	*admission.Handler
	namespaces Namespaces
}

var _ admission.ValidationInterface = &plugin{}

// New makes the plugin.
func New(namespaces Namespaces) admission.Interface {
	return &plugin{admission.NewHandler(admission.Create, admission.Update), namespaces}
}

// Validate judges what is new: what claims ask for does not change.
func (p *plugin) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetResource().Group != resourcev1.GroupName || a.GetSubresource() != "" {
		return nil
	}
	spec := field.NewPath("spec")
	var faults field.ErrorList
	var asked *resourcev1.DeviceClaim
	switch o := a.GetObject().(type) {
	case *resourcev1.DeviceClass:
		faults = compile(o.Spec.Selectors, spec.Child("selectors"))
	case *resourcev1.ResourceClaim:
		asked, spec = &o.Spec.Devices, spec.Child("devices", "requests")
	case *resourcev1.ResourceClaimTemplate:
		asked, spec = &o.Spec.Spec.Devices, spec.Child("spec", "devices", "requests")
	}
	if asked != nil && a.GetOperation() == admission.Create {
		var err error
		if faults, err = p.judge(ctx, a.GetNamespace(), asked, spec); err != nil {
			return err
		}
	}
	if len(faults) > 0 {
		return apierrors.NewInvalid(a.GetKind().GroupKind(), a.GetName(), faults)
	}
	return nil
}

// judge finds what is wrong with the requests of a claim.
func (p *plugin) judge(ctx context.Context, namespace string, asked *resourcev1.DeviceClaim, at *field.Path) (faults field.ErrorList, _ error) {
	for i := range asked.Requests {
		r, at := &asked.Requests[i], at.Index(i)
		for j := range r.FirstAvailable {
			faults = append(faults, compile(r.FirstAvailable[j].Selectors, at.Child("firstAvailable").Index(j).Child("selectors"))...)
		}
		if r.Exactly == nil {
			continue
		}
		faults = append(faults, compile(r.Exactly.Selectors, at.Child("exactly", "selectors"))...)
		if !ptr.Deref(r.Exactly.AdminAccess, false) {
			continue
		}
		ns, err := p.namespaces.Namespace(ctx, namespace)
		if apierrors.IsNotFound(err) {
			return nil, err
		}
		if err != nil {
			return nil, apierrors.NewInternalError(fmt.Errorf("look up namespace %s: %w", namespace, err))
		}
		if ns.Labels[resourcev1.DRAAdminNamespaceLabelKey] != "true" {
			faults = append(faults, field.Forbidden(at.Child("exactly", "adminAccess"),
				fmt.Sprintf("admin access to devices requires the `%s: true` label on the containing namespace", resourcev1.DRAAdminNamespaceLabelKey)))
		}
	}
	return faults, nil
}

// compile finds selectors that are no expressions, or too dear.
func compile(selectors []resourcev1.DeviceSelector, at *field.Path) (faults field.ErrorList) {
	for i := range selectors {
		if selectors[i].CEL == nil || selectors[i].CEL.Expression == "" {
			continue // the kind's own rules say so
		}
		expression, at := selectors[i].CEL.Expression, at.Index(i).Child("cel", "expression")
		result := cel.GetCompiler(cel.Features{EnableConsumableCapacity: true}).CompileCELExpression(expression, cel.Options{EnvType: ptr.To(environment.NewExpressions)})
		switch {
		case result.Error != nil:
			faults = append(faults, field.Invalid(at, expression, result.Error.Detail))
		case result.MaxCost > resourcev1.CELSelectorExpressionMaxCost:
			faults = append(faults, field.Forbidden(at, fmt.Sprintf("too complex, exceeds cost limit (%d > %d)", result.MaxCost, uint64(resourcev1.CELSelectorExpressionMaxCost))))
		default:
			faults = append(faults, quantities(result.Environment, expression, at)...)
		}
	}
	return faults
}

// quantities finds calls that parse a quantity that may be out of bounds. No limit of an
// expression's cost ends such a call, and the scheduler makes it.
func quantities(env *celgo.Env, expression string, at *field.Path) (faults field.ErrorList) {
	checked, issues := env.Compile(expression)
	if issues.Err() != nil {
		return field.ErrorList{field.Invalid(at, expression, issues.String())} // it compiled a moment ago
	}
	ast.PreOrderVisit(checked.NativeRep().Expr(), ast.NewExprVisitor(func(e ast.Expr) {
		if e.Kind() != ast.CallKind {
			return
		}
		name, args := e.AsCall().FunctionName(), e.AsCall().Args()
		if name != "quantity" && name != "isQuantity" || len(args) != 1 {
			return
		}
		if args[0].Kind() != ast.LiteralKind {
			faults = append(faults, field.Invalid(at, expression, fmt.Sprintf(`%s() takes only a text that is written out, such as %s("1Gi")`, name, name)))
		} else if text, ok := args[0].AsLiteral().Value().(string); ok {
			if err := quantity.Bounded(text); err != nil {
				faults = append(faults, field.Invalid(at, expression, fmt.Sprintf("%s(): %v", name, err)))
			}
		}
	}))
	return faults
}
