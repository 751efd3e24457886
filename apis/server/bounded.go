package server

import (
	"fmt"
	"reflect"
	"strings"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// bounded is a serializer that does not read objects with too many parts.
type bounded struct{ runtime.NegotiatedSerializer }

// DecoderToVersion implements runtime.NegotiatedSerializer.
func (b bounded) DecoderToVersion(d runtime.Decoder, version runtime.GroupVersioner) runtime.Decoder {
	return boundedDecoder{b.NegotiatedSerializer.DecoderToVersion(d, version)}
}

type boundedDecoder struct{ runtime.Decoder }

// Decode implements runtime.Decoder.
func (d boundedDecoder) Decode(data []byte, defaults *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	obj, gvk, err := d.Decoder.Decode(data, defaults, into)
	if obj != nil && len(data) >= 2*maxMembers { // less cannot hold so many
		if tooMany := checkMembers(reflect.ValueOf(obj), ""); tooMany != nil {
			return nil, gvk, tooMany
		}
	}
	return obj, gvk, err
}

// checkMembers counts the entries of all maps and lists in v, which is at path.
func checkMembers(v reflect.Value, path string) error {
	switch v.Kind() {
	case reflect.Pointer, reflect.Interface:
		if !v.IsNil() {
			return checkMembers(v.Elem(), path)
		}
	case reflect.Map, reflect.Slice:
		of := v.Type().Elem()
		if v.Kind() == reflect.Slice && of.Kind() == reflect.Uint8 {
			return nil // bytes
		}
		if n := v.Len(); n > maxMembers {
			return fmt.Errorf("%s: too many: %d entries, at most %d are allowed; split the object into several", strings.TrimPrefix(path, "."), n, maxMembers)
		}
		switch of.Kind() {
		case reflect.Pointer, reflect.Interface, reflect.Map, reflect.Slice, reflect.Struct:
		default:
			return nil // of values without parts
		}
		if v.Kind() == reflect.Slice {
			for i := range v.Len() {
				if err := checkMembers(v.Index(i), fmt.Sprintf("%s[%d]", path, i)); err != nil {
					return err
				}
			}
			return nil
		}
		for each := v.MapRange(); each.Next(); {
			if err := checkMembers(each.Value(), fmt.Sprintf("%s[%v]", path, each.Key())); err != nil {
				return err
			}
		}
	case reflect.Struct:
		for i := range v.NumField() {
			field := v.Type().Field(i)
			if !field.IsExported() {
				continue
			}
			name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
			if name != "" {
				name = "." + name
			}
			if err := checkMembers(v.Field(i), path+name); err != nil {
				return err
			}
		}
	}
	return nil
}
