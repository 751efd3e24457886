package quantity

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"

	"k8s.io/apimachinery/pkg/util/validation/field"
)

// InJSON looks for quantities out of bounds in what will be decoded to a value of type
// t, doubled keys included: a decoder parses the value of each. The error is a
// *field.Error, or says that data is no JSON.
func InJSON(data []byte, t reflect.Type) error {
	if !Holds(t) || !SuspiciousJSON(data) {
		return nil
	}
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber() // 1e2000000000 is no float64
	return walk(d, t, nil)
}

// walk reads one value, which will be decoded to type t; nil: to none that matters.
func walk(d *json.Decoder, t reflect.Type, path *field.Path) error {
	token, err := d.Token()
	if err != nil {
		return fmt.Errorf("not JSON: %w", err)
	}
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t != nil && !Holds(t) {
		t = nil
	}
	switch token {
	case json.Delim('{'), json.Delim('['):
		return inside(d, token == json.Delim('{'), t, path)
	}
	if t == quantityType {
		if wrong := judge(fmt.Sprint(token), path); wrong != nil {
			return wrong
		}
	}
	return nil
}

// inside reads what a map or list holds, and its end.
func inside(d *json.Decoder, isMap bool, t reflect.Type, path *field.Path) error {
	if t == nil {
		return skip(d)
	}
	for i := 0; d.More(); i++ {
		var of reflect.Type
		var at *field.Path
		if isMap {
			key, err := d.Token()
			if err != nil {
				return fmt.Errorf("not JSON: %w", err)
			}
			name, _ := key.(string) // the decoder takes no other key
			switch t.Kind() {
			case reflect.Struct:
				if f, ok := partsOf(t).named[name]; ok && t != quantityType {
					of, at = f.t, child(path, name)
				}
			case reflect.Map:
				of, at = t.Elem(), path.Key(name)
			}
		} else if t.Kind() == reflect.Slice || t.Kind() == reflect.Array {
			of, at = t.Elem(), path.Index(i)
		}
		if err := walk(d, of, at); err != nil {
			return err
		}
	}
	if _, err := d.Token(); err != nil {
		return fmt.Errorf("not JSON: %w", err)
	}
	return nil
}

// skip reads to the end of the map or list that has begun.
func skip(d *json.Decoder) error {
	for depth := 1; depth > 0; {
		switch token, err := d.Token(); {
		case err != nil:
			return fmt.Errorf("not JSON: %w", err)
		case token == json.Delim('{'), token == json.Delim('['):
			depth++
		case token == json.Delim('}'), token == json.Delim(']'):
			depth--
		}
	}
	return nil
}
