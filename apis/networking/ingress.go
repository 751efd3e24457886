package networking

import (
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	pathvalidation "k8s.io/apimachinery/pkg/api/validation/path"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// classAnnotation named the class before spec.ingressClassName did.
const classAnnotation = "kubernetes.io/ingress.class"

// Ingress is the kind Ingress.
func Ingress() kind.Kind {
	return kind.Typed[*networkingv1.Ingress]{
		GVK:        networkingv1.SchemeGroupVersion.WithKind("Ingress"),
		Resource:   "ingresses",
		Singular:   "ingress",
		ShortNames: []string{"ing"},
		Namespaced: true,

		New:     func() runtime.Object { return &networkingv1.Ingress{} },
		NewList: func() runtime.Object { return &networkingv1.IngressList{} },

		PrepareCreate: func(i *networkingv1.Ingress) {
			i.Status = networkingv1.IngressStatus{}
			i.Generation = 1
		},
		PrepareUpdate: func(i, old *networkingv1.Ingress) {
			i.Status = old.Status
			i.Generation = old.Generation
			if !equality.Semantic.DeepEqual(i.Spec, old.Spec) {
				i.Generation++
			}
		},
		Validate: func(i *networkingv1.Ingress) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&i.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			if class := i.Annotations[classAnnotation]; class != "" && i.Spec.IngressClassName != nil && *i.Spec.IngressClassName != class {
				errs = append(errs, field.Invalid(field.NewPath("annotations").Child(classAnnotation), class, "must match `ingressClassName` when both are specified"))
			}
			return append(errs, validateIngress(&i.Spec, field.NewPath("spec"))...)
		},
		ValidateUpdate: func(i, old *networkingv1.Ingress) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&i.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			return append(errs, validateIngress(&i.Spec, field.NewPath("spec"))...)
		},
		Warnings: func(i *networkingv1.Ingress) []string {
			var warnings []string
			if i.Annotations[classAnnotation] != "" {
				warnings = append(warnings, fmt.Sprintf("annotation %q is deprecated, please use 'spec.ingressClassName' instead", classAnnotation))
			}
			return warnings
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Class", "The name of the IngressClass resource that should be used for additional configuration"),
			cells.Text("Hosts", "Hosts that incoming requests are matched against before the ingress rule"),
			cells.Text("Address", "Address is a list containing ingress points for the load-balancer"),
			cells.Text("Ports", "Ports of TLS configurations that open"),
			cells.Age,
		},
		Row: func(i *networkingv1.Ingress, now time.Time) []any {
			class := i.Annotations[classAnnotation]
			if i.Spec.IngressClassName != nil {
				class = *i.Spec.IngressClassName
			}
			ports := "80"
			if len(i.Spec.TLS) > 0 {
				ports = "80, 443"
			}
			return []any{i.Name, cells.None(class), hosts(i.Spec.Rules), address(i.Status.LoadBalancer.Ingress), ports, cells.Since(i.CreationTimestamp, now)}
		},

		Status: &kind.TypedStatus[*networkingv1.Ingress]{
			PrepareUpdate: func(i, old *networkingv1.Ingress) {
				i.Spec = old.Spec
				i.Generation = old.Generation
			},
			ValidateUpdate: func(i, old *networkingv1.Ingress) field.ErrorList {
				errs := apivalidation.ValidateObjectMetaUpdate(&i.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
				at := field.NewPath("status", "loadBalancer", "ingress")
				for j, entry := range i.Status.LoadBalancer.Ingress {
					if entry.IP != "" {
						errs = append(errs, validation.IsValidIP(at.Index(j).Child("ip"), entry.IP)...)
					}
					if entry.Hostname != "" {
						errs = append(errs, check.Text(at.Index(j).Child("hostname"), entry.Hostname, check.Subdomain)...)
					}
				}
				return errs
			},
		},
		UnconditionalUpdate: true,
	}.Kind()
}

func hosts(rules []networkingv1.IngressRule) string {
	var names []string
	for _, rule := range rules {
		if rule.Host != "" {
			names = append(names, rule.Host)
		}
	}
	switch {
	case len(names) == 0:
		return "*"
	case len(names) > 3:
		return fmt.Sprintf("%s + %d more...", strings.Join(names[:3], ","), len(names)-3)
	}
	return strings.Join(names, ",")
}

func address(entries []networkingv1.IngressLoadBalancerIngress) string {
	var names []string
	for _, entry := range entries {
		if entry.IP != "" {
			names = append(names, entry.IP)
		} else if entry.Hostname != "" {
			names = append(names, entry.Hostname)
		}
	}
	return strings.Join(names, ",")
}

func validateIngress(spec *networkingv1.IngressSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if len(spec.Rules) == 0 && spec.DefaultBackend == nil {
		errs = append(errs, field.Invalid(at, spec.Rules, "either `defaultBackend` or `rules` must be specified"))
	}
	if spec.DefaultBackend != nil {
		errs = append(errs, validateBackend(spec.DefaultBackend, at.Child("defaultBackend"))...)
	}
	for i, rule := range spec.Rules {
		at := at.Child("rules").Index(i)
		errs = append(errs, validateHost(rule.Host, at.Child("host"))...)
		if rule.HTTP == nil {
			continue
		}
		if len(rule.HTTP.Paths) == 0 {
			errs = append(errs, field.Required(at.Child("http", "paths"), ""))
		}
		for j := range rule.HTTP.Paths {
			errs = append(errs, validatePath(&rule.HTTP.Paths[j], at.Child("http", "paths").Index(j))...)
		}
	}
	for i, tls := range spec.TLS {
		at := at.Child("tls").Index(i)
		for j, host := range tls.Hosts {
			errs = append(errs, validateHost(host, at.Child("hosts").Index(j))...)
		}
		if tls.SecretName != "" {
			errs = append(errs, check.Text(at.Child("secretName"), tls.SecretName, check.Subdomain)...)
		}
	}
	if class := spec.IngressClassName; class != nil {
		errs = append(errs, check.Text(at.Child("ingressClassName"), *class, check.Subdomain)...)
	}
	return errs
}

func validateHost(host string, at *field.Path) field.ErrorList {
	switch {
	case host == "":
		return nil
	case strings.Contains(host, "*"):
		return check.Text(at, host, validation.IsWildcardDNS1123Subdomain)
	}
	if errs := validation.IsValidIP(at, host); len(errs) == 0 {
		return field.ErrorList{field.Invalid(at, host, "must be a DNS name, not an IP address")}
	}
	return check.Text(at, host, check.Subdomain)
}

// strange are parts of a path that no proxy should have to interpret.
var (
	strange    = []string{"//", "/./", "/../", "%2f", "%2F"}
	strangeEnd = []string{"/..", "/."}
)

func validatePath(path *networkingv1.HTTPIngressPath, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	switch kind := path.PathType; {
	case kind == nil:
		errs = append(errs, field.Required(at.Child("pathType"), "pathType must be specified"))
	case *kind == networkingv1.PathTypeExact || *kind == networkingv1.PathTypePrefix:
		if !strings.HasPrefix(path.Path, "/") {
			errs = append(errs, field.Invalid(at.Child("path"), path.Path, "must be an absolute path"))
		}
		for _, part := range strange {
			if strings.Contains(path.Path, part) {
				errs = append(errs, field.Invalid(at.Child("path"), path.Path, fmt.Sprintf("must not contain '%s'", part)))
			}
		}
		for _, part := range strangeEnd {
			if strings.HasSuffix(path.Path, part) {
				errs = append(errs, field.Invalid(at.Child("path"), path.Path, fmt.Sprintf("cannot end with '%s'", part)))
			}
		}
	case *kind == networkingv1.PathTypeImplementationSpecific:
		if path.Path != "" && !strings.HasPrefix(path.Path, "/") {
			errs = append(errs, field.Invalid(at.Child("path"), path.Path, "must be an absolute path"))
		}
	default:
		errs = append(errs, field.NotSupported(at.Child("pathType"), *kind,
			[]networkingv1.PathType{networkingv1.PathTypeExact, networkingv1.PathTypeImplementationSpecific, networkingv1.PathTypePrefix}))
	}
	return append(errs, validateBackend(&path.Backend, at.Child("backend"))...)
}

func validateBackend(backend *networkingv1.IngressBackend, at *field.Path) field.ErrorList {
	switch {
	case backend.Service != nil && backend.Resource != nil:
		return field.ErrorList{field.Invalid(at, "", "cannot set both resource and service backends")}
	case backend.Resource != nil:
		return validateReference(backend.Resource, at.Child("resource"))
	case backend.Service == nil:
		return field.ErrorList{field.Required(at, "a service or resource backend is required")}
	}
	at = at.Child("service")
	errs := check.RequiredText(at.Child("name"), backend.Service.Name, validation.IsDNS1035Label)
	at = at.Child("port")
	switch port := backend.Service.Port; {
	case port.Name != "" && port.Number != 0:
		errs = append(errs, field.Invalid(at, port, "cannot set both port name & port number"))
	case port.Name == "" && port.Number == 0:
		errs = append(errs, field.Required(at, "port name or number is required"))
	case port.Name != "":
		errs = append(errs, check.Text(at.Child("name"), port.Name, validation.IsValidPortName)...)
	default:
		errs = append(errs, check.PortNumber(at.Child("number"), port.Number)...)
	}
	return errs
}

func validateReference(ref *corev1.TypedLocalObjectReference, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if ref.APIGroup != nil {
		errs = append(errs, check.Text(at.Child("apiGroup"), *ref.APIGroup, check.Subdomain)...)
	}
	errs = append(errs, check.RequiredText(at.Child("kind"), ref.Kind, pathSegment)...)
	return append(errs, check.RequiredText(at.Child("name"), ref.Name, pathSegment)...)
}

func pathSegment(name string) []string { return pathvalidation.IsValidPathSegmentName(name) }

// IngressClass is the kind IngressClass.
func IngressClass() kind.Kind {
	return kind.Typed[*networkingv1.IngressClass]{
		GVK:      networkingv1.SchemeGroupVersion.WithKind("IngressClass"),
		Resource: "ingressclasses",
		Singular: "ingressclass",

		New:     func() runtime.Object { return &networkingv1.IngressClass{} },
		NewList: func() runtime.Object { return &networkingv1.IngressClassList{} },

		Default: func(c *networkingv1.IngressClass) {
			if p := c.Spec.Parameters; p != nil && p.Scope == nil {
				scope := networkingv1.IngressClassParametersReferenceScopeCluster
				p.Scope = &scope
			}
		},
		PrepareCreate: func(c *networkingv1.IngressClass) { c.Generation = 1 },
		PrepareUpdate: func(c, old *networkingv1.IngressClass) {
			c.Generation = old.Generation
			if !equality.Semantic.DeepEqual(c.Spec, old.Spec) {
				c.Generation++
			}
		},
		Validate: func(c *networkingv1.IngressClass) field.ErrorList {
			errs := apivalidation.ValidateObjectMeta(&c.ObjectMeta, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
			return append(errs, validateIngressClass(&c.Spec, field.NewPath("spec"))...)
		},
		ValidateUpdate: func(c, old *networkingv1.IngressClass) field.ErrorList {
			spec := field.NewPath("spec")
			errs := apivalidation.ValidateObjectMetaUpdate(&c.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			errs = append(errs, validateIngressClass(&c.Spec, spec)...)
			return append(errs, apivalidation.ValidateImmutableField(c.Spec.Controller, old.Spec.Controller, spec.Child("controller"))...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Controller", "Controller that is responsible for handling this class"),
			cells.Text("Parameters", "A reference to a resource with additional parameters"),
			cells.Age,
		},
		Row: func(c *networkingv1.IngressClass, now time.Time) []any {
			parameters := "<none>"
			if p := c.Spec.Parameters; p != nil {
				parameters = p.Kind
				if p.APIGroup != nil {
					parameters += "." + *p.APIGroup
				}
				parameters += "/" + p.Name
			}
			return []any{c.Name, c.Spec.Controller, parameters, cells.Since(c.CreationTimestamp, now)}
		},
		UnconditionalUpdate: true,
	}.Kind()
}

const maxController = 250

func validateIngressClass(spec *networkingv1.IngressClassSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if spec.Controller != "" {
		if len(spec.Controller) > maxController {
			errs = append(errs, field.TooLong(at.Child("controller"), spec.Controller, maxController))
		}
		errs = append(errs, validation.IsDomainPrefixedPath(at.Child("controller"), spec.Controller)...)
	}
	p := spec.Parameters
	if p == nil {
		return errs
	}
	at = at.Child("parameters")
	errs = append(errs, validateReference(&corev1.TypedLocalObjectReference{APIGroup: p.APIGroup, Kind: p.Kind, Name: p.Name}, at)...)
	scopes := []string{networkingv1.IngressClassParametersReferenceScopeCluster, networkingv1.IngressClassParametersReferenceScopeNamespace}
	switch {
	case p.Scope == nil:
		errs = append(errs, field.Required(at.Child("scope"), ""))
	case !slices.Contains(scopes, *p.Scope):
		errs = append(errs, field.NotSupported(at.Child("scope"), *p.Scope, scopes))
	case *p.Scope == scopes[1] && p.Namespace == nil:
		errs = append(errs, field.Required(at.Child("namespace"), "`parameters.scope` is set to 'Namespace'"))
	case *p.Scope == scopes[0] && p.Namespace != nil:
		errs = append(errs, field.Forbidden(at.Child("namespace"), "`parameters.scope` is set to 'Cluster'"))
	}
	return errs
}
