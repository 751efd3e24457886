// Package quantity refuses resource quantities that no machine can compute with.
//
// k8s.io/apimachinery's Quantity keeps an exponent of 32 bits and computes the power
// of ten when it rounds or compares: "1e2000000000" takes the memory of the process,
// in a decoder, a validation, or each time that it is compared once it is stored.
package quantity

import (
	"bytes"
	"encoding/json"
	"fmt"
	"mime"
	"reflect"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime/serializer/cbor/direct"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/yaml"
)

const (
	// maxExponent is the largest power of ten, up or down: Kubernetes' quantities lie
	// between 1e-9 and 2^63.
	maxExponent = 99
	// maxLength of a quantity's text.
	maxLength = 128
)

// Check looks for quantities out of bounds in the body of a request, before anything
// computes with them. object is what the body describes, or changes if it is a patch:
// a pointer to a struct of the API. Bodies that cannot be read are left to the decoder
// that comes after. It is safe for concurrent use and keeps nothing.
func Check(contentType string, body []byte, object any) *field.Error {
	if object == nil || !suspicious(body) {
		return nil
	}
	t := reflect.TypeOf(object)
	media, _, err := mime.ParseMediaType(contentType)
	if err != nil {
		media = "application/json"
	}
	if strings.HasSuffix(media, "protobuf") {
		return inProtobuf(body)
	}
	v, err := read(media, body)
	switch {
	case err != nil:
		return nil
	case strings.Contains(media, "json-patch"):
		return inPatch(t, v)
	}
	return walk(t, v, nil)
}

// read decodes a body of any of the API's formats without a type.
func read(media string, body []byte) (v any, err error) {
	switch {
	case strings.Contains(media, "cbor"):
		return v, direct.Unmarshal(body, &v)
	case strings.Contains(media, "yaml"):
		if body, err = yaml.YAMLToJSON(body); err != nil {
			return nil, err
		}
	}
	d := json.NewDecoder(bytes.NewReader(body))
	d.UseNumber() // 1e2000000000 is no float64
	err = d.Decode(&v)
	return v, err
}

var (
	quantityType  = reflect.TypeFor[resource.Quantity]()
	marshalerType = reflect.TypeFor[json.Unmarshaler]()
)

// walk goes through a value and the type that it will be decoded to side by side.
func walk(t reflect.Type, v any, path *field.Path) *field.Error {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t == quantityType {
		return judge(v, path)
	}
	switch t.Kind() {
	case reflect.Struct:
		if reflect.PointerTo(t).Implements(marshalerType) {
			return nil // a time, an IntOrString, an extension: no quantities
		}
		fields, _ := v.(map[string]any)
		for name, value := range fields {
			if f, ok := fieldNamed(t, name); ok {
				if err := walk(f, value, child(path, name)); err != nil {
					return err
				}
			}
		}
	case reflect.Map:
		entries, _ := v.(map[string]any)
		for key, value := range entries {
			if err := walk(t.Elem(), value, path.Key(key)); err != nil {
				return err
			}
		}
	case reflect.Slice:
		items, _ := v.([]any)
		for i, item := range items {
			if err := walk(t.Elem(), item, path.Index(i)); err != nil {
				return err
			}
		}
	}
	return nil
}

// fieldNamed is the type of a struct's field by its name in JSON.
func fieldNamed(t reflect.Type, name string) (reflect.Type, bool) {
	for i := range t.NumField() {
		f := t.Field(i)
		tag, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case tag == name && tag != "":
			return f.Type, true
		case f.Anonymous && tag == "" || strings.Contains(options, "inline"):
			inner := f.Type
			for inner.Kind() == reflect.Pointer {
				inner = inner.Elem()
			}
			if inner.Kind() != reflect.Struct {
				continue
			}
			if found, ok := fieldNamed(inner, name); ok {
				return found, true
			}
		}
	}
	return nil, false
}

// inPatch looks at the values of a JSON patch (RFC 6902), each where its path puts it.
func inPatch(t reflect.Type, v any) *field.Error {
	operations, _ := v.([]any)
	for _, o := range operations {
		operation, _ := o.(map[string]any)
		pointer, _ := operation["path"].(string)
		at, path := t, (*field.Path)(nil)
		for part := range strings.SplitSeq(strings.TrimPrefix(pointer, "/"), "/") {
			part = strings.NewReplacer("~1", "/", "~0", "~").Replace(part)
			if at != nil && pointer != "" {
				at, path = step(at, part), child(path, part)
			}
		}
		if at == nil {
			continue // the API refuses it
		}
		if err := walk(at, operation["value"], path); err != nil {
			return err
		}
	}
	return nil
}

// step is the type of a part of t; nil: it has none of that name.
func step(t reflect.Type, part string) reflect.Type {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch t.Kind() {
	case reflect.Struct:
		f, _ := fieldNamed(t, part)
		return f
	case reflect.Map, reflect.Slice:
		return t.Elem()
	}
	return nil
}

func child(path *field.Path, name string) *field.Path {
	if path == nil {
		return field.NewPath(name)
	}
	return path.Child(name)
}

// inProtobuf looks for messages whose only content is a text out of bounds, as a
// Quantity's is: its length, the tag of field 1, the text's length, the text.
func inProtobuf(body []byte) *field.Error {
	for _, m := range matches(body) {
		// Before the text stands its length, in one byte as long texts are refused anyhow.
		for start := m; start >= 3 && m-start < maxLength; start-- {
			n := int(body[start-1])
			if body[start-2] != 1<<3|2 || int(body[start-3]) != n+2 || start+n > len(body) || start+n <= m {
				continue
			}
			if err := judge(string(body[start:start+n]), nil); err != nil {
				return err
			}
		}
	}
	return nil
}

// judge refuses a text that is not to be computed with. What is no quantity at all is
// left to the decoder.
func judge(v any, path *field.Path) *field.Error {
	var text string
	switch v := v.(type) {
	case string:
		text = v
	case json.Number:
		text = v.String()
	default:
		return nil
	}
	text = strings.TrimSpace(text)
	if path == nil {
		path = field.NewPath("quantity")
	}
	if len(text) > maxLength {
		return field.TooLong(path, text[:maxLength]+"…", maxLength)
	}
	i := strings.IndexAny(text, "eE")
	if i < 0 || strings.Trim(text[:i], "+-.0123456789") != "" {
		return nil
	}
	digits := strings.TrimLeft(text[i+1:], "+-")
	if digits == "" || strings.Trim(digits, "0123456789") != "" {
		return nil // 1E and 1Ei are suffixes
	}
	if n, err := strconv.Atoi(digits); err != nil || n > maxExponent {
		return field.Invalid(path, text, fmt.Sprintf("the exponent has to be between -%d and %d", maxExponent, maxExponent))
	}
	return nil
}
