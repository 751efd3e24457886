package quantity

import (
	"errors"
	"fmt"
	"reflect"

	"google.golang.org/protobuf/encoding/protowire"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

// InProtobuf looks for quantities out of bounds in a message that will be decoded to a
// value of type t, a struct of the API with the numbers of its fields in their tags.
// The error is a *field.Error, or says that data is no message: what this cannot read
// is not left to the decoder, which may read it otherwise.
func InProtobuf(data []byte, t reflect.Type) error {
	if !Holds(t) || !Suspicious(data) {
		return nil
	}
	return message(data, t, nil)
}

var errNoMessage = errors.New("not a protobuf message")

// message reads the fields of one, in any order and as often as they come.
func message(data []byte, t reflect.Type, path *field.Path) error {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		return nil // no message is decoded to it
	}
	return fields(data, func(number protowire.Number, value []byte) error {
		if t == quantityType {
			if number != 1 {
				return nil
			}
			if wrong := judge(string(value), path); wrong != nil {
				return wrong
			}
			return nil
		}
		f, ok := partsOf(t).numbered[number]
		if !ok {
			return nil
		}
		at := path
		if f.name != "" {
			at = child(path, f.name)
		}
		switch f.t.Kind() {
		case reflect.Map:
			return entry(value, f.t, at)
		case reflect.Slice, reflect.Array:
			return message(value, f.t.Elem(), at)
		}
		return message(value, f.t, at)
	})
}

// entry reads one of a map: field 1 is the key, field 2 the value.
func entry(data []byte, t reflect.Type, path *field.Path) error {
	key := ""
	if err := fields(data, func(number protowire.Number, value []byte) error {
		if number == 1 {
			key = string(value)
		}
		return nil
	}); err != nil {
		return err
	}
	return fields(data, func(number protowire.Number, value []byte) error {
		if number == 2 {
			return message(value, t.Elem(), path.Key(key))
		}
		return nil
	})
}

// fields calls each with what has a length of a message: texts, bytes and messages.
func fields(data []byte, each func(protowire.Number, []byte) error) error {
	for len(data) > 0 {
		number, kind, n := protowire.ConsumeTag(data)
		if n < 0 {
			return fmt.Errorf("%w: %w", errNoMessage, protowire.ParseError(n))
		}
		data = data[n:]
		if kind != protowire.BytesType {
			if n = protowire.ConsumeFieldValue(number, kind, data); n < 0 {
				return fmt.Errorf("%w: %w", errNoMessage, protowire.ParseError(n))
			}
			data = data[n:]
			continue
		}
		value, n := protowire.ConsumeBytes(data)
		if n < 0 {
			return fmt.Errorf("%w: %w", errNoMessage, protowire.ParseError(n))
		}
		if err := each(number, value); err != nil {
			return err
		}
		data = data[n:]
	}
	return nil
}
