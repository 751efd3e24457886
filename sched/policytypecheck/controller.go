// Package policytypecheck checks the expressions of ValidatingAdmissionPolicies against
// the schemas of the kinds that they match, and writes what does not fit into the
// policies' statuses: an expression with a field that no object has is stored, as kinds
// may be defined later, and would fail at the first request without a word before.
//
// The check is k8s.io/apiserver's own (KEP-3488, "Type Checking"): up to ten kinds of a
// policy's rules that name one group, version and resource each; kinds that are not
// served are left out.
package policytypecheck

import (
	"context"
	"fmt"
	"strings"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/admission/plugin/policy/validating"
	"k8s.io/apiserver/pkg/cel/openapi/resolver"
	"k8s.io/client-go/discovery"
	"k8s.io/client-go/kubernetes"
	admissionlisters "k8s.io/client-go/listers/admissionregistration/v1"
	"k8s.io/client-go/restmapper"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/sched/loop"
)

// checker finds what of a policy's expressions does not fit the kinds of its rules.
type checker func(*admissionv1.ValidatingAdmissionPolicy) ([]admissionv1.ExpressionWarning, error)

type controller struct {
	*loop.Controller
	client   kubernetes.Interface
	policies admissionlisters.ValidatingAdmissionPolicyLister
	check    checker
}

// New returns the loop. It asks the API server itself which kinds there are and what
// their schemas say, custom and aggregated ones included.
func New(env loop.Env) loop.Loop {
	return newController(env, func(p *admissionv1.ValidatingAdmissionPolicy) ([]admissionv1.ExpressionWarning, error) {
		return typeCheck(env.Client.Discovery(), p)
	}).Loop()
}

func newController(env loop.Env, check checker) *controller {
	policies := env.Informers.Admissionregistration().V1().ValidatingAdmissionPolicies()
	c := &controller{client: env.Client, policies: policies.Lister(), check: check}
	c.Controller = loop.New("policytypecheck", env, 1, c.reconcile)
	loop.Watch(c.Controller, policies.Informer(), func(_, p *admissionv1.ValidatingAdmissionPolicy) {
		if p != nil && !checked(p) {
			c.Enqueue(loop.KeyOf(p))
		}
	})
	return c
}

// checked reports whether the status is of the spec that there is.
func checked(p *admissionv1.ValidatingAdmissionPolicy) bool {
	return p.Status.TypeChecking != nil && p.Status.ObservedGeneration == p.Generation
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	policy, err := c.policies.Get(key.Name)
	if apierrors.IsNotFound(err) || err == nil && checked(policy) {
		return nil
	}
	if err != nil {
		return err
	}
	warnings, err := c.check(policy)
	if err != nil {
		return fmt.Errorf("check the types of ValidatingAdmissionPolicy %s: %w", key.Name, err)
	}
	warnings = bounded(warnings)
	policy = policy.DeepCopy()
	policy.Status.ObservedGeneration = policy.Generation
	policy.Status.TypeChecking = &admissionv1.TypeChecking{ExpressionWarnings: warnings}
	_, err = c.client.AdmissionregistrationV1().ValidatingAdmissionPolicies().UpdateStatus(ctx, policy, metav1.UpdateOptions{})
	switch {
	case err == nil || apierrors.IsNotFound(err):
		return nil
	case apierrors.IsInvalid(err) || apierrors.IsRequestEntityTooLargeError(err): // no other try would be taken
		klog.FromContext(ctx).Info("the types of a policy's expressions are not in its status", "policy", key.Name, "err", err)
		return nil
	}
	return fmt.Errorf("status of ValidatingAdmissionPolicy %s: %w", key.Name, err)
}

// Bounds of what a status says: a policy's author corrects the first, and sees the others then.
const (
	mostWarnings    = 32
	mostWarningText = 2048
)

// bounded cuts warnings, which repeat each expression for each kind, to a size that can be stored.
func bounded(warnings []admissionv1.ExpressionWarning) []admissionv1.ExpressionWarning {
	warnings = warnings[:min(len(warnings), mostWarnings)]
	for i, w := range warnings {
		if len(w.Warning) > mostWarningText {
			warnings[i].Warning = strings.ToValidUTF8(w.Warning[:mostWarningText], "") + " …"
		}
	}
	return warnings
}

// typeCheck checks a policy by what the API server serves now.
func typeCheck(served discovery.DiscoveryInterface, p *admissionv1.ValidatingAdmissionPolicy) ([]admissionv1.ExpressionWarning, error) {
	// Groups of an aggregated API that does not answer are left out, with the error.
	groups, err := restmapper.GetAPIGroupResources(served)
	if err != nil && len(groups) == 0 {
		return nil, err
	}
	c := validating.TypeChecker{
		SchemaResolver: &resolver.ClientDiscoveryResolver{Discovery: served},
		RestMapper:     restmapper.NewDiscoveryRESTMapper(groups),
	}
	return c.Check(p), nil
}
