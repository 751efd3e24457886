// Package ownerrefs implements OwnerReferencesPermissionEnforcement: changing the
// ownerReferences of an object requires the permission to delete it, and setting
// blockOwnerDeletion requires update on the finalizers of the owner. It is off by default.
package ownerrefs

import (
	"context"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/admission"
	"k8s.io/apiserver/pkg/authorization/authorizer"
)

type plugin struct {
	*admission.Handler
	z      authorizer.Authorizer
	mapper meta.RESTMapper
}

var _ admission.ValidationInterface = &plugin{}

// New makes the plugin; mapper finds the resources of owners.
func New(z authorizer.Authorizer, mapper meta.RESTMapper) admission.Interface {
	return &plugin{admission.NewHandler(admission.Create, admission.Update), z, mapper}
}

// Validate judges the references that the request adds or changes.
func (p *plugin) Validate(ctx context.Context, a admission.Attributes, _ admission.ObjectInterfaces) error {
	if a.GetResource().GroupResource() == corev1.Resource("pods") && a.GetSubresource() == "status" {
		return nil // nodes write it, and it keeps the references
	}
	now, was := referencesOf(a.GetObject()), referencesOf(a.GetOldObject())
	if equality.Semantic.DeepEqual(now, was) {
		return nil
	}
	// A user who may delete an object may as well let it be deleted. What is new is
	// nobody else's: who makes it may say when it goes.
	if a.GetOperation() != admission.Create {
		self := authorizer.AttributesRecord{User: a.GetUserInfo(), Verb: "delete", Namespace: a.GetNamespace(), Name: a.GetName(), ResourceRequest: true,
			APIGroup: a.GetResource().Group, APIVersion: a.GetResource().Version, Resource: a.GetResource().Resource, Subresource: a.GetSubresource()}
		if reason, ok := p.may(ctx, self); !ok {
			return admission.NewForbidden(a, fmt.Errorf("cannot set an ownerRef on a resource you can't delete: %s", reason))
		}
	}
	asked, all := false, false
	for _, ref := range now {
		if ref.BlockOwnerDeletion == nil || !*ref.BlockOwnerDeletion || slices.ContainsFunc(was, func(old metav1.OwnerReference) bool {
			return old.UID == ref.UID && old.BlockOwnerDeletion != nil && *old.BlockOwnerDeletion
		}) {
			continue
		}
		if !asked { // spares finding the kinds of owners, which asks all APIs that are served
			asked, all = true, p.mayBlockAny(ctx, a)
		}
		if all {
			return nil
		}
		if err := p.mayBlock(ctx, a, ref); err != nil {
			return admission.NewForbidden(a, fmt.Errorf("cannot set blockOwnerDeletion if an ownerReference refers to a resource you can't set finalizers on: %w", err))
		}
	}
	return nil
}

func (p *plugin) mayBlock(ctx context.Context, a admission.Attributes, ref metav1.OwnerReference) error {
	version, err := schema.ParseGroupVersion(ref.APIVersion)
	if err != nil {
		return err
	}
	mappings, err := p.mapper.RESTMappings(version.WithKind(ref.Kind).GroupKind(), version.Version)
	if err != nil {
		return fmt.Errorf("find the owner's kind: %w", err)
	}
	// A kind may be that of several resources: the right has to be for each.
	for _, mapping := range mappings {
		owner := authorizer.AttributesRecord{User: a.GetUserInfo(), Verb: "update", Name: ref.Name, ResourceRequest: true,
			APIGroup: mapping.Resource.Group, APIVersion: mapping.Resource.Version, Resource: mapping.Resource.Resource, Subresource: "finalizers"}
		if mapping.Scope.Name() == meta.RESTScopeNameNamespace {
			owner.Namespace = a.GetNamespace()
		}
		if reason, ok := p.may(ctx, owner); !ok {
			return fmt.Errorf("%s %q: %s", mapping.Resource.GroupResource(), ref.Name, reason)
		}
	}
	return nil
}

// mayBlockAny reports whether the user may write the finalizers of everything
// that can be an owner: of the request's namespace, or of all.
func (p *plugin) mayBlockAny(ctx context.Context, a admission.Attributes) bool {
	_, ok := p.may(ctx, authorizer.AttributesRecord{User: a.GetUserInfo(), Verb: "update", Namespace: a.GetNamespace(), Name: "*", ResourceRequest: true,
		APIGroup: "*", APIVersion: "*", Resource: "*", Subresource: "finalizers"})
	return ok
}

func (p *plugin) may(ctx context.Context, a authorizer.Attributes) (string, bool) {
	decision, reason, err := p.z.Authorize(ctx, a)
	if err != nil && decision != authorizer.DecisionAllow {
		reason = fmt.Sprintf("%s (%v)", reason, err)
	}
	return reason, decision == authorizer.DecisionAllow
}

func referencesOf(obj runtime.Object) []metav1.OwnerReference {
	if obj == nil {
		return nil
	}
	object, err := meta.Accessor(obj)
	if err != nil {
		return nil
	}
	return object.GetOwnerReferences()
}
