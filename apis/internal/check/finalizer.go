package check

import (
	"strings"

	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// Finalizer wants the name of one that Kubernetes knows, or that says by a domain whose
// it is: an object waits for its finalizers, and for one that nobody knows for ever.
func Finalizer(path *field.Path, name string) field.ErrorList {
	errs := apivalidation.ValidateFinalizerName(name, path)
	if strings.Contains(name, "/") {
		return errs
	}
	switch name {
	case "kubernetes", metav1.FinalizerOrphanDependents, metav1.FinalizerDeleteDependents:
		return errs
	}
	return append(errs, field.Invalid(path, name, "name is neither a standard finalizer name nor is it fully qualified"))
}

// NewFinalizers checks those of an object that it did not have before: an object that
// has a wrong one has to remain writable. What names of any kind have to be is not
// looked at here.
func NewFinalizers(finalizers, had []string) field.ErrorList {
	var errs field.ErrorList
	old := sets.New(had...)
	for i, name := range finalizers {
		if old.Has(name) || len(apivalidation.ValidateFinalizerName(name, nil)) > 0 {
			continue
		}
		errs = append(errs, Finalizer(field.NewPath("metadata", "finalizers").Index(i), name)...)
	}
	return errs
}
