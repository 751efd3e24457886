package main

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

// fieldChange is one field that differs between two states of an object.
type fieldChange struct {
	path     string // such as spec.template.spec.containers[web].image
	old, new any    // nil: the field was or is absent
}

// bookkeeping are fields that the server keeps for itself, and one that only
// repeats the rest of the object.
var bookkeeping = map[string]bool{
	"metadata.resourceVersion": true, "metadata.managedFields": true, "metadata.generation": true,
	"metadata.uid": true, "metadata.creationTimestamp": true, "metadata.selfLink": true,
	"metadata.annotations[kubectl.kubernetes.io/last-applied-configuration]": true,
}

// keyed are maps whose keys their users choose.
var keyed = map[string]bool{"metadata.labels": true, "metadata.annotations": true, "data": true, "binaryData": true}

func orEmpty(v any) any {
	if v == nil {
		return map[string]any{}
	}
	return v
}

// fieldChanges lists what differs between two states, the status last.
func fieldChanges(old, new *unstructured.Unstructured) []fieldChange {
	var all []fieldChange
	compare("", old.Object, new.Object, &all)
	slices.SortStableFunc(all, func(a, b fieldChange) int {
		switch {
		case a.inStatus() == b.inStatus():
			return 0
		case a.inStatus():
			return 1
		}
		return -1
	})
	return all
}

func (c fieldChange) inStatus() bool {
	return c.path == "status" || strings.HasPrefix(c.path, "status.")
}

func compare(path string, old, new any, all *[]fieldChange) {
	if bookkeeping[path] || reflect.DeepEqual(old, new) {
		return
	}
	if keyed[path] { // each key counts, the first one too
		old, new = orEmpty(old), orEmpty(new)
	}
	switch o := old.(type) {
	case map[string]any:
		if n, ok := new.(map[string]any); ok {
			keys := maps.Clone(o)
			maps.Copy(keys, n)
			for _, key := range slices.Sorted(maps.Keys(keys)) {
				compare(child(path, key), o[key], n[key], all)
			}
			return
		}
	case []any:
		if n, ok := new.([]any); ok && compareLists(path, o, n, all) {
			return
		}
	}
	*all = append(*all, fieldChange{path, old, new})
}

// compareLists compares lists whose elements have names or types, as most in
// Kubernetes do, element by element; false: they have none.
func compareLists(path string, old, new []any, all *[]fieldChange) bool {
	o, ok := named(old)
	if !ok {
		return false
	}
	n, ok := named(new)
	if !ok {
		return false
	}
	keys := maps.Clone(o)
	maps.Copy(keys, n)
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		compare(path+"["+key+"]", o[key], n[key], all)
	}
	return true
}

func named(list []any) (map[string]any, bool) {
	byName := map[string]any{}
	for _, e := range list {
		m, ok := e.(map[string]any)
		if !ok {
			return nil, false
		}
		name, ok := m["name"].(string)
		if !ok {
			name, ok = m["type"].(string)
		}
		if _, twice := byName[name]; !ok || twice {
			return nil, false
		}
		byName[name] = e
	}
	return byName, true
}

// child names a field: keys with dots, such as labels, in brackets.
func child(path, key string) string {
	switch {
	case path == "":
		return key
	case strings.ContainsAny(key, "./"):
		return path + "[" + key + "]"
	}
	return path + "." + key
}

// text is the change in a line. Secret values are not shown.
func (c fieldChange) text(secret bool) string {
	if secret && (strings.HasPrefix(c.path, "data") || strings.HasPrefix(c.path, "stringData")) {
		switch {
		case c.old == nil:
			return c.path + " added"
		case c.new == nil:
			return c.path + " removed"
		}
		return c.path + " changed"
	}
	switch {
	case c.old == nil:
		return c.path + ": " + shortValue(c.new) + " added"
	case c.new == nil:
		return c.path + ": " + shortValue(c.old) + " removed"
	}
	return c.path + ": " + shortValue(c.old) + " → " + shortValue(c.new)
}

// maxValue is how many characters of a value a line shows.
const maxValue = 40

func shortValue(v any) string {
	var text string
	switch v := v.(type) {
	case map[string]any:
		text = "{" + strings.Join(slices.Sorted(maps.Keys(v)), " ") + "}"
	case string:
		text = v
		if text == "" || strings.ContainsAny(text, " \n\t") {
			text = fmt.Sprintf("%q", text)
		}
	default:
		text = fmt.Sprint(v)
	}
	if runes := []rune(text); len(runes) > maxValue {
		text = string(runes[:maxValue-1]) + "…"
	}
	return text
}
