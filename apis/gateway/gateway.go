package gateway

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/clusterd/clusterd/apis/names"
)

const (
	// Controller is what GatewayClasses name in spec.controllerName whose Gateways
	// clusterd's own proxy serves.
	Controller gatewayv1.GatewayController = names.GatewayController
	// Class is the name of the GatewayClass that clusterd makes.
	Class = "clusterd"
	// MaxPorts is how many ports beside 80 and 443 the listeners may have together
	// that have one Service: each is one more of the Service's, and of the proxies'.
	MaxPorts = 64
)

// The kinds of routes.
const (
	HTTPRoute = "HTTPRoute"
	GRPCRoute = "GRPCRoute"
)

// Objects are what is judged. The functions are required; they are called from
// within Evaluate alone.
type Objects struct {
	Classes    []*gatewayv1.GatewayClass
	Gateways   []*gatewayv1.Gateway
	HTTPRoutes []*gatewayv1.HTTPRoute
	GRPCRoutes []*gatewayv1.GRPCRoute
	Grants     []*gatewayv1.ReferenceGrant
	Policies   []*gatewayv1.BackendTLSPolicy
	// Namespace returns a namespace's labels.
	Namespace func(name string) labels.Set
	// Service returns nil for one that does not exist.
	Service func(namespace, name string) *corev1.Service
	// ConfigMap returns nil for one that does not exist.
	ConfigMap func(namespace, name string) *corev1.ConfigMap
	// Certificate returns why a Secret holds no certificate to show; nil: it does.
	Certificate func(namespace, name string) error
}

// Fault is why something is refused: the reason of a condition and its message.
// The zero value is no fault.
type Fault struct{ Reason, Message string }

func fault[R ~string](reason R, format string, args ...any) Fault {
	return Fault{string(reason), fmt.Sprintf(format, args...)}
}

// View is what the objects of our classes mean.
type View struct {
	Gateways []*Gateway // the oldest first
	Routes   []*Route   // those with a parent of ours, the oldest first
	Policies []*Policy  // the oldest first
}

// Gateway is one of ours.
type Gateway struct {
	*gatewayv1.Gateway
	// Service is the name of the Service in front of it, in ServiceNamespace.
	Service string
	// Asked are the addresses that it wants to have.
	Asked []string
	// Refused is why it is not served at all.
	Refused Fault
	// Shown is the Secret with the certificate that backends of a BackendTLSPolicy are
	// shown; nil: none is. Unresolved is why there is none though spec.tls.backend
	// names one, the fault behind the condition ResolvedRefs.
	Shown      *types.NamespacedName
	Unresolved Fault
	// Notes are sentences on what of it is not acted on.
	Notes     []string
	Listeners []*Listener
}

// Listener is one of a Gateway's.
type Listener struct {
	*gatewayv1.Listener
	Of *Gateway
	// Kinds are those of the routes that may be attached.
	Kinds []string
	// Certificates are the Secrets to show, of a listener for HTTPS.
	Certificates []types.NamespacedName
	// Clients are those that it is for; nil: all.
	Clients *Clients
	// Attached is how many accepted routes there are.
	Attached int32
	// Conflicted, Refused and Unresolved are the faults behind the conditions
	// Conflicted, Accepted and ResolvedRefs.
	Conflicted, Refused, Unresolved Fault

	selector labels.Selector
	holds    map[string]*hostSet // by kind of the routes attached
}

// Serves reports whether requests are answered for the listener.
func (l *Listener) Serves() bool {
	return l.Of.Refused == Fault{} && l.Refused == Fault{} && (l.Protocol != gatewayv1.HTTPSProtocolType || len(l.Certificates) > 0)
}

// Host is the listener's hostname in lower case; "": any.
func (l *Listener) Host() string { return strings.ToLower(string(ptr.Deref(l.Hostname, ""))) }

// Route is an HTTPRoute or a GRPCRoute with a parent of ours.
type Route struct {
	Kind string
	*metav1.ObjectMeta
	HTTP *gatewayv1.HTTPRoute // nil for a GRPCRoute
	GRPC *gatewayv1.GRPCRoute // nil for an HTTPRoute
	// Parents are the parts of ours only.
	Parents []*Parent
	// Unresolved is the fault behind the condition ResolvedRefs: that of the first
	// backend that cannot be used.
	Unresolved Fault

	grants   grants
	policies policies
	get      func(namespace, name string) *corev1.Service
}

// Object is the route as it is.
func (r *Route) Object() metav1.Object {
	if r.HTTP != nil {
		return r.HTTP
	}
	return r.GRPC
}

// Parent is what became of one parentRef.
type Parent struct {
	Ref gatewayv1.ParentReference
	Of  *Gateway
	// Refused is the fault behind the condition Accepted.
	Refused  Fault
	Attached []Attachment
}

// Attachment is a route's place at a listener.
type Attachment struct {
	Listener *Listener
	// Hosts are the names that both are for, in lower case; "" is any.
	Hosts []string
}

// Ours are the names of the classes that are served here: the controller is
// ours, and no parameters are asked for.
func Ours(classes []*gatewayv1.GatewayClass) map[string]bool {
	out := map[string]bool{}
	for _, c := range classes {
		if c.Spec.ControllerName == Controller && (ClassFault(c) == Fault{}) {
			out[c.Name] = true
		}
	}
	return out
}

// ClassFault is why a class of ours is not accepted.
func ClassFault(c *gatewayv1.GatewayClass) Fault {
	if c.Spec.ParametersRef != nil {
		return fault(gatewayv1.GatewayClassReasonInvalidParameters, "spec.parametersRef: there are no parameters; leave it out")
	}
	return Fault{}
}

// Evaluate judges the objects.
func Evaluate(o Objects) *View {
	v := &View{}
	ours := Ours(o.Classes)
	g := index(o.Grants)
	byName := map[types.NamespacedName]*Gateway{}
	for _, gw := range slices.SortedFunc(slices.Values(o.Gateways), older) {
		if !ours[string(gw.Spec.GatewayClassName)] || gw.DeletionTimestamp != nil {
			continue
		}
		one := newGateway(gw, o, g)
		byName[types.NamespacedName{Namespace: gw.Namespace, Name: gw.Name}] = one
		v.Gateways = append(v.Gateways, one)
	}
	sharePorts(v.Gateways)
	held, all := newPolicies(o.Policies, o)
	v.Policies = all
	for _, r := range o.HTTPRoutes {
		v.Routes = append(v.Routes, &Route{Kind: HTTPRoute, ObjectMeta: &r.ObjectMeta, HTTP: r, grants: g, policies: held, get: o.Service})
	}
	for _, r := range o.GRPCRoutes {
		v.Routes = append(v.Routes, &Route{Kind: GRPCRoute, ObjectMeta: &r.ObjectMeta, GRPC: r, grants: g, policies: held, get: o.Service})
	}
	slices.SortStableFunc(v.Routes, func(a, b *Route) int { return older(a, b) })
	v.Routes = slices.DeleteFunc(v.Routes, func(r *Route) bool {
		return r.DeletionTimestamp != nil || !r.attach(byName, o.Namespace)
	})
	return v
}

// older is the order in which those who ask for the same are served.
func older[T metav1.Object](a, b T) int {
	x, y := a.GetCreationTimestamp(), b.GetCreationTimestamp()
	return cmp.Or(x.Compare(y.Time), cmp.Compare(a.GetNamespace(), b.GetNamespace()), cmp.Compare(a.GetName(), b.GetName()))
}

// Service is what one in front of the proxies should have.
type Service struct {
	// Ports are those that listeners serve on, sorted. The shared Service has 80 and
	// 443 in any case; they are left out.
	Ports []int32
	// Address is the one that it asks for; "": any.
	Address string
}

// Services are those of all Gateways, by name. One may be without ports.
func (v *View) Services() map[string]Service {
	out := map[string]Service{}
	for _, g := range v.Gateways {
		s := out[g.Service]
		for _, l := range g.Listeners {
			if l.Serves() && (!g.Shared() || l.Port != 80 && l.Port != 443) {
				s.Ports = append(s.Ports, l.Port)
			}
		}
		slices.Sort(s.Ports)
		s.Ports = slices.Compact(s.Ports)
		if len(g.Asked) > 0 {
			s.Address = g.Asked[0]
		}
		out[g.Service] = s
	}
	return out
}
