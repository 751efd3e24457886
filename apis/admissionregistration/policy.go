package admissionregistration

import (
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

var (
	kindColumn   = cells.Text("ParamKind", "ParamKind specifies the kind of resources used to parameterize this policy")
	refColumn    = cells.Text("ParamRef", "ParamRef specifies the resource used to parameterize the policy")
	policyColumn = cells.Text("PolicyName", "PolicyName indicates the policy definition which the policy binding binded to")
)

// ValidatingAdmissionPolicy is the kind ValidatingAdmissionPolicy.
func ValidatingAdmissionPolicy() kind.Kind {
	return kind.Typed[*v1.ValidatingAdmissionPolicy]{
		GVK:        v1.SchemeGroupVersion.WithKind("ValidatingAdmissionPolicy"),
		Resource:   "validatingadmissionpolicies",
		Singular:   "validatingadmissionpolicy",
		Categories: []string{"api-extensions"},

		New:     func() runtime.Object { return &v1.ValidatingAdmissionPolicy{} },
		NewList: func() runtime.Object { return &v1.ValidatingAdmissionPolicyList{} },

		Default: func(p *v1.ValidatingAdmissionPolicy) {
			setDefault(&p.Spec.FailurePolicy, v1.Fail)
			defaultMatch(p.Spec.MatchConstraints)
		},
		PrepareCreate: func(p *v1.ValidatingAdmissionPolicy) {
			p.Status = v1.ValidatingAdmissionPolicyStatus{}
			p.Generation = 1
		},
		PrepareUpdate: func(p, old *v1.ValidatingAdmissionPolicy) {
			p.Status = old.Status
			p.Generation = generation(old, !equality.Semantic.DeepEqual(p.Spec, old.Spec))
		},
		Validate: func(p *v1.ValidatingAdmissionPolicy) field.ErrorList {
			return append(validateMeta(p), validateValidating(&p.Spec, field.NewPath("spec"))...)
		},
		ValidateUpdate: func(p, old *v1.ValidatingAdmissionPolicy) field.ErrorList {
			return append(validateMetaUpdate(p, old), validateValidating(&p.Spec, field.NewPath("spec"))...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name, cells.Number("Validations", "Validations indicates the number of validation rules defined in this configuration"), kindColumn, cells.Age,
		},
		Row: func(p *v1.ValidatingAdmissionPolicy, now time.Time) []any {
			return []any{p.Name, int64(len(p.Spec.Validations)), paramKind(p.Spec.ParamKind), cells.Since(p.CreationTimestamp, now)}
		},

		Status: &kind.TypedStatus[*v1.ValidatingAdmissionPolicy]{
			PrepareUpdate: func(p, old *v1.ValidatingAdmissionPolicy) {
				p.Spec = old.Spec
				p.Generation = old.Generation
			},
			ValidateUpdate: func(p, old *v1.ValidatingAdmissionPolicy) field.ErrorList { return validateMetaUpdate(p, old) },
		},
	}.Kind()
}

var reasons = []metav1.StatusReason{
	metav1.StatusReasonForbidden, metav1.StatusReasonInvalid, metav1.StatusReasonRequestEntityTooLarge, metav1.StatusReasonUnauthorized,
}

func validateValidating(spec *v1.ValidatingAdmissionPolicySpec, at *field.Path) field.ErrorList {
	errs := check.OneOfOrNil(at.Child("failurePolicy"), spec.FailurePolicy, v1.Fail, v1.Ignore)
	errs = append(errs, validateParamKind(spec.ParamKind, at.Child("paramKind"))...)
	errs = append(errs, validateMatch(spec.MatchConstraints, true, at.Child("matchConstraints"))...)
	errs = append(errs, validateConditions(spec.MatchConditions, at.Child("matchConditions"))...)
	errs = append(errs, validateVariables(spec.Variables, at.Child("variables"))...)
	if len(spec.Validations)+len(spec.AuditAnnotations) == 0 {
		errs = append(errs, field.Required(at.Child("validations"), "validations or auditAnnotations must be non-empty"))
	}
	for i, v := range spec.Validations {
		at := at.Child("validations").Index(i)
		errs = append(errs, required(v.Expression, at.Child("expression"))...)
		switch {
		case v.Message != "" && strings.TrimSpace(v.Message) == "":
			errs = append(errs, field.Invalid(at.Child("message"), v.Message, "message must be non-empty if specified"))
		case strings.Contains(v.Message, "\n"):
			errs = append(errs, field.Invalid(at.Child("message"), v.Message, "message must not contain line breaks"))
		case strings.Contains(strings.TrimSpace(v.Expression), "\n") && v.Message == "":
			errs = append(errs, field.Required(at.Child("message"), "message must be specified if expression contains line breaks"))
		}
		errs = append(errs, check.OneOfOrNil(at.Child("reason"), v.Reason, reasons...)...)
	}
	seen := map[string]bool{}
	for i, a := range spec.AuditAnnotations {
		at := at.Child("auditAnnotations").Index(i)
		errs = append(errs, check.RequiredText(at.Child("key"), a.Key, validation.IsQualifiedName)...)
		if seen[a.Key] {
			errs = append(errs, field.Duplicate(at.Child("key"), a.Key))
		}
		seen[a.Key] = true
		errs = append(errs, required(a.ValueExpression, at.Child("valueExpression"))...)
	}
	return errs
}

// ValidatingAdmissionPolicyBinding is the kind ValidatingAdmissionPolicyBinding.
func ValidatingAdmissionPolicyBinding() kind.Kind {
	validate := func(spec *v1.ValidatingAdmissionPolicyBindingSpec, at *field.Path) field.ErrorList {
		errs := check.RequiredText(at.Child("policyName"), spec.PolicyName, check.Subdomain)
		errs = append(errs, validateParamRef(spec.ParamRef, at.Child("paramRef"))...)
		errs = append(errs, validateMatch(spec.MatchResources, false, at.Child("matchResources"))...)
		return append(errs, validateActions(spec.ValidationActions, at.Child("validationActions"))...)
	}
	return kind.Typed[*v1.ValidatingAdmissionPolicyBinding]{
		GVK:        v1.SchemeGroupVersion.WithKind("ValidatingAdmissionPolicyBinding"),
		Resource:   "validatingadmissionpolicybindings",
		Singular:   "validatingadmissionpolicybinding",
		Categories: []string{"api-extensions"},

		New:     func() runtime.Object { return &v1.ValidatingAdmissionPolicyBinding{} },
		NewList: func() runtime.Object { return &v1.ValidatingAdmissionPolicyBindingList{} },

		Default:       func(b *v1.ValidatingAdmissionPolicyBinding) { defaultMatch(b.Spec.MatchResources) },
		PrepareCreate: func(b *v1.ValidatingAdmissionPolicyBinding) { b.Generation = 1 },
		PrepareUpdate: func(b, old *v1.ValidatingAdmissionPolicyBinding) {
			b.Generation = generation(old, !equality.Semantic.DeepEqual(b.Spec, old.Spec))
		},
		Validate: func(b *v1.ValidatingAdmissionPolicyBinding) field.ErrorList {
			return append(validateMeta(b), validate(&b.Spec, field.NewPath("spec"))...)
		},
		ValidateUpdate: func(b, old *v1.ValidatingAdmissionPolicyBinding) field.ErrorList {
			return append(validateMetaUpdate(b, old), validate(&b.Spec, field.NewPath("spec"))...)
		},

		Columns: []metav1.TableColumnDefinition{cells.Name, policyColumn, refColumn, cells.Age},
		Row: func(b *v1.ValidatingAdmissionPolicyBinding, now time.Time) []any {
			return []any{b.Name, b.Spec.PolicyName, paramRef(b.Spec.ParamRef), cells.Since(b.CreationTimestamp, now)}
		},
	}.Kind()
}

func validateActions(actions []v1.ValidationAction, at *field.Path) field.ErrorList {
	if len(actions) == 0 {
		return field.ErrorList{field.Required(at, "at least one validation action is required")}
	}
	var errs field.ErrorList
	seen := map[v1.ValidationAction]bool{}
	for i, action := range actions {
		errs = append(errs, check.OneOf(at.Index(i), action, v1.Deny, v1.Warn, v1.Audit)...)
		if seen[action] {
			errs = append(errs, field.Duplicate(at.Index(i), action))
		}
		seen[action] = true
	}
	if slices.Contains(actions, v1.Deny) && slices.Contains(actions, v1.Warn) {
		errs = append(errs, field.Invalid(at, actions, "must not contain both Deny and Warn (repeating the same validation failure information in the API response and headers serves no purpose)"))
	}
	return errs
}

// MutatingAdmissionPolicy is the kind MutatingAdmissionPolicy.
func MutatingAdmissionPolicy() kind.Kind {
	return kind.Typed[*v1.MutatingAdmissionPolicy]{
		GVK:        v1.SchemeGroupVersion.WithKind("MutatingAdmissionPolicy"),
		Resource:   "mutatingadmissionpolicies",
		Singular:   "mutatingadmissionpolicy",
		Categories: []string{"api-extensions"},

		New:     func() runtime.Object { return &v1.MutatingAdmissionPolicy{} },
		NewList: func() runtime.Object { return &v1.MutatingAdmissionPolicyList{} },

		Default: func(p *v1.MutatingAdmissionPolicy) {
			setDefault(&p.Spec.FailurePolicy, v1.Fail)
			defaultMatch(p.Spec.MatchConstraints)
		},
		PrepareCreate: func(p *v1.MutatingAdmissionPolicy) { p.Generation = 1 },
		PrepareUpdate: func(p, old *v1.MutatingAdmissionPolicy) {
			p.Generation = generation(old, !equality.Semantic.DeepEqual(p.Spec, old.Spec))
		},
		Validate: func(p *v1.MutatingAdmissionPolicy) field.ErrorList {
			return append(validateMeta(p), validateMutating(&p.Spec, field.NewPath("spec"))...)
		},
		ValidateUpdate: func(p, old *v1.MutatingAdmissionPolicy) field.ErrorList {
			return append(validateMetaUpdate(p, old), validateMutating(&p.Spec, field.NewPath("spec"))...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name, cells.Number("Mutations", "Mutations indicates the number of mutations rules defined in this configuration"), kindColumn, cells.Age,
		},
		Row: func(p *v1.MutatingAdmissionPolicy, now time.Time) []any {
			return []any{p.Name, int64(len(p.Spec.Mutations)), paramKind(p.Spec.ParamKind), cells.Since(p.CreationTimestamp, now)}
		},
	}.Kind()
}

func validateMutating(spec *v1.MutatingAdmissionPolicySpec, at *field.Path) field.ErrorList {
	errs := check.OneOfOrNil(at.Child("failurePolicy"), spec.FailurePolicy, v1.Fail, v1.Ignore)
	errs = append(errs, validateParamKind(spec.ParamKind, at.Child("paramKind"))...)
	errs = append(errs, validateMatch(spec.MatchConstraints, true, at.Child("matchConstraints"))...)
	errs = append(errs, validateConditions(spec.MatchConditions, at.Child("matchConditions"))...)
	errs = append(errs, validateVariables(spec.Variables, at.Child("variables"))...)
	errs = append(errs, check.OneOf(at.Child("reinvocationPolicy"), spec.ReinvocationPolicy, v1.NeverReinvocationPolicy, v1.IfNeededReinvocationPolicy)...)
	if len(spec.Mutations) == 0 {
		errs = append(errs, field.Required(at.Child("mutations"), "mutations must contain at least one item"))
	}
	for i := range spec.Mutations {
		errs = append(errs, validateMutation(&spec.Mutations[i], at.Child("mutations").Index(i))...)
	}
	return errs
}

func validateMutation(m *v1.Mutation, at *field.Path) field.ErrorList {
	errs := check.OneOf(at.Child("patchType"), m.PatchType, v1.PatchTypeApplyConfiguration, v1.PatchTypeJSONPatch)
	for _, way := range []struct {
		name       string
		patch      v1.PatchType
		set        bool
		expression func() string
	}{
		{"applyConfiguration", v1.PatchTypeApplyConfiguration, m.ApplyConfiguration != nil, func() string { return m.ApplyConfiguration.Expression }},
		{"jsonPatch", v1.PatchTypeJSONPatch, m.JSONPatch != nil, func() string { return m.JSONPatch.Expression }},
	} {
		at := at.Child(way.name)
		switch {
		case m.PatchType == way.patch && !way.set:
			errs = append(errs, field.Required(at, "must be specified when patchType is "+string(way.patch)))
		case m.PatchType != way.patch && way.set:
			errs = append(errs, field.Forbidden(at, "may only be specified when patchType is "+string(way.patch)))
		case way.set:
			errs = append(errs, required(way.expression(), at.Child("expression"))...)
		}
	}
	return errs
}

// MutatingAdmissionPolicyBinding is the kind MutatingAdmissionPolicyBinding.
func MutatingAdmissionPolicyBinding() kind.Kind {
	validate := func(spec *v1.MutatingAdmissionPolicyBindingSpec, at *field.Path) field.ErrorList {
		errs := check.RequiredText(at.Child("policyName"), spec.PolicyName, check.Subdomain)
		errs = append(errs, validateParamRef(spec.ParamRef, at.Child("paramRef"))...)
		return append(errs, validateMatch(spec.MatchResources, false, at.Child("matchResources"))...)
	}
	return kind.Typed[*v1.MutatingAdmissionPolicyBinding]{
		GVK:        v1.SchemeGroupVersion.WithKind("MutatingAdmissionPolicyBinding"),
		Resource:   "mutatingadmissionpolicybindings",
		Singular:   "mutatingadmissionpolicybinding",
		Categories: []string{"api-extensions"},

		New:     func() runtime.Object { return &v1.MutatingAdmissionPolicyBinding{} },
		NewList: func() runtime.Object { return &v1.MutatingAdmissionPolicyBindingList{} },

		Default:       func(b *v1.MutatingAdmissionPolicyBinding) { defaultMatch(b.Spec.MatchResources) },
		PrepareCreate: func(b *v1.MutatingAdmissionPolicyBinding) { b.Generation = 1 },
		PrepareUpdate: func(b, old *v1.MutatingAdmissionPolicyBinding) {
			b.Generation = generation(old, !equality.Semantic.DeepEqual(b.Spec, old.Spec))
		},
		Validate: func(b *v1.MutatingAdmissionPolicyBinding) field.ErrorList {
			return append(validateMeta(b), validate(&b.Spec, field.NewPath("spec"))...)
		},
		ValidateUpdate: func(b, old *v1.MutatingAdmissionPolicyBinding) field.ErrorList {
			return append(validateMetaUpdate(b, old), validate(&b.Spec, field.NewPath("spec"))...)
		},

		Columns: []metav1.TableColumnDefinition{cells.Name, policyColumn, refColumn, cells.Age},
		Row: func(b *v1.MutatingAdmissionPolicyBinding, now time.Time) []any {
			return []any{b.Name, b.Spec.PolicyName, paramRef(b.Spec.ParamRef), cells.Since(b.CreationTimestamp, now)}
		},
	}.Kind()
}
