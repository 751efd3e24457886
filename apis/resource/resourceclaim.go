package resource

import (
	"strings"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// ResourceClaim is the kind ResourceClaim: devices that pods ask for.
func ResourceClaim() kind.Kind {
	return kind.Typed[*resourcev1.ResourceClaim]{
		GVK:        resourcev1.SchemeGroupVersion.WithKind("ResourceClaim"),
		Resource:   "resourceclaims",
		Singular:   "resourceclaim",
		Namespaced: true,

		New:     func() runtime.Object { return &resourcev1.ResourceClaim{} },
		NewList: func() runtime.Object { return &resourcev1.ResourceClaimList{} },

		Default:       func(c *resourcev1.ResourceClaim) { setRequestDefaults(&c.Spec.Devices) },
		PrepareCreate: func(c *resourcev1.ResourceClaim) { c.Status = resourcev1.ResourceClaimStatus{} },
		PrepareUpdate: func(c, old *resourcev1.ResourceClaim) { c.Status = old.Status },
		Validate: func(c *resourcev1.ResourceClaim) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&c.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			return append(errs, validateClaimSpec(&c.Spec, field.NewPath("spec"))...)
		},
		ValidateUpdate: func(c, old *resourcev1.ResourceClaim) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&c.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			return append(errs, apivalidation.ValidateImmutableField(c.Spec, old.Spec, field.NewPath("spec"))...)
		},
		Warnings: func(c *resourcev1.ResourceClaim) []string { return warnOfClaim(&c.Spec, field.NewPath("spec")) },

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("State", "A summary of the current state (allocated, pending, reserved, etc.)."),
			cells.Age,
		},
		Row: func(c *resourcev1.ResourceClaim, now time.Time) []any {
			return []any{c.Name, claimState(c), cells.Since(c.CreationTimestamp, now)}
		},

		Status: &kind.TypedStatus[*resourcev1.ResourceClaim]{
			PrepareUpdate: func(c, old *resourcev1.ResourceClaim) { c.Spec = old.Spec },
			ValidateUpdate: func(c, old *resourcev1.ResourceClaim) field.ErrorList {
				errs := apivalidation.ValidateObjectMetaUpdate(&c.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
				return append(errs, validateClaimStatus(c, old)...)
			},
		},

		UnconditionalUpdate: true,
	}.Kind()
}

func claimState(c *resourcev1.ResourceClaim) string {
	var states []string
	if c.DeletionTimestamp != nil {
		states = append(states, "deleted")
	}
	if c.Status.Allocation == nil {
		if c.DeletionTimestamp == nil {
			states = append(states, "pending")
		}
	} else {
		states = append(states, "allocated")
		if len(c.Status.ReservedFor) > 0 {
			states = append(states, "reserved")
		}
	}
	return strings.Join(states, ",")
}

// validateClaimStatus: an allocation is for the claim's requests and does not
// change; while a pod uses it, it stays.
func validateClaimStatus(c, old *resourcev1.ResourceClaim) field.ErrorList {
	var errs field.ErrorList
	status := field.NewPath("status")
	devices := sets.New[[3]string]()
	if a := c.Status.Allocation; a != nil {
		at := status.Child("allocation")
		if old.Status.Allocation != nil {
			errs = append(errs, apivalidation.ValidateImmutableField(a, old.Status.Allocation, at)...)
		}
		names := requestNames(&c.Spec.Devices)
		results := at.Child("devices", "results")
		errs = append(errs, atMost(results, len(a.Devices.Results), resourcev1.AllocationResultsMaxSize)...)
		for i, r := range a.Devices.Results {
			if !names.Has(r.Request) {
				errs = append(errs, field.Invalid(results.Index(i).Child("request"), r.Request, "must be the name of a request in the claim or the name of a request and a subrequest separated by '/'"))
			}
			errs = append(errs, validateDevice(r.Driver, r.Pool, r.Device, results.Index(i))...)
			devices.Insert([3]string{r.Driver, r.Pool, r.Device})
		}
	}
	errs = append(errs, validateConsumers(c, old, status)...)
	seen := sets.New[[3]string]()
	for i, d := range c.Status.Devices {
		at := status.Child("devices").Index(i)
		id := [3]string{d.Driver, d.Pool, d.Device}
		if d.ShareID == nil && seen.Has(id) {
			errs = append(errs, field.Duplicate(at, strings.Join(id[:], "/")))
		}
		seen.Insert(id)
		if !devices.Has(id) {
			errs = append(errs, field.Invalid(at, strings.Join(id[:], "/"), "must be an allocated device in the claim"))
		}
		errs = append(errs, atMost(at.Child("conditions"), len(d.Conditions), resourcev1.AllocatedDeviceStatusMaxConditions)...)
		if d.Data != nil {
			errs = append(errs, validateParameters(d.Data.Raw, at.Child("data"))...)
		}
	}
	return errs
}

func validateDevice(driver, pool, device string, at *field.Path) field.ErrorList {
	errs := validateDriver(driver, at.Child("driver"))
	errs = append(errs, validatePool(pool, at.Child("pool"))...)
	return append(errs, validateName(device, sets.New[string](), at.Child("device"))...)
}

func validateConsumers(c, old *resourcev1.ResourceClaim, status *field.Path) field.ErrorList {
	at := status.Child("reservedFor")
	errs := atMost(at, len(c.Status.ReservedFor), resourcev1.ResourceClaimReservedForMaxSize)
	seen := sets.New[types.UID]()
	for i, user := range c.Status.ReservedFor {
		for _, word := range []struct{ name, value string }{{"resource", user.Resource}, {"name", user.Name}, {"uid", string(user.UID)}} {
			if word.value == "" {
				errs = append(errs, field.Required(at.Index(i).Child(word.name), ""))
			}
		}
		if user.APIGroup != "" {
			errs = append(errs, check.Text(at.Index(i).Child("apiGroup"), user.APIGroup, check.Subdomain)...)
		}
		if user.UID != "" && seen.Has(user.UID) {
			errs = append(errs, field.Duplicate(at.Index(i).Child("uid"), user.UID))
		}
		seen.Insert(user.UID)
	}
	switch n := len(c.Status.ReservedFor); {
	case n > 0 && c.Status.Allocation == nil:
		errs = append(errs, field.Forbidden(at, "may not be specified when `allocated` is not set"))
	case n > len(old.Status.ReservedFor) && c.DeletionTimestamp != nil:
		errs = append(errs, field.Forbidden(at, "new entries may not be added while `deletionTimestamp` is set"))
	}
	return errs
}

// ResourceClaimTemplate is the kind ResourceClaimTemplate: claims that are to
// be made for each pod that names it.
func ResourceClaimTemplate() kind.Kind {
	return kind.Typed[*resourcev1.ResourceClaimTemplate]{
		GVK:        resourcev1.SchemeGroupVersion.WithKind("ResourceClaimTemplate"),
		Resource:   "resourceclaimtemplates",
		Singular:   "resourceclaimtemplate",
		Namespaced: true,

		New:     func() runtime.Object { return &resourcev1.ResourceClaimTemplate{} },
		NewList: func() runtime.Object { return &resourcev1.ResourceClaimTemplateList{} },

		Default: func(t *resourcev1.ResourceClaimTemplate) { setRequestDefaults(&t.Spec.Spec.Devices) },
		Validate: func(t *resourcev1.ResourceClaimTemplate) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&t.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			return append(errs, validateClaimSpec(&t.Spec.Spec, field.NewPath("spec", "spec"))...)
		},
		ValidateUpdate: func(t, old *resourcev1.ResourceClaimTemplate) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&t.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			return append(errs, apivalidation.ValidateImmutableField(t.Spec, old.Spec, field.NewPath("spec"))...)
		},
		Warnings: func(t *resourcev1.ResourceClaimTemplate) []string {
			return warnOfClaim(&t.Spec.Spec, field.NewPath("spec", "spec"))
		},

		Columns: []metav1.TableColumnDefinition{cells.Name, cells.Age},
		Row: func(t *resourcev1.ResourceClaimTemplate, now time.Time) []any {
			return []any{t.Name, cells.Since(t.CreationTimestamp, now)}
		},

		UnconditionalUpdate: true,
	}.Kind()
}
