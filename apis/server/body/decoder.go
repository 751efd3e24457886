package body

import (
	"reflect"
	"slices"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"sigs.k8s.io/yaml"

	"github.com/clusterd/clusterd/apis/quantity"
)

// Serializer is next, but refuses to read objects of too many parts and quantities out
// of bounds. types are those that next decodes to.
func Serializer(next runtime.NegotiatedSerializer, types *runtime.Scheme) runtime.NegotiatedSerializer {
	return serializer{next, types}
}

type serializer struct {
	runtime.NegotiatedSerializer
	types *runtime.Scheme
}

// DecoderToVersion implements runtime.NegotiatedSerializer.
func (s serializer) DecoderToVersion(d runtime.Decoder, version runtime.GroupVersioner) runtime.Decoder {
	media := ""
	for _, info := range s.SupportedMediaTypes() {
		if runtime.Decoder(info.Serializer) == d || runtime.Decoder(info.StrictSerializer) == d {
			media = info.MediaType
		}
	}
	return decoder{s.NegotiatedSerializer.DecoderToVersion(d, version), media, s.types}
}

type decoder struct {
	runtime.Decoder
	media string
	types *runtime.Scheme
}

// Decode implements runtime.Decoder.
func (d decoder) Decode(data []byte, defaults *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	if gvk, err := d.check(data, defaults, into); err != nil {
		return nil, gvk, err
	}
	obj, gvk, err := d.Decoder.Decode(data, defaults, into)
	if obj != nil && len(data) >= 2*maxMembers { // less cannot hold so many
		if tooMany := checkMembers(reflect.ValueOf(obj), ""); tooMany != nil {
			return nil, gvk, tooMany
		}
	}
	return obj, gvk, err
}

// check looks for quantities in what will be decoded. What names no type, or cannot be
// read, is left to the decoder, which refuses it.
func (d decoder) check(data []byte, defaults *schema.GroupVersionKind, into runtime.Object) (*schema.GroupVersionKind, error) {
	switch d.media {
	case runtime.ContentTypeProtobuf:
		if !quantity.Suspicious(data) || len(data) < len(protobufPrefix) {
			return nil, nil
		}
		var message runtime.Unknown
		if err := message.Unmarshal(data[len(protobufPrefix):]); err != nil {
			return nil, nil
		}
		actual := message.GroupVersionKind()
		for _, t := range d.candidates(actual, defaults, into) {
			if err := quantity.InProtobuf(message.Raw, t); err != nil {
				return &actual, quantities(err)
			}
		}
		return nil, nil
	case runtime.ContentTypeYAML:
		var err error
		if data, err = yaml.YAMLToJSON(data); err != nil {
			return nil, nil
		}
	}
	if !quantity.SuspiciousJSON(data) {
		return nil, nil
	}
	actual, err := json.DefaultMetaFactory.Interpret(data)
	if err != nil {
		return nil, nil
	}
	for _, t := range d.candidates(*actual, defaults, into) {
		if err := quantity.InJSON(data, t); err != nil {
			return actual, quantities(err)
		}
	}
	return nil, nil
}

// protobufPrefix begins each message.
const protobufPrefix = "k8s\x00"

// candidates are the types that a body can be decoded to. It is the body that says
// which, defaults and into complete it; whether that fits the request is compared
// after it has been decoded.
func (d decoder) candidates(actual schema.GroupVersionKind, defaults *schema.GroupVersionKind, into runtime.Object) []reflect.Type {
	names := []schema.GroupVersionKind{}
	if defaults != nil {
		names = append(names, *defaults)
	}
	var all []reflect.Type
	if into != nil {
		all = append(all, reflect.TypeOf(into).Elem())
		if registered, _, err := d.types.ObjectKinds(into); err == nil {
			names = append(names, registered...)
		}
	}
	known := d.types.AllKnownTypes()
	add := func(gvk schema.GroupVersionKind) {
		if t, ok := known[gvk]; ok && !slices.Contains(all, t) {
			all = append(all, t)
		}
	}
	add(actual)
	for _, name := range names {
		filled := actual
		if filled.Kind == "" {
			filled.Kind = name.Kind
		}
		add(filled)
		if filled.Version == "" {
			filled.Version = name.Version
		}
		add(filled)
		filled.Group = name.Group
		add(filled)
		filled.Version = name.Version
		add(filled)
	}
	return all
}
