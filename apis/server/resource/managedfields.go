package resource

import (
	"context"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// ownLoop reports whether the request comes from one of the controllers of this
// cluster.
func ownLoop(ctx context.Context) bool {
	who, ok := request.UserFrom(ctx)
	return ok && who.GetName() == user.KubeControllerManager
}

// untrack lets an object go without managedFields. The library keeps them only
// for objects that have them, or from the first server-side apply on, which then
// finds the earlier writers summed up as "before-first-apply". No client applies the
// pods that a controller makes, and keeping account of who wrote what is a third
// of what each update of their status costs.
func untrack(obj runtime.Object) {
	if o, err := meta.Accessor(obj); err == nil {
		o.SetManagedFields(nil)
	}
}
