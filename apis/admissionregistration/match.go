package admissionregistration

import (
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/check"
)

func setDefault[T any](field **T, value T) {
	if *field == nil {
		*field = &value
	}
}

func defaultRule(rule *v1.Rule) { setDefault(&rule.Scope, v1.AllScopes) }

func defaultMatch(match *v1.MatchResources) {
	if match == nil {
		return
	}
	setDefault(&match.MatchPolicy, v1.Equivalent)
	setDefault(&match.NamespaceSelector, metav1.LabelSelector{})
	setDefault(&match.ObjectSelector, metav1.LabelSelector{})
	for _, rules := range [][]v1.NamedRuleWithOperations{match.ResourceRules, match.ExcludeResourceRules} {
		for i := range rules {
			defaultRule(&rules[i].Rule)
		}
	}
}

// validateMatch checks which requests something is for. need: it has to say
// which resources.
func validateMatch(match *v1.MatchResources, need bool, at *field.Path) field.ErrorList {
	if match == nil {
		if need {
			return field.ErrorList{field.Required(at, "")}
		}
		return nil
	}
	errs := check.OneOfOrNil(at.Child("matchPolicy"), match.MatchPolicy, v1.Exact, v1.Equivalent)
	if match.MatchPolicy == nil {
		errs = append(errs, field.Required(at.Child("matchPolicy"), ""))
	}
	errs = append(errs, requiredSelector(match.NamespaceSelector, at.Child("namespaceSelector"))...)
	errs = append(errs, requiredSelector(match.ObjectSelector, at.Child("objectSelector"))...)
	if need && len(match.ResourceRules) == 0 {
		errs = append(errs, field.Required(at.Child("resourceRules"), ""))
	}
	errs = append(errs, validateNamedRules(match.ResourceRules, at.Child("resourceRules"))...)
	return append(errs, validateNamedRules(match.ExcludeResourceRules, at.Child("excludeResourceRules"))...)
}

func requiredSelector(selector *metav1.LabelSelector, at *field.Path) field.ErrorList {
	if selector == nil {
		return field.ErrorList{field.Required(at, "")}
	}
	return check.LabelSelector(at, selector)
}

func validateNamedRules(rules []v1.NamedRuleWithOperations, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i := range rules {
		at := at.Index(i)
		errs = append(errs, validateRule(&rules[i].RuleWithOperations, at)...)
		seen := map[string]bool{}
		for j, name := range rules[i].ResourceNames {
			if name == "" {
				errs = append(errs, field.Invalid(at.Child("resourceNames").Index(j), name, "must not be empty"))
			}
			if seen[name] {
				errs = append(errs, field.Duplicate(at.Child("resourceNames").Index(j), name))
			}
			seen[name] = true
		}
	}
	return errs
}

func validateRule(rule *v1.RuleWithOperations, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	operations := at.Child("operations")
	if len(rule.Operations) == 0 {
		errs = append(errs, field.Required(operations, ""))
	}
	if len(rule.Operations) > 1 && slices.Contains(rule.Operations, v1.OperationAll) {
		errs = append(errs, field.Invalid(operations, rule.Operations, "if '*' is present, must not specify other operations"))
	}
	for i, operation := range rule.Operations {
		errs = append(errs, check.OneOf(operations.Index(i), operation, v1.OperationAll, v1.Create, v1.Update, v1.Delete, v1.Connect)...)
	}
	errs = append(errs, oneOrAll(rule.APIGroups, "API groups", true, at.Child("apiGroups"))...)
	errs = append(errs, oneOrAll(rule.APIVersions, "API versions", false, at.Child("apiVersions"))...)
	errs = append(errs, validateResources(rule.Resources, at.Child("resources"))...)
	return append(errs, check.OneOfOrNil(at.Child("scope"), rule.Scope, v1.AllScopes, v1.ClusterScope, v1.NamespacedScope)...)
}

// oneOrAll wants names, or "*" alone.
func oneOrAll(names []string, what string, empty bool, at *field.Path) field.ErrorList {
	if len(names) == 0 {
		return field.ErrorList{field.Required(at, "")}
	}
	var errs field.ErrorList
	if len(names) > 1 && slices.Contains(names, "*") {
		errs = append(errs, field.Invalid(at, names, "if '*' is present, must not specify other "+what))
	}
	for i, name := range names {
		if name == "" && !empty {
			errs = append(errs, field.Required(at.Index(i), ""))
		}
	}
	return errs
}

// validateResources wants resources with or without a subresource, "*" for all
// of either, none of which another one includes.
func validateResources(resources []string, at *field.Path) field.ErrorList {
	if len(resources) == 0 {
		return field.ErrorList{field.Required(at, "")}
	}
	var errs field.ErrorList
	wholes, subs := map[string]bool{}, map[string]bool{} // "pods/*" and "*/status"
	for i, text := range resources {
		at := at.Index(i)
		name, sub, split := strings.Cut(text, "/")
		switch {
		case text == "":
			errs = append(errs, field.Required(at, ""))
			continue
		case text == "*/*" && len(resources) > 1:
			errs = append(errs, field.Invalid(at, resources, "if '*/*' is present, must not specify other resources"))
		case text == "*" && slices.ContainsFunc(resources, func(r string) bool { return r != "*" && !strings.Contains(r, "/") }):
			errs = append(errs, field.Invalid(at, resources, "if '*' is present, must not specify other resources without subresources"))
		}
		if !split {
			continue
		}
		if wholes[name] {
			errs = append(errs, field.Invalid(at, text, fmt.Sprintf("if '%s/*' is present, must not specify %s", name, text)))
		}
		if subs[sub] {
			errs = append(errs, field.Invalid(at, text, fmt.Sprintf("if '*/%s' is present, must not specify %s", sub, text)))
		}
		if sub == "*" {
			wholes[name] = true
		}
		if name == "*" {
			subs[sub] = true
		}
	}
	return errs
}

const maxConditions = 64

func validateConditions(conditions []v1.MatchCondition, at *field.Path) field.ErrorList {
	if len(conditions) > maxConditions {
		return field.ErrorList{field.TooMany(at, len(conditions), maxConditions)}
	}
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, condition := range conditions {
		at := at.Index(i)
		errs = append(errs, check.RequiredText(at.Child("name"), condition.Name, validation.IsQualifiedName)...)
		if seen[condition.Name] && condition.Name != "" {
			errs = append(errs, field.Duplicate(at.Child("name"), condition.Name))
		}
		seen[condition.Name] = true
		errs = append(errs, required(condition.Expression, at.Child("expression"))...)
	}
	return errs
}

// required wants more than spaces.
func required(text string, at *field.Path) field.ErrorList {
	if strings.TrimSpace(text) == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	return nil
}

func validateParamKind(kind *v1.ParamKind, at *field.Path) field.ErrorList {
	if kind == nil {
		return nil
	}
	errs := required(kind.APIVersion, at.Child("apiVersion"))
	if _, err := schema.ParseGroupVersion(kind.APIVersion); err != nil {
		errs = append(errs, field.Invalid(at.Child("apiVersion"), kind.APIVersion, err.Error()))
	}
	return append(errs, required(kind.Kind, at.Child("kind"))...)
}

func validateParamRef(ref *v1.ParamRef, at *field.Path) field.ErrorList {
	if ref == nil {
		return nil
	}
	var errs field.ErrorList
	switch {
	case ref.Name != "" && ref.Selector != nil:
		errs = append(errs, field.Forbidden(at.Child("name"), "name and selector are mutually exclusive"))
	case ref.Name == "" && ref.Selector == nil:
		errs = append(errs, field.Required(at, "one of name or selector must be specified"))
	}
	errs = append(errs, check.LabelSelector(at.Child("selector"), ref.Selector)...)
	if ref.ParameterNotFoundAction == nil {
		return append(errs, field.Required(at.Child("parameterNotFoundAction"), ""))
	}
	return append(errs, check.OneOf(at.Child("parameterNotFoundAction"), *ref.ParameterNotFoundAction, v1.AllowAction, v1.DenyAction)...)
}

func validateVariables(variables []v1.Variable, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, variable := range variables {
		at := at.Index(i)
		errs = append(errs, required(variable.Name, at.Child("name"))...)
		if variable.Name != "" && !isIdentifier(variable.Name) {
			errs = append(errs, field.Invalid(at.Child("name"), variable.Name, "name is not a valid CEL identifier"))
		}
		if seen[variable.Name] {
			errs = append(errs, field.Duplicate(at.Child("name"), variable.Name))
		}
		seen[variable.Name] = true
		errs = append(errs, required(variable.Expression, at.Child("expression"))...)
	}
	return errs
}

// isIdentifier tells whether CEL could call something by that name.
func isIdentifier(name string) bool {
	for i, r := range name {
		letter := r == '_' || 'a' <= r && r <= 'z' || 'A' <= r && r <= 'Z'
		if !letter && (i == 0 || r < '0' || r > '9') {
			return false
		}
	}
	return name != ""
}

func paramKind(kind *v1.ParamKind) string {
	if kind == nil {
		return "<unset>"
	}
	return kind.APIVersion + "/" + kind.Kind
}

func paramRef(ref *v1.ParamRef) string {
	switch {
	case ref == nil:
		return "<unset>"
	case ref.Selector != nil:
		return metav1.FormatLabelSelector(ref.Selector)
	case ref.Namespace != "":
		return ref.Namespace + "/" + ref.Name
	}
	return ref.Name
}
