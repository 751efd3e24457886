package apps

import (
	"bytes"
	"encoding/json"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"github.com/clusterd/clusterd/apis/internal/cells"
	"github.com/clusterd/clusterd/apis/internal/check"
	"github.com/clusterd/clusterd/apis/kind"
)

// ControllerRevision is the kind ControllerRevision: one state that a
// StatefulSet or DaemonSet was in, to which it can be rolled back.
func ControllerRevision() kind.Kind {
	return kind.Typed[*appsv1.ControllerRevision]{
		GVK:        appsv1.SchemeGroupVersion.WithKind("ControllerRevision"),
		Resource:   "controllerrevisions",
		Singular:   "controllerrevision",
		Namespaced: true,

		New:     func() runtime.Object { return &appsv1.ControllerRevision{} },
		NewList: func() runtime.Object { return &appsv1.ControllerRevisionList{} },

		Validate: validateControllerRevision,
		ValidateUpdate: func(r, old *appsv1.ControllerRevision) field.ErrorList {
			errs := apivalidation.ValidateObjectMetaUpdate(&r.ObjectMeta, &old.ObjectMeta, field.NewPath("metadata"))
			errs = append(errs, check.NonNegative(field.NewPath("revision"), r.Revision)...)
			if !bytes.Equal(r.Data.Raw, old.Data.Raw) {
				errs = append(errs, field.Invalid(field.NewPath("data"), string(r.Data.Raw), "field is immutable"))
			}
			return errs
		},

		Columns: []metav1.TableColumnDefinition{
			cells.Name,
			cells.Text("Controller", "Controller of the object"),
			cells.Number("Revision", appsv1.ControllerRevision{}.SwaggerDoc()["revision"]),
			cells.Age,
		},
		Row: func(r *appsv1.ControllerRevision, now time.Time) []any {
			return []any{r.Name, controllerText(r), r.Revision, cells.Since(r.CreationTimestamp, now)}
		},

		UnconditionalUpdate: true,
	}.Kind()
}

func validateControllerRevision(r *appsv1.ControllerRevision) field.ErrorList {
	errs := apivalidation.ValidateObjectMeta(&r.ObjectMeta, true, apivalidation.NameIsDNSSubdomain, field.NewPath("metadata"))
	errs = append(errs, check.NonNegative(field.NewPath("revision"), r.Revision)...)
	at := field.NewPath("data")
	var state map[string]any
	switch {
	case r.Data.Raw == nil:
		errs = append(errs, field.Required(at, "data is mandatory"))
	case json.Unmarshal(r.Data.Raw, &state) != nil || state == nil:
		errs = append(errs, field.Invalid(at, "", "must be a JSON object"))
	}
	return errs
}

// controllerText names an object's controller as kubectl does: "daemonset.apps/web".
func controllerText(obj metav1.Object) string {
	ref := metav1.GetControllerOf(obj)
	if ref == nil {
		return "<none>"
	}
	gv, err := schema.ParseGroupVersion(ref.APIVersion)
	if err != nil {
		return "<unknown>"
	}
	return strings.ToLower(gv.WithKind(ref.Kind).GroupKind().String()) + "/" + ref.Name
}
