package core

import (
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1validation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

const (
	// rolePrefix + role is a label of nodes that have that role.
	rolePrefix = "node-role.kubernetes.io/"
	// roleLabel is the older form: the role is its value.
	roleLabel = "kubernetes.io/role"
	maxCIDRs  = 2 // one of each address family
)

// Node is the kind Node. Unlike other kinds it may be created with a status: a
// node registers itself whole.
func Node() kind.Kind {
	return kind.Typed[*corev1.Node]{
		GVK:        corev1.SchemeGroupVersion.WithKind("Node"),
		Resource:   "nodes",
		Singular:   "node",
		ShortNames: []string{"no"},

		New:     func() runtime.Object { return &corev1.Node{} },
		NewList: func() runtime.Object { return &corev1.NodeList{} },

		Default:        defaultNode,
		PrepareCreate:  func(n *corev1.Node) { n.Spec.ConfigSource = nil },
		PrepareUpdate:  func(n, old *corev1.Node) { n.Status = old.Status },
		Validate:       validateNode,
		ValidateUpdate: validateNodeUpdate,

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Status", "Whether the node is ready, and whether it takes new pods."),
			cells.Text("Roles", "The roles of the node, from its labels."),
			cells.Age,
			cells.Text("Version", corev1.NodeSystemInfo{}.SwaggerDoc()["kubeletVersion"]),
			cells.Wide(cells.Text("Internal-IP", corev1.NodeStatus{}.SwaggerDoc()["addresses"])),
			cells.Wide(cells.Text("External-IP", corev1.NodeStatus{}.SwaggerDoc()["addresses"])),
			cells.Wide(cells.Text("OS-Image", corev1.NodeSystemInfo{}.SwaggerDoc()["osImage"])),
			cells.Wide(cells.Text("Kernel-Version", corev1.NodeSystemInfo{}.SwaggerDoc()["kernelVersion"])),
			cells.Wide(cells.Text("Container-Runtime", corev1.NodeSystemInfo{}.SwaggerDoc()["containerRuntimeVersion"])),
		},
		Row: nodeRow,
		Fields: func(n *corev1.Node) fields.Set {
			return fields.Set{"spec.unschedulable": strconv.FormatBool(n.Spec.Unschedulable)}
		},

		Status: &kind.TypedStatus[*corev1.Node]{
			PrepareUpdate:  func(n, old *corev1.Node) { n.Spec = old.Spec },
			ValidateUpdate: validateNodeStatusUpdate,
		},
		UnconditionalUpdate: true,
	}.Kind()
}

func defaultNode(n *corev1.Node) {
	if n.Status.Allocatable == nil && n.Status.Capacity != nil {
		n.Status.Allocatable = n.Status.Capacity.DeepCopy()
	}
	roundResources(n.Status.Capacity)
	roundResources(n.Status.Allocatable)
	// podCIDR is the older name of the first of podCIDRs.
	switch {
	case n.Spec.PodCIDR != "" && len(n.Spec.PodCIDRs) == 0:
		n.Spec.PodCIDRs = []string{n.Spec.PodCIDR}
	case n.Spec.PodCIDR == "" && len(n.Spec.PodCIDRs) > 0:
		n.Spec.PodCIDR = n.Spec.PodCIDRs[0]
	}
}

func validateNode(n *corev1.Node) field.ErrorList {
	errs := apivalidation.ValidateObjectMeta(&n.ObjectMeta, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	spec := field.NewPath("spec")
	errs = append(errs, validateTaints(n.Spec.Taints, spec.Child("taints"))...)
	errs = append(errs, validatePodCIDRs(&n.Spec, spec)...)
	return append(errs, validateNodeStatus(&n.Status, field.NewPath("status"))...)
}

func validateTaints(taints []corev1.Taint, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := sets.New[string]()
	for i, taint := range taints {
		at := at.Index(i)
		errs = append(errs, metav1validation.ValidateLabelName(taint.Key, at.Child("key"))...)
		if faults := validation.IsValidLabelValue(taint.Value); len(faults) > 0 {
			errs = append(errs, field.Invalid(at.Child("value"), taint.Value, strings.Join(faults, ";")))
		}
		errs = append(errs, validateTaintEffect(taint.Effect, at.Child("effect"))...)
		key := taint.Key + ":" + string(taint.Effect)
		if seen.Has(key) {
			fault := field.Duplicate(at, taint)
			fault.Detail = "taints must be unique by key and effect pair"
			errs = append(errs, fault)
		}
		seen.Insert(key)
	}
	return errs
}

func validatePodCIDRs(spec *corev1.NodeSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	cidrs := at.Child("podCIDRs")
	for i, cidr := range spec.PodCIDRs {
		errs = append(errs, validation.IsValidCIDRForLegacyField(cidrs.Index(i), cidr, true, nil)...)
	}
	if len(spec.PodCIDRs) > maxCIDRs || len(spec.PodCIDRs) == 2 && strings.Contains(spec.PodCIDRs[0], ":") == strings.Contains(spec.PodCIDRs[1], ":") {
		errs = append(errs, field.Invalid(cidrs, spec.PodCIDRs, "may specify no more than one CIDR for each IP family"))
	}
	if len(spec.PodCIDRs) > 0 && spec.PodCIDR != spec.PodCIDRs[0] {
		errs = append(errs, field.Invalid(cidrs.Index(0), spec.PodCIDRs[0], "must be equal to `podCIDR`"))
	}
	return errs
}

func validateNodeStatus(status *corev1.NodeStatus, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, list := range []struct {
		name      string
		resources corev1.ResourceList
	}{{"capacity", status.Capacity}, {"allocatable", status.Allocatable}} {
		for name, quantity := range list.resources {
			at := at.Child(list.name).Key(string(name))
			errs = append(errs, check.Text(at, string(name), validation.IsQualifiedName)...)
			errs = append(errs, validateQuantity(name, quantity, at)...)
		}
	}
	seen := sets.New[corev1.NodeAddress]()
	for i, address := range status.Addresses {
		if seen.Has(address) {
			errs = append(errs, field.Duplicate(at.Child("addresses").Index(i), address))
		}
		seen.Insert(address)
	}
	return errs
}

// validateNodeUpdate lets labels, taints and unschedulable change, and what
// had no value yet.
func validateNodeUpdate(n, old *corev1.Node) field.ErrorList {
	errs := apivalidation.ValidateObjectMetaUpdate(&n.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	spec := field.NewPath("spec")
	errs = append(errs, validateTaints(n.Spec.Taints, spec.Child("taints"))...)
	errs = append(errs, validatePodCIDRs(&n.Spec, spec)...)

	rest := n.Spec.DeepCopy()
	// One of the other family may join the first: the cluster has got a second range.
	joined := len(old.Spec.PodCIDRs) == 1 && len(n.Spec.PodCIDRs) == 2 && n.Spec.PodCIDRs[0] == old.Spec.PodCIDRs[0]
	if len(old.Spec.PodCIDRs) > 0 && !joined && !slices.Equal(n.Spec.PodCIDRs, old.Spec.PodCIDRs) {
		errs = append(errs, field.Forbidden(spec.Child("podCIDRs"), "node updates may not change podCIDR except from \"\" to valid"))
	}
	rest.PodCIDR, rest.PodCIDRs = old.Spec.PodCIDR, old.Spec.PodCIDRs
	if old.Spec.ProviderID != "" && n.Spec.ProviderID != old.Spec.ProviderID {
		errs = append(errs, field.Forbidden(spec.Child("providerID"), "node updates may not change providerID except from \"\" to valid"))
	}
	rest.ProviderID = old.Spec.ProviderID
	rest.Taints, rest.Unschedulable = old.Spec.Taints, old.Spec.Unschedulable
	if !equality.Semantic.DeepEqual(*rest, old.Spec) {
		errs = append(errs, field.Forbidden(spec, "node updates may only change labels, taints, or capacity"))
	}
	return errs
}

func validateNodeStatusUpdate(n, old *corev1.Node) field.ErrorList {
	errs := apivalidation.ValidateObjectMetaUpdate(&n.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
	return append(errs, validateNodeStatus(&n.Status, field.NewPath("status"))...)
}

func nodeRow(n *corev1.Node, now time.Time) []any {
	info := n.Status.NodeInfo
	return []any{
		n.Name,
		nodeStatus(n),
		nodeRoles(n),
		cells.Since(n.CreationTimestamp, now),
		info.KubeletVersion,
		cells.None(nodeAddress(n, corev1.NodeInternalIP)),
		cells.None(nodeAddress(n, corev1.NodeExternalIP)),
		unknown(info.OSImage),
		unknown(info.KernelVersion),
		unknown(info.ContainerRuntimeVersion),
	}
}

func nodeStatus(n *corev1.Node) string {
	status := "Unknown"
	for _, c := range n.Status.Conditions {
		if c.Type != corev1.NodeReady {
			continue
		}
		status = "NotReady"
		if c.Status == corev1.ConditionTrue {
			status = "Ready"
		}
	}
	if n.Spec.Unschedulable {
		status += ",SchedulingDisabled"
	}
	return status
}

func nodeRoles(n *corev1.Node) string {
	roles := sets.New[string]()
	for key, value := range n.Labels {
		if role, ok := strings.CutPrefix(key, rolePrefix); ok && role != "" {
			roles.Insert(role)
		} else if key == roleLabel && value != "" {
			roles.Insert(value)
		}
	}
	return cells.None(strings.Join(sets.List(roles), ","))
}

func nodeAddress(n *corev1.Node, t corev1.NodeAddressType) string {
	for _, address := range n.Status.Addresses {
		if address.Type == t {
			return address.Address
		}
	}
	return ""
}

func unknown(text string) string {
	if text == "" {
		return "<unknown>"
	}
	return text
}
