package core

import (
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/check"
)

// validateScheduling checks what a pod says about where it may run.
func validateScheduling(spec *corev1.PodSpec, at *field.Path) field.ErrorList {
	errs := metav1validation.ValidateLabels(spec.NodeSelector, at.Child("nodeSelector"))
	errs = append(errs, check.OneOfOrNil(at.Child("preemptionPolicy"), spec.PreemptionPolicy, corev1.PreemptLowerPriority, corev1.PreemptNever)...)
	errs = append(errs, ValidateTolerations(spec.Tolerations, at.Child("tolerations"))...)
	errs = append(errs, validateSpread(spec.TopologySpreadConstraints, at.Child("topologySpreadConstraints"))...)
	if affinity := spec.Affinity; affinity != nil {
		at := at.Child("affinity")
		if affinity.NodeAffinity != nil {
			errs = append(errs, validateNodeAffinity(affinity.NodeAffinity, at.Child("nodeAffinity"))...)
		}
		if a := affinity.PodAffinity; a != nil {
			errs = append(errs, validatePodAffinity(a.RequiredDuringSchedulingIgnoredDuringExecution, a.PreferredDuringSchedulingIgnoredDuringExecution, at.Child("podAffinity"))...)
		}
		if a := affinity.PodAntiAffinity; a != nil {
			errs = append(errs, validatePodAffinity(a.RequiredDuringSchedulingIgnoredDuringExecution, a.PreferredDuringSchedulingIgnoredDuringExecution, at.Child("podAntiAffinity"))...)
		}
	}
	return errs
}

// ValidateTolerations returns every fault of tolerations, of a pod or of what
// gives pods theirs.
func ValidateTolerations(tolerations []corev1.Toleration, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, t := range tolerations {
		at := at.Index(i)
		if t.Key != "" {
			errs = append(errs, metav1validation.ValidateLabelName(t.Key, at.Child("key"))...)
		} else if t.Operator != corev1.TolerationOpExists {
			errs = append(errs, field.Invalid(at.Child("operator"), t.Operator, "operator must be Exists when `key` is empty, which means \"match all values and all keys\""))
		}
		if t.TolerationSeconds != nil && t.Effect != corev1.TaintEffectNoExecute {
			errs = append(errs, field.Invalid(at.Child("effect"), t.Effect, "effect must be 'NoExecute' when `tolerationSeconds` is set"))
		}
		switch t.Operator {
		case corev1.TolerationOpEqual, "":
			if faults := validation.IsValidLabelValue(t.Value); len(faults) > 0 {
				errs = append(errs, field.Invalid(at.Child("operator"), t.Value, strings.Join(faults, ";")))
			}
		case corev1.TolerationOpExists:
			if t.Value != "" {
				errs = append(errs, field.Invalid(at.Child("operator"), t, "value must be empty when `operator` is 'Exists'"))
			}
		default:
			errs = append(errs, field.NotSupported(at.Child("operator"), t.Operator, []corev1.TolerationOperator{corev1.TolerationOpEqual, corev1.TolerationOpExists}))
		}
		if t.Effect != "" {
			errs = append(errs, validateTaintEffect(t.Effect, at.Child("effect"))...)
		}
	}
	return errs
}

func validateTaintEffect(effect corev1.TaintEffect, at *field.Path) field.ErrorList {
	return check.OneOf(at, effect, corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute)
}

func validateNodeAffinity(a *corev1.NodeAffinity, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if required := a.RequiredDuringSchedulingIgnoredDuringExecution; required != nil {
		at := at.Child("requiredDuringSchedulingIgnoredDuringExecution").Child("nodeSelectorTerms")
		if len(required.NodeSelectorTerms) == 0 {
			errs = append(errs, field.Required(at, "must have at least one node selector term"))
		}
		for i, term := range required.NodeSelectorTerms {
			errs = append(errs, validateNodeSelectorTerm(term, at.Index(i), true)...)
		}
	}
	for i, preferred := range a.PreferredDuringSchedulingIgnoredDuringExecution {
		at := at.Child("preferredDuringSchedulingIgnoredDuringExecution").Index(i)
		errs = append(errs, validateWeight(preferred.Weight, at.Child("weight"))...)
		errs = append(errs, validateNodeSelectorTerm(preferred.Preference, at.Child("preference"), false)...)
	}
	return errs
}

// validateNodeSelectorTerm: values that no label can have are let pass where a term is
// only preferred: none is required of a node then, and none matches.
func validateNodeSelectorTerm(term corev1.NodeSelectorTerm, at *field.Path, required bool) field.ErrorList {
	var errs field.ErrorList
	for i, r := range term.MatchExpressions {
		errs = append(errs, validateNodeRequirement(r, at.Child("matchExpressions").Index(i), required)...)
	}
	for i, r := range term.MatchFields {
		at := at.Child("matchFields").Index(i)
		switch {
		case r.Operator != corev1.NodeSelectorOpIn && r.Operator != corev1.NodeSelectorOpNotIn:
			errs = append(errs, field.Invalid(at.Child("operator"), r.Operator, "not a valid selector operator"))
		case len(r.Values) != 1:
			errs = append(errs, field.Required(at.Child("values"), "must be only one value when `operator` is 'In' or 'NotIn' for node field selector"))
		}
		if r.Key != "metadata.name" {
			errs = append(errs, field.Invalid(at.Child("key"), r.Key, "not a valid field selector key"))
			continue
		}
		for j, value := range r.Values {
			errs = append(errs, check.Text(at.Child("values").Index(j), value, check.Subdomain)...)
		}
	}
	return errs
}

func validateNodeRequirement(r corev1.NodeSelectorRequirement, at *field.Path, required bool) field.ErrorList {
	var errs field.ErrorList
	values := at.Child("values")
	switch r.Operator {
	case corev1.NodeSelectorOpIn, corev1.NodeSelectorOpNotIn:
		if len(r.Values) == 0 {
			errs = append(errs, field.Required(values, "must be specified when `operator` is 'In' or 'NotIn'"))
		}
		for i, value := range r.Values {
			if required {
				errs = append(errs, check.Text(values.Index(i), value, validation.IsValidLabelValue)...)
			}
		}
	case corev1.NodeSelectorOpExists, corev1.NodeSelectorOpDoesNotExist:
		if len(r.Values) > 0 {
			errs = append(errs, field.Forbidden(values, "may not be specified when `operator` is 'Exists' or 'DoesNotExist'"))
		}
	case corev1.NodeSelectorOpGt, corev1.NodeSelectorOpLt:
		if len(r.Values) != 1 {
			errs = append(errs, field.Required(values, "must be specified single value when `operator` is 'Lt' or 'Gt'"))
		} else if _, err := strconv.ParseInt(r.Values[0], 10, 64); err != nil && required {
			errs = append(errs, field.Invalid(values.Index(0), r.Values[0], "must be an integer when `operator` is 'Lt' or 'Gt'"))
		}
	default:
		errs = append(errs, field.Invalid(at.Child("operator"), r.Operator, "not a valid selector operator"))
	}
	return append(errs, metav1validation.ValidateLabelName(r.Key, at.Child("key"))...)
}

func validateWeight(weight int32, at *field.Path) field.ErrorList {
	if weight < 1 || weight > 100 {
		return field.ErrorList{field.Invalid(at, weight, "must be in the range 1-100")}
	}
	return nil
}

func validatePodAffinity(required []corev1.PodAffinityTerm, preferred []corev1.WeightedPodAffinityTerm, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, term := range required {
		errs = append(errs, validatePodAffinityTerm(term, at.Child("requiredDuringSchedulingIgnoredDuringExecution").Index(i))...)
	}
	for i, weighted := range preferred {
		at := at.Child("preferredDuringSchedulingIgnoredDuringExecution").Index(i)
		errs = append(errs, validateWeight(weighted.Weight, at.Child("weight"))...)
		errs = append(errs, validatePodAffinityTerm(weighted.PodAffinityTerm, at.Child("podAffinityTerm"))...)
	}
	return errs
}

func validatePodAffinityTerm(term corev1.PodAffinityTerm, at *field.Path) field.ErrorList {
	errs := check.LabelSelector(at.Child("labelSelector"), term.LabelSelector)
	errs = append(errs, check.LabelSelector(at.Child("namespaceSelector"), term.NamespaceSelector)...)
	for i, namespace := range term.Namespaces {
		errs = append(errs, check.Text(at.Child("namespaces").Index(i), namespace, validation.IsDNS1123Label)...)
	}
	errs = append(errs, validateTopologyKey(term.TopologyKey, at.Child("topologyKey"))...)
	for _, keys := range []struct {
		name string
		keys []string
	}{{"matchLabelKeys", term.MatchLabelKeys}, {"mismatchLabelKeys", term.MismatchLabelKeys}} {
		if len(keys.keys) > 0 && term.LabelSelector == nil {
			errs = append(errs, field.Forbidden(at.Child(keys.name), "must not be specified when labelSelector is not set"))
		}
		for i, key := range keys.keys {
			errs = append(errs, metav1validation.ValidateLabelName(key, at.Child(keys.name).Index(i))...)
		}
	}
	mismatch := sets.New(term.MismatchLabelKeys...)
	for i, key := range term.MatchLabelKeys {
		if mismatch.Has(key) {
			errs = append(errs, field.Invalid(at.Child("matchLabelKeys").Index(i), key, "exists in both matchLabelKeys and mismatchLabelKeys"))
		}
	}
	return errs
}

func validateTopologyKey(key string, at *field.Path) field.ErrorList {
	if key == "" {
		return field.ErrorList{field.Required(at, "can not be empty")}
	}
	return metav1validation.ValidateLabelName(key, at)
}

func validateSpread(constraints []corev1.TopologySpreadConstraint, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := sets.New[string]()
	for i, c := range constraints {
		at := at.Index(i)
		if c.MaxSkew <= 0 {
			errs = append(errs, field.Invalid(at.Child("maxSkew"), c.MaxSkew, "must be greater than zero"))
		}
		errs = append(errs, validateTopologyKey(c.TopologyKey, at.Child("topologyKey"))...)
		errs = append(errs, check.OneOf(at.Child("whenUnsatisfiable"), c.WhenUnsatisfiable, corev1.DoNotSchedule, corev1.ScheduleAnyway)...)
		if key := "{" + c.TopologyKey + ", " + string(c.WhenUnsatisfiable) + "}"; seen.Has(key) {
			errs = append(errs, field.Duplicate(at.Child("{topologyKey, whenUnsatisfiable}"), key))
		} else {
			seen.Insert(key)
		}
		if n := c.MinDomains; n != nil {
			if *n <= 0 {
				errs = append(errs, field.Invalid(at.Child("minDomains"), *n, "must be greater than zero"))
			}
			if c.WhenUnsatisfiable != corev1.DoNotSchedule {
				errs = append(errs, field.Invalid(at.Child("minDomains"), *n, "can only use minDomains if whenUnsatisfiable=DoNotSchedule, not "+string(c.WhenUnsatisfiable)))
			}
		}
		for _, policy := range []struct {
			name  string
			value *corev1.NodeInclusionPolicy
		}{{"nodeAffinityPolicy", c.NodeAffinityPolicy}, {"nodeTaintsPolicy", c.NodeTaintsPolicy}} {
			errs = append(errs, check.OneOfOrNil(at.Child(policy.name), policy.value, corev1.NodeInclusionPolicyIgnore, corev1.NodeInclusionPolicyHonor)...)
		}
		errs = append(errs, check.LabelSelector(at.Child("labelSelector"), c.LabelSelector)...)
		if len(c.MatchLabelKeys) > 0 && c.LabelSelector == nil {
			errs = append(errs, field.Forbidden(at.Child("matchLabelKeys"), "must not be specified when labelSelector is not set"))
		}
		for j, key := range c.MatchLabelKeys {
			errs = append(errs, metav1validation.ValidateLabelName(key, at.Child("matchLabelKeys").Index(j))...)
		}
	}
	return errs
}

// ValidateNodeSelector wants at least one term, each well-formed.
func ValidateNodeSelector(selector *corev1.NodeSelector, at *field.Path) field.ErrorList {
	at = at.Child("nodeSelectorTerms")
	if len(selector.NodeSelectorTerms) == 0 {
		return field.ErrorList{field.Required(at, "must have at least one node selector term")}
	}
	var errs field.ErrorList
	for i, term := range selector.NodeSelectorTerms {
		errs = append(errs, validateNodeSelectorTerm(term, at.Index(i), true)...)
	}
	return errs
}
