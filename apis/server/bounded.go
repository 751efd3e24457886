package server

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// maxMembers bounds the entries of one map of an object that a client sends.
// Field ownership is kept in sorted sets that grow by insertion: their cost is
// the square of the entries, half a minute for 150 000. The size of an object
// is bounded elsewhere, and by it fewer than twice as many could be stored.
const maxMembers = 1 << 15

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
	if obj != nil {
		if tooMany := checkMembers(obj); tooMany != nil {
			return nil, gvk, tooMany
		}
	}
	return obj, gvk, err
}

// checkMembers counts the maps that users fill as they like.
func checkMembers(obj runtime.Object) error {
	maps := map[string]int{}
	if object, err := meta.Accessor(obj); err == nil {
		maps["metadata.labels"], maps["metadata.annotations"] = len(object.GetLabels()), len(object.GetAnnotations())
	}
	switch o := obj.(type) {
	case *corev1.ConfigMap:
		maps["data"], maps["binaryData"] = len(o.Data), len(o.BinaryData)
	case *corev1.Secret:
		maps["data"] = len(o.Data)
	}
	for path, n := range maps {
		if n > maxMembers {
			return fmt.Errorf("%s: too many: %d entries, at most %d are allowed; split the object into several", path, n, maxMembers)
		}
	}
	return nil
}
