package storage

import (
	"fmt"
	"strings"
	"time"

	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// maxDriverName is how long a CSI driver's name may be.
const maxDriverName = 63

func validateDriverName(name string, at *field.Path) field.ErrorList {
	errs := check.RequiredText(at, strings.ToLower(name), check.Subdomain)
	if len(name) > maxDriverName {
		errs = append(errs, field.TooLong(at, name, maxDriverName))
	}
	return errs
}

// CSIDriver is the kind CSIDriver.
func CSIDriver() kind.Kind {
	return kind.Typed[*storagev1.CSIDriver]{
		GVK:      storagev1.SchemeGroupVersion.WithKind("CSIDriver"),
		Resource: "csidrivers",
		Singular: "csidriver",

		New:     func() runtime.Object { return &storagev1.CSIDriver{} },
		NewList: func() runtime.Object { return &storagev1.CSIDriverList{} },

		Default: func(d *storagev1.CSIDriver) {
			setDefault(&d.Spec.AttachRequired, true)
			setDefault(&d.Spec.PodInfoOnMount, false)
			setDefault(&d.Spec.StorageCapacity, false)
			setDefault(&d.Spec.FSGroupPolicy, storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy)
			setDefault(&d.Spec.RequiresRepublish, false)
			setDefault(&d.Spec.SELinuxMount, false)
			if len(d.Spec.VolumeLifecycleModes) == 0 {
				d.Spec.VolumeLifecycleModes = []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent}
			}
		},
		Validate: func(d *storagev1.CSIDriver) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&d.ObjectMeta, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			return append(errs, validateDriver(d)...)
		},
		ValidateUpdate: func(d, old *storagev1.CSIDriver) field.ErrorList {
			spec := field.NewPath("spec")
			errs := apivalidation.ValidateObjectMetaUpdate(&d.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			errs = append(errs, validateDriver(d)...)
			errs = append(errs, apivalidation.ValidateImmutableField(d.Spec.AttachRequired, old.Spec.AttachRequired, spec.Child("attachRequired"))...)
			return append(errs, apivalidation.ValidateImmutableField(d.Spec.VolumeLifecycleModes, old.Spec.VolumeLifecycleModes, spec.Child("volumeLifecycleModes"))...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			{Name: "AttachRequired", Type: "boolean", Description: storagev1.CSIDriverSpec{}.SwaggerDoc()["attachRequired"]},
			{Name: "PodInfoOnMount", Type: "boolean", Description: storagev1.CSIDriverSpec{}.SwaggerDoc()["podInfoOnMount"]},
			{Name: "StorageCapacity", Type: "boolean", Description: storagev1.CSIDriverSpec{}.SwaggerDoc()["storageCapacity"]},
			cells.Text("TokenRequests", storagev1.CSIDriverSpec{}.SwaggerDoc()["tokenRequests"]),
			{Name: "RequiresRepublish", Type: "boolean", Description: storagev1.CSIDriverSpec{}.SwaggerDoc()["requiresRepublish"]},
			cells.Text("Modes", storagev1.CSIDriverSpec{}.SwaggerDoc()["volumeLifecycleModes"]),
			cells.Age,
		},
		Row: func(d *storagev1.CSIDriver, now time.Time) []any {
			var audiences, modes []string
			for _, request := range d.Spec.TokenRequests {
				audiences = append(audiences, request.Audience)
			}
			for _, mode := range d.Spec.VolumeLifecycleModes {
				modes = append(modes, string(mode))
			}
			tokens := "<unset>"
			if len(audiences) > 0 {
				tokens = strings.Join(audiences, ",")
			}
			return []any{
				d.Name, d.Spec.AttachRequired == nil || *d.Spec.AttachRequired, isTrue(d.Spec.PodInfoOnMount), isTrue(d.Spec.StorageCapacity),
				tokens, isTrue(d.Spec.RequiresRepublish), cells.None(strings.Join(modes, ",")), cells.Since(d.CreationTimestamp, now),
			}
		},
	}.Kind()
}

// minAllocatableUpdate is how often a driver may be asked how many volumes a node can
// have, in seconds.
const minAllocatableUpdate = 10

func validateDriver(d *storagev1.CSIDriver) field.ErrorList {
	spec := field.NewPath("spec")
	errs := validateDriverName(d.Name, field.NewPath("metadata", "name"))
	for _, need := range []struct {
		name  string
		value *bool
	}{{"attachRequired", d.Spec.AttachRequired}, {"podInfoOnMount", d.Spec.PodInfoOnMount}, {"storageCapacity", d.Spec.StorageCapacity}} {
		if need.value == nil {
			errs = append(errs, field.Required(spec.Child(need.name), ""))
		}
	}
	if seconds := d.Spec.NodeAllocatableUpdatePeriodSeconds; seconds != nil && *seconds < minAllocatableUpdate {
		errs = append(errs, field.Invalid(spec.Child("nodeAllocatableUpdatePeriodSeconds"), *seconds, fmt.Sprintf("must be greater than or equal to %d seconds", minAllocatableUpdate)))
	}
	errs = append(errs, check.OneOfOrNil(spec.Child("fsGroupPolicy"), d.Spec.FSGroupPolicy,
		storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy, storagev1.FileFSGroupPolicy, storagev1.NoneFSGroupPolicy)...)
	for i, mode := range d.Spec.VolumeLifecycleModes {
		errs = append(errs, check.OneOf(spec.Child("volumeLifecycleModes").Index(i), mode, storagev1.VolumeLifecyclePersistent, storagev1.VolumeLifecycleEphemeral)...)
	}
	seen := map[string]bool{}
	for i, request := range d.Spec.TokenRequests {
		at := spec.Child("tokenRequests").Index(i)
		if seen[request.Audience] {
			errs = append(errs, field.Duplicate(at.Child("audience"), request.Audience))
		}
		seen[request.Audience] = true
		if seconds := request.ExpirationSeconds; seconds != nil && *seconds < 10*60 {
			errs = append(errs, field.Invalid(at.Child("expirationSeconds"), *seconds, "may not specify a duration less than 10 minutes"))
		}
	}
	return errs
}

// CSINode is the kind CSINode.
func CSINode() kind.Kind {
	return kind.Typed[*storagev1.CSINode]{
		GVK:      storagev1.SchemeGroupVersion.WithKind("CSINode"),
		Resource: "csinodes",
		Singular: "csinode",

		New:     func() runtime.Object { return &storagev1.CSINode{} },
		NewList: func() runtime.Object { return &storagev1.CSINodeList{} },

		Validate: func(n *storagev1.CSINode) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&n.ObjectMeta, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			return append(errs, validateNodeDrivers(n.Spec.Drivers)...)
		},
		ValidateUpdate: func(n, old *storagev1.CSINode) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&n.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			errs = append(errs, validateNodeDrivers(n.Spec.Drivers)...)
			for i, driver := range n.Spec.Drivers {
				for _, was := range old.Spec.Drivers {
					driver.Allocatable, was.Allocatable = nil, nil
					if was.Name == driver.Name && !equality.Semantic.DeepEqual(driver, was) {
						errs = append(errs, field.Invalid(field.NewPath("spec", "drivers").Index(i), driver, "field is immutable"))
					}
				}
			}
			return errs
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Number("Drivers", storagev1.CSINodeSpec{}.SwaggerDoc()["drivers"]),
			cells.Age,
		},
		Row: func(n *storagev1.CSINode, now time.Time) []any {
			return []any{n.Name, int64(len(n.Spec.Drivers)), cells.Since(n.CreationTimestamp, now)}
		},
	}.Kind()
}

func validateNodeDrivers(drivers []storagev1.CSINodeDriver) field.ErrorList {
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, driver := range drivers {
		at := field.NewPath("spec", "drivers").Index(i)
		errs = append(errs, validateDriverName(driver.Name, at.Child("name"))...)
		if seen[driver.Name] {
			errs = append(errs, field.Duplicate(at.Child("name"), driver.Name))
		}
		seen[driver.Name] = true
		switch {
		case driver.NodeID == "":
			errs = append(errs, field.Required(at.Child("nodeID"), ""))
		case len(driver.NodeID) > 192:
			errs = append(errs, field.Invalid(at.Child("nodeID"), driver.NodeID, "must be 192 characters or less"))
		}
		for j, key := range driver.TopologyKeys {
			errs = append(errs, check.Text(at.Child("topologyKeys").Index(j), key, validation.IsQualifiedName)...)
		}
		if a := driver.Allocatable; a != nil && a.Count != nil {
			errs = append(errs, check.NonNegative(at.Child("allocatable", "count"), int64(*a.Count))...)
		}
	}
	return errs
}

// CSIStorageCapacity is the kind CSIStorageCapacity.
func CSIStorageCapacity() kind.Kind {
	return kind.Typed[*storagev1.CSIStorageCapacity]{
		GVK:        storagev1.SchemeGroupVersion.WithKind("CSIStorageCapacity"),
		Resource:   "csistoragecapacities",
		Singular:   "csistoragecapacity",
		Namespaced: true,

		New:     func() runtime.Object { return &storagev1.CSIStorageCapacity{} },
		NewList: func() runtime.Object { return &storagev1.CSIStorageCapacityList{} },

		Validate: func(c *storagev1.CSIStorageCapacity) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&c.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			errs = append(errs, check.RequiredText(field.NewPath("storageClassName"), c.StorageClassName, check.Subdomain)...)
			errs = append(errs, check.LabelSelector(field.NewPath("nodeTopology"), c.NodeTopology)...)
			return append(errs, validateCapacity(c)...)
		},
		ValidateUpdate: func(c, old *storagev1.CSIStorageCapacity) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&c.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			errs = append(errs, validateCapacity(c)...)
			errs = append(errs, apivalidation.ValidateImmutableField(c.NodeTopology, old.NodeTopology, field.NewPath("nodeTopology"))...)
			return append(errs, apivalidation.ValidateImmutableField(c.StorageClassName, old.StorageClassName, field.NewPath("storageClassName"))...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("StorageClassName", storagev1.CSIStorageCapacity{}.SwaggerDoc()["storageClassName"]),
			cells.Text("Capacity", storagev1.CSIStorageCapacity{}.SwaggerDoc()["capacity"]),
		},
		Row: func(c *storagev1.CSIStorageCapacity, _ time.Time) []any {
			size := "<unset>"
			if c.Capacity != nil {
				size = c.Capacity.String()
			}
			return []any{c.Name, c.StorageClassName, size}
		},
	}.Kind()
}

func validateCapacity(c *storagev1.CSIStorageCapacity) field.ErrorList {
	var errs field.ErrorList
	for _, size := range []struct {
		name  string
		value *resource.Quantity
	}{{"capacity", c.Capacity}, {"maximumVolumeSize", c.MaximumVolumeSize}} {
		if size.value != nil && size.value.Sign() < 0 {
			errs = append(errs, field.Invalid(field.NewPath(size.name), size.value.String(), "must be greater than or equal to 0"))
		}
	}
	return errs
}
