package core

import (
	"reflect"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// sourceNames are the JSON names of VolumeSource's fields, all of them
// pointers, in the order of the type.
var sourceNames = func() []string {
	t := reflect.TypeFor[corev1.VolumeSource]()
	names := make([]string, t.NumField())
	for i := range names {
		names[i], _, _ = strings.Cut(t.Field(i).Tag.Get("json"), ",")
	}
	return names
}()

// volumeSources returns the JSON names of the sources that are set.
func volumeSources(source *corev1.VolumeSource) []string {
	v := reflect.ValueOf(source).Elem()
	var set []string
	for i, name := range sourceNames {
		if !v.Field(i).IsNil() {
			set = append(set, name)
		}
	}
	return set
}
