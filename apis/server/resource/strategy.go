package resource

import (
	"context"

	authenticationv1 "k8s.io/api/authentication/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/authentication/user"
	genericapirequest "k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/registry/rest"
	"k8s.io/apiserver/pkg/storage/names"
	"sigs.k8s.io/structured-merge-diff/v6/fieldpath"

	"github.com/clusterd/clusterd/apis"
	"github.com/clusterd/clusterd/apis/internal/check"
)

// strategy answers the generic store's questions from a kind's functions. It
// serves create, update and delete of the main resource.
type strategy struct {
	runtime.ObjectTyper
	names.NameGenerator
	kind apis.Kind
}

var (
	_ rest.RESTCreateStrategy              = strategy{}
	_ rest.RESTUpdateStrategy              = strategy{}
	_ rest.ResetFieldsStrategy             = strategy{}
	_ rest.GarbageCollectionDeleteStrategy = strategy{}
	_ rest.RESTDeleteStrategy              = strategy{}
	_ rest.RESTGracefulDeleteStrategy      = gracefulStrategy{}
)

func (s strategy) NamespaceScoped() bool                         { return s.kind.Namespaced }
func (s strategy) AllowCreateOnUpdate(context.Context) bool      { return s.kind.CreateOnUpdate }
func (s strategy) AllowUnconditionalUpdate(context.Context) bool { return s.kind.UnconditionalUpdate }
func (s strategy) Canonicalize(runtime.Object)                   {}

func (s strategy) PrepareForCreate(ctx context.Context, obj runtime.Object) {
	if s.kind.Untracked && ownLoop(ctx) || s.kind.NeverTracked != nil && s.kind.NeverTracked(obj) {
		untrack(obj)
	}
	if s.kind.PrepareCreate != nil {
		s.kind.PrepareCreate(obj)
	}
	if s.kind.Requested != nil {
		if by, ok := genericapirequest.UserFrom(ctx); ok {
			s.kind.Requested(obj, userInfo(by))
		}
	}
}

// userInfo is a user as the API writes it.
func userInfo(u user.Info) authenticationv1.UserInfo {
	info := authenticationv1.UserInfo{Username: u.GetName(), UID: u.GetUID(), Groups: u.GetGroups()}
	if extra := u.GetExtra(); len(extra) > 0 {
		info.Extra = make(map[string]authenticationv1.ExtraValue, len(extra))
		for key, values := range extra {
			info.Extra[key] = values
		}
	}
	return info
}

func (s strategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	if s.kind.PrepareUpdate != nil {
		s.kind.PrepareUpdate(obj, old)
	}
}

// view is the version that the request is made in, if the kind is stored in
// another one.
func (s strategy) view(ctx context.Context) apis.View {
	if len(s.kind.Views) == 0 {
		return apis.View{}
	}
	info, ok := genericapirequest.RequestInfoFrom(ctx)
	if !ok {
		return apis.View{}
	}
	asked := schema.GroupVersion{Group: info.APIGroup, Version: info.APIVersion}
	for _, view := range s.kind.Views {
		if s.kind.ViewGVK(view).GroupVersion() == asked {
			return view
		}
	}
	return apis.View{}
}

func (s strategy) Validate(ctx context.Context, obj runtime.Object) field.ErrorList {
	errs := validateFinalizers(obj, nil)
	if view := s.view(ctx); view.Validate != nil {
		return append(errs, view.Validate(obj)...)
	}
	if s.kind.Validate != nil {
		errs = append(errs, s.kind.Validate(obj)...)
	}
	return errs
}

// validateFinalizers checks those that an object gets, of whatever kind it is. old may
// be nil.
func validateFinalizers(obj, old runtime.Object) field.ErrorList {
	now, err := meta.Accessor(obj)
	if err != nil {
		return nil
	}
	var had []string
	if old != nil {
		if was, err := meta.Accessor(old); err == nil {
			had = was.GetFinalizers()
		}
	}
	return check.NewFinalizers(now.GetFinalizers(), had)
}

func (s strategy) ValidateUpdate(ctx context.Context, obj, old runtime.Object) field.ErrorList {
	errs := validateFinalizers(obj, old)
	if view := s.view(ctx); view.ValidateUpdate != nil {
		return append(errs, view.ValidateUpdate(obj, old)...)
	}
	if s.kind.ValidateUpdate != nil {
		errs = append(errs, s.kind.ValidateUpdate(obj, old)...)
	}
	return errs
}

func (s strategy) WarningsOnCreate(_ context.Context, obj runtime.Object) []string {
	return s.warnings(obj)
}

// WarningsOnUpdate implements rest.RESTUpdateStrategy. What has a generation is warned
// of when that changes: not with each label, and not with what controllers write.
func (s strategy) WarningsOnUpdate(_ context.Context, obj, old runtime.Object) []string {
	now, err1 := meta.Accessor(obj)
	was, err2 := meta.Accessor(old)
	if err1 == nil && err2 == nil && now.GetGeneration() > 0 && now.GetGeneration() == was.GetGeneration() {
		return nil
	}
	return s.warnings(obj)
}

func (s strategy) warnings(obj runtime.Object) []string {
	if s.kind.Warnings == nil {
		return nil
	}
	return s.kind.Warnings(obj)
}

// DefaultGarbageCollectionPolicy is what a delete without a propagation policy
// means: dependents are left to the garbage collector, but for the two kinds that
// are older than it, Jobs and ReplicationControllers.
func (s strategy) DefaultGarbageCollectionPolicy(context.Context) rest.GarbageCollectionPolicy {
	if s.kind.OrphansByDefault {
		return rest.OrphanDependents
	}
	return rest.DeleteDependents
}

// GetResetFields names what a writer of the main resource cannot own, so that
// server-side apply does not record ownership of it.
func (s strategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	if s.kind.Status == nil {
		return nil
	}
	return s.reset("status")
}

func (s strategy) reset(field string) map[fieldpath.APIVersion]*fieldpath.Set {
	version := s.kind.GVK.GroupVersion()
	sets := map[fieldpath.APIVersion]*fieldpath.Set{
		fieldpath.APIVersion(version.String()): fieldpath.NewSet(fieldpath.MakePathOrDie(field)),
	}
	for _, view := range s.kind.Views {
		sets[fieldpath.APIVersion(s.kind.ViewGVK(view).GroupVersion().String())] = fieldpath.NewSet(fieldpath.MakePathOrDie(field))
	}
	return sets
}

// gracefulStrategy is the strategy of kinds that have a grace period. A type
// of its own, because the library takes the mere presence of the method as
// "deletions of this kind may be graceful".
type gracefulStrategy struct{ strategy }

func (s gracefulStrategy) CheckGracefulDelete(_ context.Context, obj runtime.Object, options *metav1.DeleteOptions) bool {
	return s.kind.Grace(obj, options)
}

// statusStrategy serves updates of the status subresource.
type statusStrategy struct{ strategy }

func (s statusStrategy) AllowCreateOnUpdate(context.Context) bool      { return false }
func (s statusStrategy) AllowUnconditionalUpdate(context.Context) bool { return true }

func (s statusStrategy) PrepareForUpdate(_ context.Context, obj, old runtime.Object) {
	if s.kind.Status.PrepareUpdate != nil {
		s.kind.Status.PrepareUpdate(obj, old)
	}
}

func (s statusStrategy) ValidateUpdate(_ context.Context, obj, old runtime.Object) field.ErrorList {
	errs := validateFinalizers(obj, old)
	if s.kind.Status.ValidateUpdate != nil {
		errs = append(errs, s.kind.Status.ValidateUpdate(obj, old)...)
	}
	return errs
}

// WarningsOnUpdate is silent: the writer of a status cannot mend the spec.
func (s statusStrategy) WarningsOnUpdate(context.Context, runtime.Object, runtime.Object) []string {
	return nil
}

func (s statusStrategy) GetResetFields() map[fieldpath.APIVersion]*fieldpath.Set {
	return s.reset("spec")
}
