// Package quantity finds resource quantities that no machine can compute with, before
// they are parsed.
//
// k8s.io/apimachinery's Quantity keeps an exponent of 32 bits and computes the power
// of ten when it rounds or compares: "1e-2000000000" takes the memory of the process
// when it is parsed, "1e2000000000" each time that it is compared once it is stored.
package quantity

import (
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"
	"strings"
	"sync"

	"google.golang.org/protobuf/encoding/protowire"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"
)

const (
	// maxDigits of an exponent. Kubernetes' quantities lie between 1e-9 and 2^63, and
	// what comparing costs grows with the number of zeros.
	maxDigits = 2
	// maxLength of a quantity's text.
	maxLength = 128
)

// Bounded refuses the text of a quantity that is not to be computed with. What is no
// quantity at all may pass: ParseQuantity refuses it, at little cost.
func Bounded(text string) error {
	if err := judge(text, nil); err != nil {
		return fmt.Errorf("%.*q: %s", maxLength, text, err.Detail)
	}
	return nil
}

// Parse is the quantity that text says, like ParseQuantity, but of one that can be
// computed with. What users write into names and annotations has to come through here.
func Parse(text string) (resource.Quantity, error) {
	if err := Bounded(text); err != nil {
		return resource.Quantity{}, err
	}
	return resource.ParseQuantity(text)
}

// judge is Bounded for the text at path.
func judge(text string, path *field.Path) *field.Error {
	if !Suspicious([]byte(text)) && len(text) <= maxLength {
		return nil
	}
	text = strings.TrimSpace(text)
	if path == nil {
		path = field.NewPath("quantity")
	}
	if len(text) > maxLength {
		return field.TooLong(path, text[:maxLength]+"…", maxLength)
	}
	if !exponents([]byte(text)) {
		return nil
	}
	return field.Invalid(path, text, "the exponent has to be between -99 and 99, in two digits")
}

var (
	quantityType  = reflect.TypeFor[resource.Quantity]()
	marshalerType = reflect.TypeFor[json.Unmarshaler]()
)

var holders sync.Map // of reflect.Type to bool

// Holds tells whether values of a type can hold quantities.
func Holds(t reflect.Type) bool {
	if known, ok := holders.Load(t); ok {
		return known.(bool)
	}
	found := holds(t, map[reflect.Type]bool{})
	holders.Store(t, found)
	return found
}

func holds(t reflect.Type, seen map[reflect.Type]bool) bool {
	if seen[t] {
		return false // who asked about it first finds out
	}
	seen[t] = true
	switch t.Kind() {
	case reflect.Pointer, reflect.Map, reflect.Slice, reflect.Array:
		return holds(t.Elem(), seen)
	case reflect.Struct:
		if t == quantityType {
			return true
		}
		if opaque(t) {
			return false
		}
		for i := range t.NumField() {
			if f := t.Field(i); (f.IsExported() || f.Anonymous) && holds(f.Type, seen) {
				return true
			}
		}
	}
	return false
}

// opaque types read their JSON themselves: a time, an IntOrString, an extension. The
// API has none with a quantity in it.
func opaque(t reflect.Type) bool { return reflect.PointerTo(t).Implements(marshalerType) }

// parts are the fields of a struct that can hold quantities.
type parts struct {
	named    map[string]part
	numbered map[protowire.Number]part
}

type part struct {
	t    reflect.Type
	name string // in JSON; "": its fields are taken for those of the struct that it is in
}

var structs sync.Map // of reflect.Type to *parts

func partsOf(t reflect.Type) *parts {
	if known, ok := structs.Load(t); ok {
		return known.(*parts)
	}
	p := &parts{named: map[string]part{}, numbered: map[protowire.Number]part{}}
	for i := range t.NumField() {
		f := t.Field(i)
		if !f.IsExported() && !f.Anonymous || !Holds(f.Type) {
			continue
		}
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		if _, numbered, ok := strings.Cut(f.Tag.Get("protobuf"), ","); ok {
			text, _, _ := strings.Cut(numbered, ",")
			if n, err := strconv.Atoi(text); err == nil {
				p.numbered[protowire.Number(n)] = part{f.Type, name}
			}
		}
		inner := f.Type
		for inner.Kind() == reflect.Pointer {
			inner = inner.Elem()
		}
		if inner.Kind() == reflect.Struct && inner != quantityType && (f.Anonymous && name == "" || strings.Contains(options, "inline")) {
			for name, one := range partsOf(inner).named {
				p.named[name] = one
			}
			continue
		}
		if name == "" {
			name = f.Name
		}
		p.named[name] = part{f.Type, name}
	}
	known, _ := structs.LoadOrStore(t, p)
	return known.(*parts)
}

func child(path *field.Path, name string) *field.Path {
	if path == nil {
		return field.NewPath(name)
	}
	return path.Child(name)
}
