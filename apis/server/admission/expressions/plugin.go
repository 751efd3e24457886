// Package expressions refuses webhooks and admission policies with a CEL
// expression that does not compile. Stored, it would fail every request that
// it is asked about.
package expressions

import (
	"context"
	"fmt"

	v1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/admission/plugin/cel"
	"k8s.io/apiserver/pkg/admission/plugin/policy/mutating/patch"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/admission/plugin/webhook/matchconditions"
	"k8s.io/apiserver/pkg/cel/environment"
)

// Plugin is the admission plugin.
type Plugin struct{ *admission.Handler }

var _ admission.ValidationInterface = &Plugin{}

// New makes the plugin.
func New() *Plugin { return &Plugin{admission.NewHandler(admission.Create, admission.Update)} }

// Validate implements admission.ValidationInterface.
func (p *Plugin) Validate(_ context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetResource().Group != v1.GroupName || a.GetSubresource() != "" {
		return nil
	}
	faults, err := faultsOf(a.GetObject())
	if err != nil {
		return apierrors.NewInternalError(err)
	}
	if len(faults) > 0 {
		return apierrors.NewInvalid(a.GetKind().GroupKind(), a.GetName(), faults)
	}
	return nil
}

// faultsOf compiles all expressions of an object.
func faultsOf(obj any) (field.ErrorList, error) {
	spec := field.NewPath("spec")
	switch o := obj.(type) {
	case *v1.ValidatingWebhookConfiguration:
		var all [][]v1.MatchCondition
		for i := range o.Webhooks {
			all = append(all, o.Webhooks[i].MatchConditions)
		}
		return faultsOfWebhooks(all)
	case *v1.MutatingWebhookConfiguration:
		var all [][]v1.MatchCondition
		for i := range o.Webhooks {
			all = append(all, o.Webhooks[i].MatchConditions)
		}
		return faultsOfWebhooks(all)
	case *v1.ValidatingAdmissionPolicy:
		c, err := newCompiler(o.Spec.ParamKind != nil)
		if err != nil {
			return nil, err
		}
		c.variables(o.Spec.Variables, spec.Child("variables"))
		c.conditions(o.Spec.MatchConditions, spec.Child("matchConditions"))
		for i, rule := range o.Spec.Validations {
			at := spec.Child("validations").Index(i)
			c.compile(&validating.ValidationCondition{Expression: rule.Expression}, at.Child("expression"))
			if rule.MessageExpression != "" {
				c.compileAs(&validating.MessageExpressionCondition{MessageExpression: rule.MessageExpression},
					cel.OptionalVariableDeclarations{HasParams: c.options.HasParams}, at.Child("messageExpression"))
			}
		}
		for i, annotation := range o.Spec.AuditAnnotations {
			c.compile(&validating.AuditAnnotationCondition{ValueExpression: annotation.ValueExpression},
				spec.Child("auditAnnotations").Index(i).Child("valueExpression"))
		}
		return c.faults, nil
	case *v1.MutatingAdmissionPolicy:
		c, err := newCompiler(o.Spec.ParamKind != nil)
		if err != nil {
			return nil, err
		}
		c.variables(o.Spec.Variables, spec.Child("variables"))
		c.conditions(o.Spec.MatchConditions, spec.Child("matchConditions"))
		patching := c.options
		patching.HasPatchTypes = true
		for i, m := range o.Spec.Mutations {
			at := spec.Child("mutations").Index(i)
			switch {
			case m.JSONPatch != nil:
				c.compileAs(&patch.JSONPatchCondition{Expression: m.JSONPatch.Expression}, patching, at.Child("jsonPatch", "expression"))
			case m.ApplyConfiguration != nil:
				c.compileAs(&patch.ApplyConfigurationCondition{Expression: m.ApplyConfiguration.Expression}, patching, at.Child("applyConfiguration", "expression"))
			}
		}
		return c.faults, nil
	}
	return nil, nil
}

func faultsOfWebhooks(conditions [][]v1.MatchCondition) (field.ErrorList, error) {
	var faults field.ErrorList
	for i, of := range conditions {
		if len(of) == 0 {
			continue
		}
		c, err := newCompiler(false)
		if err != nil {
			return nil, err
		}
		c.conditions(of, field.NewPath("webhooks").Index(i).Child("matchConditions"))
		faults = append(faults, c.faults...)
	}
	return faults, nil
}

// compiler compiles the expressions of one object, which share variables.
type compiler struct {
	*cel.CompositedCompiler
	options cel.OptionalVariableDeclarations
	faults  field.ErrorList
}

func newCompiler(params bool) (*compiler, error) {
	composed, err := cel.NewCompositedCompiler(environment.MustBaseEnvSet(environment.DefaultCompatibilityVersion()))
	if err != nil {
		return nil, fmt.Errorf("set up CEL: %w", err)
	}
	return &compiler{composed, cel.OptionalVariableDeclarations{HasParams: params, HasAuthorizer: true}, nil}, nil
}

func (c *compiler) variables(variables []v1.Variable, at *field.Path) {
	for i, v := range variables {
		result := c.CompileAndStoreVariable(&validating.Variable{Name: v.Name, Expression: v.Expression}, c.options, environment.NewExpressions)
		c.add(result, v.Expression, at.Index(i).Child("expression"))
	}
}

func (c *compiler) conditions(conditions []v1.MatchCondition, at *field.Path) {
	for i := range conditions {
		c.compile((*matchconditions.MatchCondition)(&conditions[i]), at.Index(i).Child("expression"))
	}
}

func (c *compiler) compile(expression cel.ExpressionAccessor, at *field.Path) {
	c.compileAs(expression, c.options, at)
}

func (c *compiler) compileAs(expression cel.ExpressionAccessor, options cel.OptionalVariableDeclarations, at *field.Path) {
	c.add(c.CompileCELExpression(expression, options, environment.NewExpressions), expression.GetExpression(), at)
}

func (c *compiler) add(result cel.CompilationResult, expression string, at *field.Path) {
	if result.Error != nil {
		c.faults = append(c.faults, field.Invalid(at, expression, result.Error.Detail))
	}
}
