package apps

import (
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/core"
	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// StatefulSet is the kind StatefulSet.
func StatefulSet() kind.Kind {
	return kind.Typed[*appsv1.StatefulSet]{
		GVK:        appsv1.SchemeGroupVersion.WithKind("StatefulSet"),
		Resource:   "statefulsets",
		Singular:   "statefulset",
		ShortNames: []string{"sts"},
		Categories: []string{"all"},
		Namespaced: true,

		New:     func() runtime.Object { return &appsv1.StatefulSet{} },
		NewList: func() runtime.Object { return &appsv1.StatefulSetList{} },

		Default: defaultStatefulSet,
		PrepareCreate: func(s *appsv1.StatefulSet) {
			s.Generation = 1
			s.Status = appsv1.StatefulSetStatus{}
		},
		PrepareUpdate: func(s, old *appsv1.StatefulSet) {
			s.Status = old.Status
			s.Generation = old.Generation
			if !equality.Semantic.DeepEqual(s.Spec, old.Spec) {
				s.Generation++
			}
		},
		Validate: func(s *appsv1.StatefulSet) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&s.ObjectMeta, true, apivalidation.NameIsDNSLabel, field.NewPath("metadata"))
			errs = append(errs, core.ValidateTemplateCost(s, &s.Spec.Template, nil, field.NewPath("spec", "template"))...)
			return append(errs, validateStatefulSetSpec(&s.Spec, field.NewPath("spec"))...)
		},
		ValidateUpdate: validateStatefulSetUpdate,
		Warnings: func(s *appsv1.StatefulSet) []string {
			warnings := core.PodSpecWarnings(&s.Spec.Template.Spec, "spec.template.spec")
			if s.Spec.RevisionHistoryLimit != nil && *s.Spec.RevisionHistoryLimit < 0 {
				warnings = append(warnings, "spec.revisionHistoryLimit: a negative value retains all historical revisions")
			}
			return warnings
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Ready", "Number of the pod with ready state"),
			cells.Age,
			cells.Wide(cells.Text("Containers", "Names of each container in the template.")),
			cells.Wide(cells.Text("Images", "Images referenced by each container in the template.")),
		},
		Row: func(s *appsv1.StatefulSet, now time.Time) []any {
			names, images := cells.Containers(s.Spec.Template.Spec.Containers)
			return []any{
				s.Name, fmt.Sprintf("%d/%d", s.Status.ReadyReplicas, replicas(s.Spec.Replicas)),
				cells.Since(s.CreationTimestamp, now), names, images,
			}
		},

		Status: &kind.TypedStatus[*appsv1.StatefulSet]{
			PrepareUpdate: func(s, old *appsv1.StatefulSet) {
				s.Spec = old.Spec
				s.Generation = old.Generation
			},
			ValidateUpdate: validateStatefulSetStatusUpdate,
		},
		Scale: &kind.TypedScale[*appsv1.StatefulSet]{
			SpecReplicas:    func(s *appsv1.StatefulSet) int32 { return replicas(s.Spec.Replicas) },
			SetSpecReplicas: func(s *appsv1.StatefulSet, n int32) { s.Spec.Replicas = &n },
			StatusReplicas:  func(s *appsv1.StatefulSet) int32 { return s.Status.Replicas },
			Selector:        func(s *appsv1.StatefulSet) (string, error) { return selectorText(s.Spec.Selector) },
		},

		UnconditionalUpdate: true,
	}.Kind()
}

func defaultStatefulSet(s *appsv1.StatefulSet) {
	spec := &s.Spec
	if spec.PodManagementPolicy == "" {
		spec.PodManagementPolicy = appsv1.OrderedReadyPodManagement
	}
	strategy := &spec.UpdateStrategy
	if strategy.Type == "" {
		strategy.Type = appsv1.RollingUpdateStatefulSetStrategyType
	}
	if strategy.Type == appsv1.RollingUpdateStatefulSetStrategyType {
		setDefault(&strategy.RollingUpdate, appsv1.RollingUpdateStatefulSetStrategy{})
		setDefault(&strategy.RollingUpdate.Partition, 0)
		setDefault(&strategy.RollingUpdate.MaxUnavailable, intstr.FromInt32(1))
	}
	setDefault(&spec.PersistentVolumeClaimRetentionPolicy, appsv1.StatefulSetPersistentVolumeClaimRetentionPolicy{})
	retention := spec.PersistentVolumeClaimRetentionPolicy
	if retention.WhenDeleted == "" {
		retention.WhenDeleted = appsv1.RetainPersistentVolumeClaimRetentionPolicyType
	}
	if retention.WhenScaled == "" {
		retention.WhenScaled = appsv1.RetainPersistentVolumeClaimRetentionPolicyType
	}
	setDefault(&spec.Replicas, 1)
	setDefault(&spec.RevisionHistoryLimit, defaultHistory)
	for i := range spec.VolumeClaimTemplates {
		claim := &spec.VolumeClaimTemplates[i]
		claim.APIVersion, claim.Kind = "v1", "PersistentVolumeClaim"
		setDefault(&claim.Spec.VolumeMode, corev1.PersistentVolumeFilesystem)
		if claim.Status.Phase == "" {
			claim.Status.Phase = corev1.ClaimPending
		}
	}
	core.DefaultPodTemplate(&spec.Template)
}

func validateStatefulSetSpec(spec *appsv1.StatefulSetSpec, at *field.Path) field.ErrorList {
	errs := check.OneOf(at.Child("podManagementPolicy"), spec.PodManagementPolicy, appsv1.OrderedReadyPodManagement, appsv1.ParallelPodManagement)
	errs = append(errs, validateStatefulSetStrategy(&spec.UpdateStrategy, at.Child("updateStrategy"))...)
	if p := spec.PersistentVolumeClaimRetentionPolicy; p != nil {
		at := at.Child("persistentVolumeClaimRetentionPolicy")
		retain, remove := appsv1.RetainPersistentVolumeClaimRetentionPolicyType, appsv1.DeletePersistentVolumeClaimRetentionPolicyType
		errs = append(errs, check.OneOf(at.Child("whenDeleted"), p.WhenDeleted, retain, remove)...)
		errs = append(errs, check.OneOf(at.Child("whenScaled"), p.WhenScaled, retain, remove)...)
	}
	errs = append(errs, check.NonNegative(at.Child("replicas"), int64(replicas(spec.Replicas)))...)
	errs = append(errs, check.NonNegative(at.Child("minReadySeconds"), int64(spec.MinReadySeconds))...)
	if spec.Ordinals != nil {
		errs = append(errs, check.NonNegative(at.Child("ordinals", "start"), int64(spec.Ordinals.Start))...)
	}
	if spec.ServiceName != "" {
		errs = append(errs, check.Text(at.Child("serviceName"), spec.ServiceName, check.Subdomain)...)
	}
	errs = append(errs, validateClaimTemplates(spec.VolumeClaimTemplates, at.Child("volumeClaimTemplates"))...)
	return append(errs, validateSelected(spec.Selector, withClaims(&spec.Template, spec.VolumeClaimTemplates), "statefulset", at)...)
}

func validateStatefulSetStrategy(strategy *appsv1.StatefulSetUpdateStrategy, at *field.Path) field.ErrorList {
	rolling := at.Child("rollingUpdate")
	switch strategy.Type {
	case "":
		return field.ErrorList{field.Required(at.Child("type"), "")}
	case appsv1.OnDeleteStatefulSetStrategyType:
		if strategy.RollingUpdate != nil {
			return field.ErrorList{field.Invalid(rolling, strategy.RollingUpdate, "only allowed for updateStrategy 'RollingUpdate'")}
		}
		return nil
	case appsv1.RollingUpdateStatefulSetStrategyType:
		r := strategy.RollingUpdate
		if r == nil {
			return nil
		}
		var errs field.ErrorList
		if r.Partition != nil {
			errs = append(errs, check.NonNegative(rolling.Child("partition"), int64(*r.Partition))...)
		}
		if r.MaxUnavailable != nil {
			at := rolling.Child("maxUnavailable")
			faults := validateShare(r.MaxUnavailable, at)
			errs = append(errs, faults...)
			if n, err := intstr.GetScaledValueFromIntOrPercent(r.MaxUnavailable, 100, true); len(faults) == 0 && err == nil {
				switch {
				case n == 0:
					errs = append(errs, field.Invalid(at, *r.MaxUnavailable, "cannot be 0"))
				case r.MaxUnavailable.Type == intstr.String && n > 100:
					errs = append(errs, field.Invalid(at, *r.MaxUnavailable, "must not be greater than 100%"))
				}
			}
		}
		return errs
	}
	return field.ErrorList{field.Invalid(at, strategy, fmt.Sprintf("must be '%s' or '%s'", appsv1.RollingUpdateStatefulSetStrategyType, appsv1.OnDeleteStatefulSetStrategyType))}
}

// validateClaimTemplates checks what decides over the claims' names and what
// every claim needs.
func validateClaimTemplates(claims []corev1.PersistentVolumeClaim, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := map[string]bool{}
	for i := range claims {
		claim, at := &claims[i], at.Index(i)
		errs = append(errs, check.RequiredText(at.Child("metadata", "name"), claim.Name, labelName)...)
		if seen[claim.Name] {
			errs = append(errs, field.Duplicate(at.Child("metadata", "name"), claim.Name))
		}
		seen[claim.Name] = true
		if len(claim.Spec.AccessModes) == 0 {
			errs = append(errs, field.Required(at.Child("spec", "accessModes"), "at least 1 access mode is required"))
		}
		storage, ok := claim.Spec.Resources.Requests[corev1.ResourceStorage]
		switch {
		case !ok:
			errs = append(errs, field.Required(at.Child("spec", "resources").Key(string(corev1.ResourceStorage)), ""))
		case storage.Sign() <= 0:
			errs = append(errs, field.Invalid(at.Child("spec", "resources").Key(string(corev1.ResourceStorage)), storage.String(), "must be greater than zero"))
		}
	}
	return errs
}

func labelName(name string) []string { return apivalidation.NameIsDNSLabel(name, false) }

// withClaims returns the template as the set's pods will have it: with a volume
// for each claim, which containers may mount.
func withClaims(template *corev1.PodTemplateSpec, claims []corev1.PersistentVolumeClaim) *corev1.PodTemplateSpec {
	if len(claims) == 0 {
		return template
	}
	out := template.DeepCopy()
	named := map[string]bool{}
	for i := range claims {
		named[claims[i].Name] = true
	}
	volumes := out.Spec.Volumes[:0:0]
	for _, v := range out.Spec.Volumes {
		if !named[v.Name] {
			volumes = append(volumes, v)
		}
	}
	for i := range claims {
		if !named[claims[i].Name] {
			continue // a second template of that name; said elsewhere
		}
		named[claims[i].Name] = false
		volumes = append(volumes, corev1.Volume{Name: claims[i].Name, VolumeSource: corev1.VolumeSource{
			PersistentVolumeClaim: &corev1.PersistentVolumeClaimVolumeSource{ClaimName: "claim"},
		}})
	}
	out.Spec.Volumes = volumes
	return out
}

func validateStatefulSetUpdate(s, old *appsv1.StatefulSet) field.ErrorList {
	spec := field.NewPath("spec")
	errs := apivalidation.ValidateObjectMetaUpdate(&s.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	errs = append(errs, core.ValidateTemplateCost(s, &s.Spec.Template, &old.Spec.Template, spec.Child("template"))...)
	errs = append(errs, validateStatefulSetSpec(&s.Spec, spec)...)
	// What may change is put back; the rest has to be as it was.
	same := s.Spec.DeepCopy()
	same.Replicas = old.Spec.Replicas
	same.Template = old.Spec.Template
	same.UpdateStrategy = old.Spec.UpdateStrategy
	same.MinReadySeconds = old.Spec.MinReadySeconds
	same.Ordinals = old.Spec.Ordinals
	same.RevisionHistoryLimit = old.Spec.RevisionHistoryLimit
	same.PersistentVolumeClaimRetentionPolicy = old.Spec.PersistentVolumeClaimRetentionPolicy
	if !equality.Semantic.DeepEqual(*same, old.Spec) {
		errs = append(errs, field.Forbidden(spec, "updates to statefulset spec for fields other than 'replicas', 'ordinals', 'template', 'updateStrategy', 'revisionHistoryLimit', 'persistentVolumeClaimRetentionPolicy' and 'minReadySeconds' are forbidden"))
	}
	return errs
}

func validateStatefulSetStatusUpdate(s, old *appsv1.StatefulSet) field.ErrorList {
	errs := apivalidation.ValidateObjectMetaUpdate(&s.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	at, status := field.NewPath("status"), &s.Status
	errs = append(errs, check.NonNegative(at.Child("observedGeneration"), status.ObservedGeneration)...)
	errs = append(errs, nonNegative(at, []count{
		{"replicas", status.Replicas},
		{"readyReplicas", status.ReadyReplicas},
		{"currentReplicas", status.CurrentReplicas},
		{"updatedReplicas", status.UpdatedReplicas},
		{"availableReplicas", status.AvailableReplicas},
	})...)
	errs = append(errs, atMost(at, []bound{
		{"readyReplicas", status.ReadyReplicas, "status.replicas", status.Replicas},
		{"currentReplicas", status.CurrentReplicas, "status.replicas", status.Replicas},
		{"updatedReplicas", status.UpdatedReplicas, "status.replicas", status.Replicas},
		{"availableReplicas", status.AvailableReplicas, "status.replicas", status.Replicas},
		{"availableReplicas", status.AvailableReplicas, "status.readyReplicas", status.ReadyReplicas},
	})...)
	return append(errs, validateCollisions(status.CollisionCount, old.Status.CollisionCount, at.Child("collisionCount"))...)
}

// validateCollisions keeps a count that tells revisions apart whose hashes
// collide from going back.
func validateCollisions(now, was *int32, at *field.Path) field.ErrorList {
	switch {
	case was == nil:
		return nil
	case now == nil:
		return field.ErrorList{field.Invalid(at, nil, "cannot be unset")}
	case *now < *was:
		return field.ErrorList{field.Invalid(at, *now, "cannot be decremented")}
	}
	return nil
}
