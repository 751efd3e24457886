package body

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"

	yamlv2 "go.yaml.in/yaml/v2"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"sigs.k8s.io/yaml"
)

// repeats reports whether YAML may say once and mean often: &name gives a name to what
// *name stands for.
func repeats(data []byte) bool {
	return bytes.IndexByte(data, '&') >= 0 && bytes.IndexByte(data, '*') >= 0
}

// fromYAML is the JSON that the library makes of YAML, by the library's own function.
// Clients send JSON as YAML more often than not, which is left as it is. The library of
// YAML bounds how often names are used, not how long the result is: a text of a
// megabyte, named a thousand times, would be a gigabyte.
func fromYAML(data []byte, repeats bool, limit int64) ([]byte, error) {
	if json.Valid(data) && !bytes.Contains(data, []byte("<<")) { // <<: another map's entries
		return data, nil
	}
	if repeats {
		var root *value
		if err := yamlv2.Unmarshal(data, &root); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrUnreadable, err)
		}
		b := budget{left: limit}
		if err := b.spend(root, 0); errors.Is(err, ErrTooLarge) {
			return nil, fmt.Errorf("%w: with what its names stand for written out it has more than %d bytes; name less, or split the object into several", ErrTooLarge, limit)
		} else if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrUnreadable, err)
		}
	}
	out, err := yaml.YAMLToJSON(data)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnreadable, err)
	}
	return out, nil
}

// value is a value in YAML that has been parsed, but not made: the library makes what a
// name stands for again each time that the name is used, a !!binary text with a copy of
// its bytes. nil is null.
type value struct{ decode func(any) error }

// UnmarshalYAML implements yaml.Unmarshaler.
func (v *value) UnmarshalYAML(decode func(any) error) error {
	v.decode = decode
	return nil
}

// budget is what is left of the bytes that YAML may have once it is written out.
type budget struct{ left int64 }

// spend takes what v needs, and keeps nothing of it. It fails with ErrTooLarge as soon as
// nothing is left, without looking at the rest.
func (b *budget) spend(v *value, depth int) error {
	if b.left -= 2; b.left < 0 {
		return ErrTooLarge
	}
	if v == nil {
		return nil
	}
	if depth > maxDepth {
		return fmt.Errorf("nested deeper than %d, or a name stands for what it is part of", maxDepth)
	}
	var mismatch *yamlv2.TypeError
	var text string
	err := v.decode(&text)
	if err == nil {
		if b.left -= int64(len(text)); b.left < 0 {
			return ErrTooLarge
		}
		return nil
	}
	if !errors.As(err, &mismatch) {
		return err
	}
	var list []*value
	if err = v.decode(&list); err == nil {
		for _, item := range list {
			if err := b.spend(item, depth+1); err != nil {
				return err
			}
		}
		return nil
	}
	if !errors.As(err, &mismatch) {
		return err
	}
	var entries map[*value]*value // by pointer: doubled keys, and those that others override, are made too
	if err = v.decode(&entries); err != nil {
		return err
	}
	for key, item := range entries {
		if key == nil {
			return errors.New("a key is null") // of which only the last would be here; JSON has none
		}
		if err := b.spend(key, depth+1); err != nil {
			return err
		}
		if err := b.spend(item, depth+1); err != nil {
			return err
		}
	}
	return nil
}

// quantities is err, if it says which quantity is wrong.
func quantities(err error) error {
	var wrong *field.Error
	if err == nil || errors.As(err, &wrong) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrUnreadable, err)
}
