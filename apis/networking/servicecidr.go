package networking

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/kind"
)

const (
	// DefaultServiceCIDR is the name of the ServiceCIDR with the range that the
	// cluster was begun with.
	DefaultServiceCIDR = "kubernetes"
	// ServiceCIDRFinalizer keeps a ServiceCIDR while Services have addresses of it
	// that no other gives.
	ServiceCIDRFinalizer = "networking.k8s.io/service-cidr-finalizer"
)

// ServiceCIDR is the kind ServiceCIDR.
func ServiceCIDR() kind.Kind {
	return kind.Typed[*networkingv1.ServiceCIDR]{
		GVK:      networkingv1.SchemeGroupVersion.WithKind("ServiceCIDR"),
		Resource: "servicecidrs",
		Singular: "servicecidr",

		New:     func() runtime.Object { return &networkingv1.ServiceCIDR{} },
		NewList: func() runtime.Object { return &networkingv1.ServiceCIDRList{} },

		PrepareCreate: func(c *networkingv1.ServiceCIDR) {
			c.Status = networkingv1.ServiceCIDRStatus{}
			c.Generation = 1
		},
		PrepareUpdate: func(c, old *networkingv1.ServiceCIDR) {
			c.Status = old.Status
			c.Generation = old.Generation
			if !equality.Semantic.DeepEqual(c.Spec, old.Spec) {
				c.Generation++
			}
		},
		Validate: func(c *networkingv1.ServiceCIDR) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&c.ObjectMeta, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			return append(errs, validateCIDRs(c.Spec.CIDRs, field.NewPath("spec", "cidrs"))...)
		},
		ValidateUpdate: func(c, old *networkingv1.ServiceCIDR) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&c.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			now, before, at := c.Spec.CIDRs, old.Spec.CIDRs, field.NewPath("spec", "cidrs")
			if slices.Equal(now, before) {
				return errs
			}
			// A second family may join the first; addresses are given already, so that
			// nothing else may change.
			if len(before) != 1 || len(now) != 2 || now[0] != before[0] {
				return append(errs, field.Invalid(at, now, "field is immutable, but for a range of the other IP family that is added behind the only one"))
			}
			return append(errs, validateCIDRs(now, at)...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("CIDRs", networkingv1.ServiceCIDRSpec{}.SwaggerDoc()["cidrs"]),
			cells.Age,
		},
		Row: func(c *networkingv1.ServiceCIDR, now time.Time) []any {
			return []any{c.Name, strings.Join(c.Spec.CIDRs, ","), cells.Since(c.CreationTimestamp, now)}
		},

		Status: &kind.TypedStatus[*networkingv1.ServiceCIDR]{
			PrepareUpdate: func(c, old *networkingv1.ServiceCIDR) {
				c.Spec = old.Spec
				c.Generation = old.Generation
			},
			ValidateUpdate: func(c, old *networkingv1.ServiceCIDR) field.ErrorList {
				return apivalidation.ValidateObjectMetaUpdate(&c.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			},
		},
		UnconditionalUpdate: true,
	}.Kind()
}

func validateCIDRs(cidrs []string, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	switch {
	case len(cidrs) == 0:
		return append(errs, field.Required(at, "at least one CIDR required"))
	case len(cidrs) > 2:
		return append(errs, field.TooMany(at, len(cidrs), 2))
	}
	var families []bool
	for i, cidr := range cidrs {
		at := at.Index(i)
		if faults := validation.IsValidCIDR(at, cidr); len(faults) > 0 {
			errs = append(errs, faults...)
			continue
		}
		families = append(families, strings.Contains(cidr, ":"))
	}
	if len(families) == 2 && families[0] == families[1] {
		errs = append(errs, field.Invalid(at, cidrs, "may specify no more than one CIDR for each IP family, i.e. 192.168.0.0/24 and 2001:db8::/64"))
	}
	return errs
}

// ServiceRanges are the ranges of a ServiceCIDR from which Services may be given
// addresses: those of one that is ready and stays.
func ServiceRanges(c *networkingv1.ServiceCIDR) []netip.Prefix {
	ready := slices.ContainsFunc(c.Status.Conditions, func(s metav1.Condition) bool {
		return s.Type == networkingv1.ServiceCIDRConditionReady && s.Status == metav1.ConditionTrue
	})
	if !ready || c.DeletionTimestamp != nil {
		return nil
	}
	return rangesOf(c)
}

// ServedRanges are the ranges of a ServiceCIDR of which Services may have addresses:
// those of one that is ready, and of one that is deleted while Services have some.
func ServedRanges(c *networkingv1.ServiceCIDR) []netip.Prefix {
	served := slices.ContainsFunc(c.Status.Conditions, func(s metav1.Condition) bool {
		return s.Type == networkingv1.ServiceCIDRConditionReady && (s.Status == metav1.ConditionTrue || s.Reason == networkingv1.ServiceCIDRReasonTerminating)
	})
	if !served {
		return nil
	}
	return rangesOf(c)
}

func rangesOf(c *networkingv1.ServiceCIDR) []netip.Prefix {
	var ranges []netip.Prefix
	for _, text := range c.Spec.CIDRs {
		if network, err := netip.ParsePrefix(text); err == nil {
			ranges = append(ranges, network.Masked())
		}
	}
	return ranges
}
