package flowcontrol

import (
	"fmt"
	"slices"
	"strings"
	"time"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/apis/flowcontrol/bootstrap"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

const (
	defaultPrecedence = 1000
	maxPrecedence     = 10000
)

// verbs are those of requests for resources; requests for other paths have
// those of HTTP among them.
var verbs = []string{"get", "list", "create", "update", "patch", "delete", "deletecollection", "watch", "proxy"}

var pathVerbs = []string{"get", "put", "post", "delete", "head", "options", "patch", "connect", "trace"}

// FlowSchema is the kind FlowSchema.
func FlowSchema() kind.Kind {
	doc := flowcontrolv1.FlowSchemaSpec{}.SwaggerDoc()
	return kind.Typed[*flowcontrolv1.FlowSchema]{
		GVK:      flowcontrolv1.SchemeGroupVersion.WithKind("FlowSchema"),
		Resource: "flowschemas",
		Singular: "flowschema",

		New:     func() runtime.Object { return &flowcontrolv1.FlowSchema{} },
		NewList: func() runtime.Object { return &flowcontrolv1.FlowSchemaList{} },

		Default: func(s *flowcontrolv1.FlowSchema) {
			if s.Spec.MatchingPrecedence == 0 {
				s.Spec.MatchingPrecedence = defaultPrecedence
			}
		},
		PrepareCreate: func(s *flowcontrolv1.FlowSchema) {
			s.Status = flowcontrolv1.FlowSchemaStatus{}
			s.Generation = 1
		},
		PrepareUpdate: func(s, old *flowcontrolv1.FlowSchema) {
			s.Status = old.Status
			s.Generation = old.Generation
			if !equality.Semantic.DeepEqual(s.Spec, old.Spec) {
				s.Generation++
			}
		},
		Validate: func(s *flowcontrolv1.FlowSchema) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&s.ObjectMeta, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			return append(errs, validateSchema(s)...)
		},
		ValidateUpdate: func(s, old *flowcontrolv1.FlowSchema) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&s.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			return append(errs, validateSchema(s)...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("PriorityLevel", doc["priorityLevelConfiguration"]),
			cells.Number("MatchingPrecedence", doc["matchingPrecedence"]),
			cells.Text("DistinguisherMethod", doc["distinguisherMethod"]),
			cells.Age,
			cells.Text("MissingPL", "Whether the priority level that the schema names does not exist."),
		},
		Row: func(s *flowcontrolv1.FlowSchema, now time.Time) []any {
			distinguisher := ""
			if m := s.Spec.DistinguisherMethod; m != nil {
				distinguisher = string(m.Type)
			}
			missing := "?"
			for _, c := range s.Status.Conditions {
				if c.Type == flowcontrolv1.FlowSchemaConditionDangling {
					missing = string(c.Status)
				}
			}
			return []any{
				s.Name, s.Spec.PriorityLevelConfiguration.Name, int64(s.Spec.MatchingPrecedence),
				cells.None(distinguisher), cells.Since(s.CreationTimestamp, now), missing,
			}
		},

		Status: &kind.TypedStatus[*flowcontrolv1.FlowSchema]{
			PrepareUpdate: func(s, old *flowcontrolv1.FlowSchema) {
				s.Spec = old.Spec
				s.Generation = old.Generation
			},
			ValidateUpdate: func(s, old *flowcontrolv1.FlowSchema) field.ErrorList {
				errs := apivalidation.ValidateObjectMetaUpdate(&s.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
				return append(errs, validateConditions(s.Status.Conditions, func(c flowcontrolv1.FlowSchemaCondition) condition {
					return condition{string(c.Type), c.Status, c.Reason}
				})...)
			},
		},
		UnconditionalUpdate: true,
	}.Kind()
}

func validateSchema(s *flowcontrolv1.FlowSchema) field.ErrorList {
	at := field.NewPath("spec")
	for _, fixed := range bootstrap.MandatoryFlowSchemas {
		if s.Name == fixed.Name && !equality.Semantic.DeepEqual(s.Spec, fixed.Spec) {
			return field.ErrorList{field.Invalid(at, s.Spec, fmt.Sprintf("spec of '%s' must equal the fixed value", s.Name))}
		}
	}
	errs := validatePrecedence(s, at.Child("matchingPrecedence"))
	if m := s.Spec.DistinguisherMethod; m != nil {
		errs = append(errs, check.OneOf(at.Child("distinguisherMethod", "type"), m.Type,
			flowcontrolv1.FlowDistinguisherMethodByUserType, flowcontrolv1.FlowDistinguisherMethodByNamespaceType)...)
	}
	errs = append(errs, check.RequiredText(at.Child("priorityLevelConfiguration", "name"), s.Spec.PriorityLevelConfiguration.Name, check.Subdomain)...)
	for i := range s.Spec.Rules {
		errs = append(errs, validateRule(&s.Spec.Rules[i], at.Child("rules").Index(i))...)
	}
	return errs
}

func validatePrecedence(s *flowcontrolv1.FlowSchema, at *field.Path) field.ErrorList {
	n := s.Spec.MatchingPrecedence
	var errs field.ErrorList
	if n <= 0 {
		errs = append(errs, field.Invalid(at, n, "must be a positive value"))
	}
	if n > maxPrecedence {
		errs = append(errs, field.Invalid(at, n, fmt.Sprintf("must not be greater than %v", maxPrecedence)))
	}
	if first := flowcontrolv1.FlowSchemaNameExempt; n == 1 && s.Name != first {
		errs = append(errs, field.Invalid(at, n, "only the schema named '"+first+"' may have matchingPrecedence 1"))
	}
	return errs
}

func validateRule(rule *flowcontrolv1.PolicyRulesWithSubjects, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if len(rule.Subjects) == 0 {
		errs = append(errs, field.Required(at.Child("subjects"), "subjects must contain at least one value"))
	}
	for i, s := range rule.Subjects {
		errs = append(errs, validateSubject(s, at.Child("subjects").Index(i))...)
	}
	if len(rule.ResourceRules) == 0 && len(rule.NonResourceRules) == 0 {
		errs = append(errs, field.Required(at, "at least one of resourceRules and nonResourceRules has to be non-empty"))
	}
	for i, r := range rule.ResourceRules {
		errs = append(errs, validateResourceRule(r, at.Child("resourceRules").Index(i))...)
	}
	for i, r := range rule.NonResourceRules {
		at := at.Child("nonResourceRules").Index(i)
		errs = append(errs, validateSet(at.Child("verbs"), r.Verbs, oneOfVerbs(slices.Concat(verbs, pathVerbs)))...)
		errs = append(errs, validateSet(at.Child("nonResourceURLs"), r.NonResourceURLs, isPath)...)
	}
	return errs
}

func validateSubject(s flowcontrolv1.Subject, at *field.Path) field.ErrorList {
	errs := check.OneOf(at.Child("kind"), s.Kind, flowcontrolv1.SubjectKindUser, flowcontrolv1.SubjectKindGroup, flowcontrolv1.SubjectKindServiceAccount)
	if len(errs) > 0 {
		return errs
	}
	for _, part := range []struct {
		kind flowcontrolv1.SubjectKind
		name string
		set  bool
	}{
		{flowcontrolv1.SubjectKindUser, "user", s.User != nil},
		{flowcontrolv1.SubjectKindGroup, "group", s.Group != nil},
		{flowcontrolv1.SubjectKindServiceAccount, "serviceAccount", s.ServiceAccount != nil},
	} {
		switch {
		case part.kind == s.Kind && !part.set:
			errs = append(errs, field.Required(at.Child(part.name), fmt.Sprintf("%s is required when subject kind is '%s'", part.name, s.Kind)))
		case part.kind != s.Kind && part.set:
			errs = append(errs, field.Forbidden(at.Child(part.name), fmt.Sprintf("%s is forbidden when subject kind is not '%s'", part.name, part.kind)))
		}
	}
	if s.User != nil {
		errs = append(errs, check.RequiredText(at.Child("user", "name"), s.User.Name, nil)...)
	}
	if s.Group != nil {
		errs = append(errs, check.RequiredText(at.Child("group", "name"), s.Group.Name, nil)...)
	}
	if a := s.ServiceAccount; a != nil {
		at := at.Child("serviceAccount")
		errs = append(errs, check.RequiredText(at.Child("namespace"), a.Namespace, validation.IsDNS1123Label)...)
		if a.Name != flowcontrolv1.NameAll {
			errs = append(errs, check.RequiredText(at.Child("name"), a.Name, check.Subdomain)...)
		}
	}
	return errs
}

func validateResourceRule(r flowcontrolv1.ResourcePolicyRule, at *field.Path) field.ErrorList {
	errs := validateSet(at.Child("verbs"), r.Verbs, oneOfVerbs(verbs))
	errs = append(errs, validateSet(at.Child("apiGroups"), r.APIGroups, nil)...)
	errs = append(errs, validateSet(at.Child("resources"), r.Resources, nil)...)
	if len(r.Namespaces) == 0 {
		if !r.ClusterScope {
			errs = append(errs, field.Required(at.Child("namespaces"), "resource rules that are not cluster scoped must supply at least one namespace"))
		}
		return errs
	}
	return append(errs, validateSet(at.Child("namespaces"), r.Namespaces, validation.IsDNS1123Label)...)
}

// validateSet wants at least one entry, each once and after the rule, or "*"
// alone.
func validateSet(at *field.Path, values []string, rule func(string) []string) field.ErrorList {
	if len(values) == 0 {
		return field.ErrorList{field.Required(at, "must contain at least one value")}
	}
	if len(values) > 1 && slices.Contains(values, "*") {
		return field.ErrorList{field.Invalid(at, values, "if '*' is present, must not specify other values")}
	}
	var errs field.ErrorList
	seen := sets.New[string]()
	for i, v := range values {
		if seen.Has(v) {
			errs = append(errs, field.Duplicate(at.Index(i), v))
		}
		seen.Insert(v)
		if v != "*" && rule != nil {
			errs = append(errs, check.Text(at.Index(i), v, rule)...)
		}
	}
	return errs
}

func oneOfVerbs(known []string) func(string) []string {
	return func(verb string) []string {
		if slices.Contains(known, verb) {
			return nil
		}
		return []string{"must be '*' or one of " + strings.Join(known, ", ")}
	}
}

// isPath is the rule for a path that is no resource: whole, or all below one.
func isPath(path string) []string {
	switch {
	case !strings.HasPrefix(path, "/"):
		return []string{"must start with slash"}
	case strings.Contains(path, " "):
		return []string{"must not contain white-space"}
	case strings.Contains(path, "//"):
		return []string{"must not contain double slash"}
	case path != "/" && strings.HasSuffix(path, "/"):
		return []string{"must not end with slash: to match all below it, end with /*"}
	case strings.Contains(strings.TrimSuffix(path, "/*"), "*"):
		return []string{"wildcard can only do suffix matching: '*' is only allowed as the last part, after a slash"}
	}
	return nil
}
