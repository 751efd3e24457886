package scheduling

import (
	"fmt"
	"strings"

	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/check"
)

// What Workloads' templates and PodGroups share.

// oneOf wants exactly one of the members of a union; set says which are given.
func oneOf(path *field.Path, members []string, set ...bool) field.ErrorList {
	quoted, given := make([]string, len(members)), []string{}
	for i, name := range members {
		quoted[i] = "`" + name + "`"
		if set[i] {
			given = append(given, quoted[i])
		}
	}
	switch all := strings.Join(quoted, ", "); len(given) {
	case 1:
		return nil
	case 0:
		return field.ErrorList{field.Invalid(path, "", "must specify one of: "+all)}
	default:
		return field.ErrorList{field.Invalid(path, "{"+strings.Join(given, ", ")+"}", "exactly one of "+all+" is required, but multiple fields are set")}
	}
}

func validatePolicy(policy *schedulingv1beta1.PodGroupSchedulingPolicy, path *field.Path) field.ErrorList {
	errs := oneOf(path, []string{"basic", "gang"}, policy.Basic != nil, policy.Gang != nil)
	if gang := policy.Gang; gang != nil {
		switch at := path.Child("gang", "minCount"); {
		case gang.MinCount == 0:
			errs = append(errs, field.Required(at, "how many pods must have a node at the same time; at least 1"))
		case gang.MinCount < 0:
			errs = append(errs, field.Invalid(at, gang.MinCount, "must be greater than or equal to 1"))
		}
	}
	return errs
}

// validatePolicyUpdate: the policy stays; minCount may change.
func validatePolicyUpdate(policy, old *schedulingv1beta1.PodGroupSchedulingPolicy, path *field.Path) field.ErrorList {
	var errs field.ErrorList
	if (policy.Basic == nil) != (old.Basic == nil) {
		errs = append(errs, field.Invalid(path.Child("basic"), policy.Basic, "field is immutable"))
	}
	switch gang := path.Child("gang"); {
	case policy.Gang != nil && old.Gang == nil:
		errs = append(errs, field.Invalid(gang, policy.Gang, "field cannot be set once created"))
	case policy.Gang == nil && old.Gang != nil:
		errs = append(errs, field.Invalid(gang, nil, "field cannot be cleared once set"))
	}
	return errs
}

func validateConstraints(c *schedulingv1beta1.PodGroupSchedulingConstraints, path *field.Path) field.ErrorList {
	if c == nil {
		return nil
	}
	at := path.Child("topology")
	errs := atMost(at, len(c.Topology), 1)
	for i, t := range c.Topology {
		errs = append(errs, check.RequiredText(at.Index(i).Child("key"), t.Key, validation.IsQualifiedName)...)
	}
	return errs
}

func validateClaims(claims []schedulingv1beta1.PodGroupResourceClaim, path *field.Path) field.ErrorList {
	errs := atMost(path, len(claims), schedulingv1beta1.MaxPodGroupResourceClaims)
	seen := sets.New[string]()
	for i, c := range claims {
		at := path.Index(i)
		errs = append(errs, uniqueName(c.Name, seen, at)...)
		errs = append(errs, oneOf(at, []string{"resourceClaimName", "resourceClaimTemplateName"}, c.ResourceClaimName != nil, c.ResourceClaimTemplateName != nil)...)
		if c.ResourceClaimName != nil {
			errs = append(errs, check.Text(at.Child("resourceClaimName"), *c.ResourceClaimName, check.Subdomain)...)
		}
		if c.ResourceClaimTemplateName != nil {
			errs = append(errs, check.Text(at.Child("resourceClaimTemplateName"), *c.ResourceClaimTemplateName, check.Subdomain)...)
		}
	}
	return errs
}

// uniqueName wants a DNS label that no earlier item of a list has.
func uniqueName(name string, seen sets.Set[string], item *field.Path) field.ErrorList {
	errs := check.RequiredText(item.Child("name"), name, validation.IsDNS1123Label)
	if seen.Has(name) && name != "" {
		errs = append(errs, field.Duplicate(item.Child("name"), name))
	}
	seen.Insert(name)
	return errs
}

func validateDisruption(mode *schedulingv1beta1.DisruptionMode, path *field.Path) field.ErrorList {
	if mode == nil {
		return nil
	}
	return oneOf(path, []string{"single", "all"}, mode.Single != nil, mode.All != nil)
}

// rank is what a group says of its importance.
type rank struct {
	class      string
	priority   *int32
	preemption *schedulingv1beta1.PreemptionPolicy
}

// validate: a priority above what users may give is that of a system class,
// which admission puts there.
func (r rank) validate(path *field.Path) field.ErrorList {
	var errs field.ErrorList
	own, system := systemClasses[r.class]
	if r.class != "" {
		errs = append(errs, check.Text(path.Child("priorityClassName"), r.class, check.Subdomain)...)
	}
	if r.priority != nil && *r.priority > highest && (!system || *r.priority != own) {
		errs = append(errs, field.Invalid(path.Child("priority"), *r.priority, fmt.Sprintf("must be less than or equal to %d", highest)))
	}
	return append(errs, check.OneOfOrNil(path.Child("preemptionPolicy"), r.preemption, schedulingv1beta1.PreemptLowerPriority, schedulingv1beta1.PreemptNever)...)
}

func (r rank) validateUpdate(old rank, path *field.Path) field.ErrorList {
	errs := apivalidation.ValidateImmutableField(r.class, old.class, path.Child("priorityClassName"))
	errs = append(errs, apivalidation.ValidateImmutableField(r.priority, old.priority, path.Child("priority"))...)
	return append(errs, apivalidation.ValidateImmutableField(r.preemption, old.preemption, path.Child("preemptionPolicy"))...)
}

func atMost(path *field.Path, n, most int) field.ErrorList {
	if n > most {
		return field.ErrorList{field.TooMany(path, n, most)}
	}
	return nil
}

// segment is the rule for what may stand between slashes of a URL.
func segment(name string) []string { return content.IsPathSegmentName(name) }

// ignored says of each field that is stored while the scheduler does not act on
// it what its user waits for in vain.
func ignored(path string, c *schedulingv1beta1.PodGroupSchedulingConstraints, claims []schedulingv1beta1.PodGroupResourceClaim, mode *schedulingv1beta1.DisruptionMode) []string {
	var out []string
	warn := func(field, effect string) {
		out = append(out, path+"."+field+": stored, but clusterd does not "+effect+" yet")
	}
	if c != nil && len(c.Topology) > 0 {
		warn("schedulingConstraints.topology", "keep the pods of a group in one topology domain")
	}
	if len(claims) > 0 {
		warn("resourceClaims", "share ResourceClaims among the pods of a group")
	}
	if mode != nil && mode.All != nil {
		warn("disruptionMode.all", "disrupt the pods of a group together: they are preempted one by one")
	}
	return out
}
