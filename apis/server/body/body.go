// Package body looks at what clients send before anything is made of it: an object of
// too many parts, or a quantity of a few bytes, can cost more than a server has. What
// it looks at is what the library will decode, told from the media type and the
// conversion that the library uses; it changes nothing and reads from no connection.
//
// A body is looked at twice, each time for what can be told there: by Check as it was
// sent, whatever the kind; by the decoders of Serializer with the type that it is
// decoded to, which is not always the one that the URL names, and with what has become
// of it when it is a patch.
package body

import (
	"errors"
	"fmt"
	"reflect"
	"strings"

	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/apis/quantity"
)

var (
	// ErrTooLarge is returned when a body would be more than is worked on.
	ErrTooLarge = errors.New("more than is worked on")
	// ErrUnreadable is returned when a body is not what its media type says.
	ErrUnreadable = errors.New("unreadable")
)

// Check looks at the body of a write. patched is the type of what the request is about,
// nil if that is not decoded to a type: patches that are not decoded to one as a whole
// are compared with it. limit is how large the body may be, in bytes, after what YAML
// says once and means often has been written out. The error is one of those above, or
// a *field.Error.
func Check(contentType string, data []byte, patched reflect.Type, limit int64) error {
	media := Media(contentType)
	typed := patched != nil && quantity.Holds(patched) &&
		(media == string(types.StrategicMergePatchType) || media == string(types.ApplyYAMLPatchType))
	switch {
	case strings.HasSuffix(media, "yaml"):
		repeats := repeats(data)
		if len(data) < 2*maxMembers && !typed && !repeats {
			return nil
		}
		var err error
		if data, err = fromYAML(data, repeats, limit); err != nil {
			return err
		}
	case strings.HasSuffix(media, "json") || media == "":
	default:
		return nil // protobuf is looked at by its decoder, and there is no other
	}
	if len(data) >= 2*maxMembers && tooMany(data, maxMembers) {
		return fmt.Errorf("%w: a map or list in it has more than %d entries, at most %d are allowed; split the object into several", ErrTooLarge, maxMembers, maxMembers)
	}
	if !typed {
		return nil
	}
	return quantities(quantity.InJSON(data, patched))
}

// Media is the media type of a request's header as the library compares it: it cuts
// off what follows a semicolon, whether that is well formed or not.
func Media(contentType string) string {
	media, _, _ := strings.Cut(contentType, ";")
	return strings.ToLower(strings.TrimSpace(media))
}
