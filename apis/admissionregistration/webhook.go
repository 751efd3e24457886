package admissionregistration

import (
	"net/url"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// hook is what both kinds of webhooks have, as references to their fields.
type hook struct {
	name         *string
	client       *v1.WebhookClientConfig
	rules        []v1.RuleWithOperations
	failure      **v1.FailurePolicyType
	match        **v1.MatchPolicyType
	namespaces   **metav1.LabelSelector
	objects      **metav1.LabelSelector
	effects      **v1.SideEffectClass
	timeout      **int32
	versions     []string
	conditions   []v1.MatchCondition
	reinvocation **v1.ReinvocationPolicyType // nil: this webhook changes nothing
}

func validatingHooks(c *v1.ValidatingWebhookConfiguration) []hook {
	hooks := make([]hook, len(c.Webhooks))
	for i := range c.Webhooks {
		w := &c.Webhooks[i]
		hooks[i] = hook{&w.Name, &w.ClientConfig, w.Rules, &w.FailurePolicy, &w.MatchPolicy, &w.NamespaceSelector, &w.ObjectSelector,
			&w.SideEffects, &w.TimeoutSeconds, w.AdmissionReviewVersions, w.MatchConditions, nil}
	}
	return hooks
}

func mutatingHooks(c *v1.MutatingWebhookConfiguration) []hook {
	hooks := make([]hook, len(c.Webhooks))
	for i := range c.Webhooks {
		w := &c.Webhooks[i]
		hooks[i] = hook{&w.Name, &w.ClientConfig, w.Rules, &w.FailurePolicy, &w.MatchPolicy, &w.NamespaceSelector, &w.ObjectSelector,
			&w.SideEffects, &w.TimeoutSeconds, w.AdmissionReviewVersions, w.MatchConditions, &w.ReinvocationPolicy}
	}
	return hooks
}

// ValidatingWebhookConfiguration is the kind ValidatingWebhookConfiguration.
func ValidatingWebhookConfiguration() kind.Kind {
	return kind.Typed[*v1.ValidatingWebhookConfiguration]{
		GVK:        v1.SchemeGroupVersion.WithKind("ValidatingWebhookConfiguration"),
		Resource:   "validatingwebhookconfigurations",
		Singular:   "validatingwebhookconfiguration",
		Categories: []string{"api-extensions"},

		New:     func() runtime.Object { return &v1.ValidatingWebhookConfiguration{} },
		NewList: func() runtime.Object { return &v1.ValidatingWebhookConfigurationList{} },

		Default:       func(c *v1.ValidatingWebhookConfiguration) { defaultHooks(validatingHooks(c)) },
		PrepareCreate: func(c *v1.ValidatingWebhookConfiguration) { c.Generation = 1 },
		PrepareUpdate: func(c, old *v1.ValidatingWebhookConfiguration) {
			c.Generation = generation(old, !equality.Semantic.DeepEqual(c.Webhooks, old.Webhooks))
		},
		Validate: func(c *v1.ValidatingWebhookConfiguration) field.ErrorList {
			return append(validateMeta(c), validateHooks(validatingHooks(c))...)
		},
		ValidateUpdate: func(c, old *v1.ValidatingWebhookConfiguration) field.ErrorList {
			return append(validateMetaUpdate(c, old), validateHooks(validatingHooks(c))...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name, cells.Number("Webhooks", "Webhooks indicates the number of webhooks registered in this configuration"), cells.Age,
		},
		Row: func(c *v1.ValidatingWebhookConfiguration, now time.Time) []any {
			return []any{c.Name, int64(len(c.Webhooks)), cells.Since(c.CreationTimestamp, now)}
		},
	}.Kind()
}

// MutatingWebhookConfiguration is the kind MutatingWebhookConfiguration.
func MutatingWebhookConfiguration() kind.Kind {
	return kind.Typed[*v1.MutatingWebhookConfiguration]{
		GVK:        v1.SchemeGroupVersion.WithKind("MutatingWebhookConfiguration"),
		Resource:   "mutatingwebhookconfigurations",
		Singular:   "mutatingwebhookconfiguration",
		Categories: []string{"api-extensions"},

		New:     func() runtime.Object { return &v1.MutatingWebhookConfiguration{} },
		NewList: func() runtime.Object { return &v1.MutatingWebhookConfigurationList{} },

		Default:       func(c *v1.MutatingWebhookConfiguration) { defaultHooks(mutatingHooks(c)) },
		PrepareCreate: func(c *v1.MutatingWebhookConfiguration) { c.Generation = 1 },
		PrepareUpdate: func(c, old *v1.MutatingWebhookConfiguration) {
			c.Generation = generation(old, !equality.Semantic.DeepEqual(c.Webhooks, old.Webhooks))
		},
		Validate: func(c *v1.MutatingWebhookConfiguration) field.ErrorList {
			return append(validateMeta(c), validateHooks(mutatingHooks(c))...)
		},
		ValidateUpdate: func(c, old *v1.MutatingWebhookConfiguration) field.ErrorList {
			return append(validateMetaUpdate(c, old), validateHooks(mutatingHooks(c))...)
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name, cells.Number("Webhooks", "Webhooks indicates the number of webhooks registered in this configuration"), cells.Age,
		},
		Row: func(c *v1.MutatingWebhookConfiguration, now time.Time) []any {
			return []any{c.Name, int64(len(c.Webhooks)), cells.Since(c.CreationTimestamp, now)}
		},
	}.Kind()
}

func validateMeta(obj metav1.Object) field.ErrorList {
	return apivalidation.ValidateObjectMetaAccessor(obj, false, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
}

func validateMetaUpdate(obj, old metav1.Object) field.ErrorList {
	return apivalidation.ValidateObjectMetaAccessorUpdate(obj, old, field.NewPath("metadata"))
}

// generation is one more than that of old if it changed.
func generation(old metav1.Object, changed bool) int64 {
	if changed {
		return old.GetGeneration() + 1
	}
	return old.GetGeneration()
}

func defaultHooks(hooks []hook) {
	for _, h := range hooks {
		setDefault(h.failure, v1.Fail)
		setDefault(h.match, v1.Equivalent)
		setDefault(h.namespaces, metav1.LabelSelector{})
		setDefault(h.objects, metav1.LabelSelector{})
		setDefault(h.timeout, 10)
		for i := range h.rules {
			defaultRule(&h.rules[i].Rule)
		}
		if s := h.client.Service; s != nil {
			setDefault(&s.Port, 443)
		}
		if h.reinvocation != nil {
			setDefault(h.reinvocation, v1.NeverReinvocationPolicy)
		}
	}
}

func validateHooks(hooks []hook) field.ErrorList {
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, h := range hooks {
		at := field.NewPath("webhooks").Index(i)
		errs = append(errs, validateHook(h, at)...)
		if seen[*h.name] && *h.name != "" {
			errs = append(errs, field.Duplicate(at.Child("name"), *h.name))
		}
		seen[*h.name] = true
	}
	return errs
}

func validateHook(h hook, at *field.Path) field.ErrorList {
	errs := validation.IsFullyQualifiedName(at.Child("name"), *h.name)
	for i := range h.rules {
		errs = append(errs, validateRule(&h.rules[i], at.Child("rules").Index(i))...)
	}
	errs = append(errs, check.OneOfOrNil(at.Child("failurePolicy"), *h.failure, v1.Fail, v1.Ignore)...)
	errs = append(errs, check.OneOfOrNil(at.Child("matchPolicy"), *h.match, v1.Exact, v1.Equivalent)...)
	effects := at.Child("sideEffects")
	if *h.effects == nil {
		errs = append(errs, field.Required(effects, "must specify one of None, NoneOnDryRun"))
	}
	errs = append(errs, check.OneOfOrNil(effects, *h.effects, v1.SideEffectClassNone, v1.SideEffectClassNoneOnDryRun)...)
	if seconds := *h.timeout; seconds != nil && (*seconds < 1 || *seconds > 30) {
		errs = append(errs, field.Invalid(at.Child("timeoutSeconds"), *seconds, "the timeout value must be between 1 and 30 seconds"))
	}
	errs = append(errs, check.LabelSelector(at.Child("namespaceSelector"), *h.namespaces)...)
	errs = append(errs, check.LabelSelector(at.Child("objectSelector"), *h.objects)...)
	errs = append(errs, validateVersions(h.versions, at.Child("admissionReviewVersions"))...)
	errs = append(errs, validateConditions(h.conditions, at.Child("matchConditions"))...)
	if h.reinvocation != nil {
		errs = append(errs, check.OneOfOrNil(at.Child("reinvocationPolicy"), *h.reinvocation, v1.NeverReinvocationPolicy, v1.IfNeededReinvocationPolicy)...)
	}
	return append(errs, validateClient(h.client, at.Child("clientConfig"))...)
}

// reviews are the versions of AdmissionReview that the server speaks.
var reviews = []string{"v1", "v1beta1"}

func validateVersions(versions []string, at *field.Path) field.ErrorList {
	if len(versions) == 0 {
		return field.ErrorList{field.Required(at, "must specify one of "+strings.Join(reviews, ", "))}
	}
	var errs field.ErrorList
	seen, known := map[string]bool{}, false
	for i, version := range versions {
		at := at.Index(i)
		if seen[version] {
			errs = append(errs, field.Invalid(at, version, "duplicate version"))
		}
		seen[version] = true
		errs = append(errs, check.Text(at, version, validation.IsDNS1035Label)...)
		known = known || slices.Contains(reviews, version)
	}
	if !known {
		errs = append(errs, field.Invalid(at, versions, "must include at least one of "+strings.Join(reviews, ", ")))
	}
	return errs
}

func validateClient(c *v1.WebhookClientConfig, at *field.Path) field.ErrorList {
	switch {
	case (c.URL == nil) == (c.Service == nil):
		return field.ErrorList{field.Required(at, "exactly one of url or service is required")}
	case c.URL != nil:
		return validateURL(*c.URL, at.Child("url"))
	}
	at = at.Child("service")
	errs := check.RequiredText(at.Child("name"), c.Service.Name, nil)
	errs = append(errs, check.RequiredText(at.Child("namespace"), c.Service.Namespace, nil)...)
	if port := c.Service.Port; port != nil {
		errs = append(errs, check.PortNumber(at.Child("port"), *port)...)
	}
	if path := c.Service.Path; path != nil {
		errs = append(errs, validatePath(*path, at.Child("path"))...)
	}
	return errs
}

func validateURL(text string, at *field.Path) field.ErrorList {
	u, err := url.Parse(text)
	if err != nil {
		return field.ErrorList{field.Required(at, "url must be a valid URL: "+err.Error()+"; desired format: https://host[/path]")}
	}
	var errs field.ErrorList
	invalid := func(wrong bool, value, message string) {
		if wrong {
			errs = append(errs, field.Invalid(at, value, message+"; desired format: https://host[/path]"))
		}
	}
	invalid(u.Scheme != "https", u.Scheme, "'https' is the only allowed URL scheme")
	invalid(u.Host == "", u.Host, "host must be specified")
	if u.User != nil {
		// The password is not repeated.
		errs = append(errs, field.Invalid(at, "", "user information is not permitted in the URL"))
	}
	invalid(u.Fragment != "", u.Fragment, "fragments are not permitted in the URL")
	invalid(u.RawQuery != "", u.RawQuery, "query parameters are not permitted in the URL")
	return errs
}

func validatePath(path string, at *field.Path) field.ErrorList {
	switch {
	case path == "", path == "/":
		return nil
	case !strings.HasPrefix(path, "/"):
		return field.ErrorList{field.Invalid(at, path, "must start with a '/'")}
	}
	var errs field.ErrorList
	for _, step := range strings.Split(strings.TrimSuffix(path[1:], "/"), "/") {
		if step == "" {
			return append(errs, field.Invalid(at, path, "a segment may not be empty"))
		}
		errs = append(errs, check.Text(at, step, validation.IsDNS1123Subdomain)...)
	}
	return errs
}
