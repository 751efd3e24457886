package resource

import (
	"fmt"
	"slices"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// What is stored, and not acted on yet, is warned of where it is written.

func warnOfClaim(spec *resourcev1.ResourceClaimSpec, at *field.Path) (out []string) {
	for i := range spec.Devices.Requests {
		r := &spec.Devices.Requests[i]
		derived := r.Exactly != nil && len(r.Exactly.DerivedAttributes) > 0 ||
			slices.ContainsFunc(r.FirstAvailable, func(sub resourcev1.DeviceSubRequest) bool { return len(sub.DerivedAttributes) > 0 })
		if derived {
			out = append(out, fmt.Sprintf("%s: derivedAttributes are stored, but clusterd does not evaluate them yet and allocates nothing to such a request", at.Child("devices", "requests").Index(i)))
		}
	}
	return out
}
