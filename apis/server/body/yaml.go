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
		var v any
		if err := yamlv2.Unmarshal(data, &v); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrUnreadable, err)
		}
		if spend(v, limit) < 0 {
			return nil, fmt.Errorf("%w: with what its names stand for written out it has more than %d bytes; name less, or split the object into several", ErrTooLarge, limit)
		}
	}
	out, err := yaml.YAMLToJSON(data)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrUnreadable, err)
	}
	return out, nil
}

// spend is what is left of limit bytes after v has been written out; less than none: it
// is longer, and was not looked at to its end.
func spend(v any, limit int64) int64 {
	limit -= 2
	switch v := v.(type) {
	case string:
		limit -= int64(len(v))
	case []any:
		for _, item := range v {
			if limit = spend(item, limit); limit < 0 {
				break
			}
		}
	case map[any]any:
		for key, value := range v {
			if limit = spend(value, spend(key, limit)); limit < 0 {
				break
			}
		}
	}
	return limit
}

// quantities is err, if it says which quantity is wrong.
func quantities(err error) error {
	var wrong *field.Error
	if err == nil || errors.As(err, &wrong) {
		return err
	}
	return fmt.Errorf("%w: %w", ErrUnreadable, err)
}
