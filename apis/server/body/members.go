package body

import (
	"fmt"
	"reflect"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// maxMembers bounds the entries of one map or list of what a client sends.
// Field ownership is kept in sorted sets that grow by insertion: their cost is
// the square of the entries, half a minute for 150 000. The size of an object
// is bounded elsewhere, and by it fewer than twice as many could be stored.
const maxMembers = 1 << 15

// maxDepth is how deep the library's decoders go.
const maxDepth = 10_000

// tooMany reports whether a map or list in JSON has more entries than most, doubled keys
// counted. It does not check the form: the decoder does, before it makes anything.
func tooMany(data []byte, most int) bool {
	var open []int // the entries of the maps and lists that have not ended
	for i := 0; i < len(data); i++ {
		switch data[i] {
		case '"':
			for i++; i < len(data) && data[i] != '"'; i++ {
				if data[i] == '\\' {
					i++
				}
			}
		case '{', '[':
			if len(open) >= maxDepth {
				return false
			}
			open = append(open, 1)
		case '}', ']':
			if len(open) > 0 {
				open = open[:len(open)-1]
			}
		case ',':
			if top := len(open) - 1; top >= 0 {
				if open[top]++; open[top] > most {
					return true
				}
			}
		}
	}
	return false
}

var (
	fieldsType    = reflect.TypeFor[metav1.FieldsV1]()
	extensionType = reflect.TypeFor[runtime.RawExtension]()
)

// checkMembers counts the entries of all maps and lists in v, which is at path, and of
// those in the JSON that v keeps as it came: in protobuf, field ownership and the
// parameters of others are bytes.
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
		if t := v.Type(); (t == fieldsType || t == extensionType) && tooMany(v.FieldByName("Raw").Bytes(), maxMembers) {
			return fmt.Errorf("%s: too many: a map or list in it has more than %d entries, at most %d are allowed; split the object into several", strings.TrimPrefix(path, "."), maxMembers, maxMembers)
		}
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
