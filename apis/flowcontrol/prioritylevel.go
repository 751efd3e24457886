package flowcontrol

import (
	"fmt"
	"time"

	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/apis/flowcontrol/bootstrap"
	"k8s.io/apiserver/pkg/util/shufflesharding"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

const (
	defaultShares      = 30
	defaultQueues      = 64
	defaultHandSize    = 8
	defaultQueueLength = 50

	// maxQueues bounds what one object makes a server set aside.
	maxQueues = 10_000_000
)

// PriorityLevelConfiguration is the kind PriorityLevelConfiguration.
func PriorityLevelConfiguration() kind.Kind {
	spec, limited := flowcontrolv1.PriorityLevelConfigurationSpec{}.SwaggerDoc(), flowcontrolv1.LimitedPriorityLevelConfiguration{}.SwaggerDoc()
	queuing := flowcontrolv1.QueuingConfiguration{}.SwaggerDoc()
	return kind.Typed[*flowcontrolv1.PriorityLevelConfiguration]{
		GVK:      flowcontrolv1.SchemeGroupVersion.WithKind("PriorityLevelConfiguration"),
		Resource: "prioritylevelconfigurations",
		Singular: "prioritylevelconfiguration",

		New:     func() runtime.Object { return &flowcontrolv1.PriorityLevelConfiguration{} },
		NewList: func() runtime.Object { return &flowcontrolv1.PriorityLevelConfigurationList{} },

		Default: func(l *flowcontrolv1.PriorityLevelConfiguration) { defaultLevel(&l.Spec) },
		PrepareCreate: func(l *flowcontrolv1.PriorityLevelConfiguration) {
			l.Status = flowcontrolv1.PriorityLevelConfigurationStatus{}
			l.Generation = 1
		},
		PrepareUpdate: func(l, old *flowcontrolv1.PriorityLevelConfiguration) {
			l.Status = old.Status
			l.Generation = old.Generation
			if !equality.Semantic.DeepEqual(l.Spec, old.Spec) {
				l.Generation++
			}
		},
		Validate: func(l *flowcontrolv1.PriorityLevelConfiguration) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&l.ObjectMeta, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			return append(errs, validateLevel(l)...)
		},
		ValidateUpdate: func(l, old *flowcontrolv1.PriorityLevelConfiguration) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&l.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			return append(errs, validateLevel(l)...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Type", spec["type"]),
			cells.Text("NominalConcurrencyShares", limited["nominalConcurrencyShares"]),
			cells.Text("Queues", queuing["queues"]),
			cells.Text("HandSize", queuing["handSize"]),
			cells.Text("QueueLengthLimit", queuing["queueLengthLimit"]),
			cells.Age,
		},
		Row: levelRow,

		Status: &kind.TypedStatus[*flowcontrolv1.PriorityLevelConfiguration]{
			PrepareUpdate: func(l, old *flowcontrolv1.PriorityLevelConfiguration) {
				l.Spec = old.Spec
				l.Generation = old.Generation
			},
			ValidateUpdate: func(l, old *flowcontrolv1.PriorityLevelConfiguration) field.ErrorList {
				errs := apivalidation.ValidateObjectMetaUpdate(&l.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
				return append(errs, validateConditions(l.Status.Conditions, func(c flowcontrolv1.PriorityLevelConfigurationCondition) condition {
					return condition{string(c.Type), c.Status, c.Reason}
				})...)
			},
		},
		UnconditionalUpdate: true,
	}.Kind()
}

func defaultLevel(spec *flowcontrolv1.PriorityLevelConfigurationSpec) {
	orElse := func(n **int32, value int32) {
		if *n == nil {
			*n = ptr.To(value)
		}
	}
	if spec.Type == flowcontrolv1.PriorityLevelEnablementExempt {
		if spec.Exempt == nil {
			spec.Exempt = &flowcontrolv1.ExemptPriorityLevelConfiguration{}
		}
		orElse(&spec.Exempt.NominalConcurrencyShares, 0)
		orElse(&spec.Exempt.LendablePercent, 0)
	}
	limited := spec.Limited
	if limited == nil {
		return
	}
	orElse(&limited.NominalConcurrencyShares, defaultShares)
	orElse(&limited.LendablePercent, 0)
	if q := limited.LimitResponse.Queuing; q != nil {
		for _, n := range []struct {
			field *int32
			value int32
		}{{&q.Queues, defaultQueues}, {&q.HandSize, defaultHandSize}, {&q.QueueLengthLimit, defaultQueueLength}} {
			if *n.field == 0 {
				*n.field = n.value
			}
		}
	}
}

func validateLevel(l *flowcontrolv1.PriorityLevelConfiguration) field.ErrorList {
	at := field.NewPath("spec")
	spec := &l.Spec
	exempt := flowcontrolv1.PriorityLevelConfigurationNameExempt
	if catchAll := bootstrap.MandatoryPriorityLevelConfigurationCatchAll; l.Name == catchAll.Name && !equality.Semantic.DeepEqual(*spec, catchAll.Spec) {
		return field.ErrorList{field.Invalid(at, *spec, fmt.Sprintf("spec of '%s' must equal the fixed value", l.Name))}
	}
	errs := check.OneOf(at.Child("type"), spec.Type, flowcontrolv1.PriorityLevelEnablementExempt, flowcontrolv1.PriorityLevelEnablementLimited)
	if len(errs) > 0 {
		return errs
	}
	if isExempt := spec.Type == flowcontrolv1.PriorityLevelEnablementExempt; isExempt != (l.Name == exempt) {
		errs = append(errs, field.Invalid(at.Child("type"), spec.Type, fmt.Sprintf("type must be '%s' if and only if the name is '%s'", flowcontrolv1.PriorityLevelEnablementExempt, exempt)))
	}
	switch spec.Type {
	case flowcontrolv1.PriorityLevelEnablementExempt:
		if spec.Limited != nil {
			errs = append(errs, field.Forbidden(at.Child("limited"), "must be nil if the type is not Limited"))
		}
		if e := spec.Exempt; e != nil {
			errs = append(errs, validateShares(e.NominalConcurrencyShares, e.LendablePercent, at.Child("exempt"))...)
		}
	case flowcontrolv1.PriorityLevelEnablementLimited:
		if spec.Exempt != nil {
			errs = append(errs, field.Forbidden(at.Child("exempt"), "must be nil if the type is Limited"))
		}
		if spec.Limited == nil {
			return append(errs, field.Required(at.Child("limited"), "must not be empty when type is Limited"))
		}
		errs = append(errs, validateLimited(spec.Limited, at.Child("limited"))...)
	}
	return errs
}

func validateShares(shares, lendable *int32, at *field.Path) field.ErrorList {
	errs := check.NonNegative(at.Child("nominalConcurrencyShares"), int64(ptr.Deref(shares, 0)))
	if n := ptr.Deref(lendable, 0); n < 0 || n > 100 {
		errs = append(errs, field.Invalid(at.Child("lendablePercent"), n, "must be between 0 and 100, inclusive"))
	}
	return errs
}

func validateLimited(l *flowcontrolv1.LimitedPriorityLevelConfiguration, at *field.Path) field.ErrorList {
	errs := validateShares(l.NominalConcurrencyShares, l.LendablePercent, at)
	errs = append(errs, check.NonNegative(at.Child("borrowingLimitPercent"), int64(ptr.Deref(l.BorrowingLimitPercent, 0)))...)
	response, at := &l.LimitResponse, at.Child("limitResponse")
	errs = append(errs, check.OneOf(at.Child("type"), response.Type, flowcontrolv1.LimitResponseTypeQueue, flowcontrolv1.LimitResponseTypeReject)...)
	q := response.Queuing
	switch {
	case response.Type == flowcontrolv1.LimitResponseTypeQueue && q == nil:
		errs = append(errs, field.Required(at.Child("queuing"), "must not be empty if limited.limitResponse.type is Queue"))
	case response.Type == flowcontrolv1.LimitResponseTypeReject && q != nil:
		errs = append(errs, field.Forbidden(at.Child("queuing"), "must be nil if limited.limitResponse.type is not Queue"))
	case q != nil:
		errs = append(errs, validateQueuing(q, at.Child("queuing"))...)
	}
	return errs
}

func validateQueuing(q *flowcontrolv1.QueuingConfiguration, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, n := range []struct {
		field string
		value int32
	}{{"queueLengthLimit", q.QueueLengthLimit}, {"queues", q.Queues}, {"handSize", q.HandSize}} {
		if n.value <= 0 {
			errs = append(errs, field.Invalid(at.Child(n.field), n.value, "must be positive"))
		}
	}
	if len(errs) > 0 {
		return errs
	}
	switch {
	case q.Queues > maxQueues:
		errs = append(errs, field.Invalid(at.Child("queues"), q.Queues, fmt.Sprintf("must not be greater than %v", maxQueues)))
	case q.HandSize > q.Queues:
		errs = append(errs, field.Invalid(at.Child("handSize"), q.HandSize, fmt.Sprintf("should not be greater than queues (%d)", q.Queues)))
	default:
		if bits := shufflesharding.RequiredEntropyBits(int(q.Queues), int(q.HandSize)); bits > shufflesharding.MaxHashBits {
			errs = append(errs, field.Invalid(at.Child("handSize"), q.HandSize,
				fmt.Sprintf("required entropy bits deduced from queues (%d) and handSize is %d, at most %d is possible: take fewer queues or a smaller hand", q.Queues, bits, shufflesharding.MaxHashBits)))
		}
	}
	return errs
}

func levelRow(l *flowcontrolv1.PriorityLevelConfiguration, now time.Time) []any {
	const none = "<none>"
	text := func(n *int32) string {
		if n == nil {
			return none
		}
		return fmt.Sprint(*n)
	}
	shares, queues, hand, length := none, none, none, none
	switch spec := &l.Spec; {
	case spec.Exempt != nil:
		shares = text(spec.Exempt.NominalConcurrencyShares)
	case spec.Limited != nil:
		shares = text(spec.Limited.NominalConcurrencyShares)
		if q := spec.Limited.LimitResponse.Queuing; q != nil {
			queues, hand, length = fmt.Sprint(q.Queues), fmt.Sprint(q.HandSize), fmt.Sprint(q.QueueLengthLimit)
		}
	}
	return []any{l.Name, string(l.Spec.Type), shares, queues, hand, length, cells.Since(l.CreationTimestamp, now)}
}
