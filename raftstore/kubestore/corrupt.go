package kubestore

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/value"
)

// maxCorrupt is how many unreadable objects a list names before it gives up.
const maxCorrupt = 100

// errTooManyCorrupt ends the list of unreadable objects; clients know the text.
var errTooManyCorrupt = errors.New("too many errors, the list is truncated")

// corruptError says that a stored value cannot be opened or decoded.
type corruptError struct {
	what     string
	revision int64 // 0: not known
	err      error
}

func (e *corruptError) Error() string {
	if e.revision == 0 {
		return fmt.Sprintf("%s: %v", e.what, e.err)
	}
	return fmt.Sprintf("%s, revision %d: %v", e.what, e.revision, e.err)
}

func (e *corruptError) Unwrap() error { return e.err }

// corruptDeletedError says that a watched object was deleted whose last value
// cannot be read, so that no DELETED event can be made of it.
type corruptDeletedError struct{ err error }

func (e *corruptDeletedError) Error() string {
	return fmt.Sprintf("saw a DELETED event, but object data is corrupt: %v", e.err)
}

func (e *corruptDeletedError) Unwrap() error { return e.err }

// corruptMarker marks every value that its transformer cannot open as corrupt.
type corruptMarker struct{ value.Transformer }

func (m corruptMarker) TransformFromStorage(ctx context.Context, data []byte, dataCtx value.Context) ([]byte, bool, error) {
	out, stale, err := m.Transformer.TransformFromStorage(ctx, data, dataCtx)
	if err != nil {
		err = &corruptError{what: "stored data cannot be opened", err: err}
	}
	return out, stale, err
}

func isCorrupt(err error) bool {
	var c *corruptError
	return errors.As(err, &c)
}

// unreadable gives the error of a read the form by which the API server
// recognizes an object that may be deleted by force.
func (s *Storage) unreadable(key string, err error) error {
	if s.values.markCorrupt && isCorrupt(err) {
		return storage.NewCorruptObjError(key, err)
	}
	return err
}

// unlisted collects what a list could not read. Without tolerance the first
// error ends the list; with it corrupt objects are gathered, and anything else
// ends the list.
type unlisted struct {
	tolerant bool
	corrupt  []*storage.StorageError
	fatal    error
}

// add notes an error and reports whether the list has to end.
func (u *unlisted) add(key string, err error) (end bool) {
	if !u.tolerant || !isCorrupt(err) {
		u.fatal = err
		return true
	}
	u.corrupt = append(u.corrupt, storage.NewCorruptObjError(key, err))
	if len(u.corrupt) >= maxCorrupt {
		u.fatal = errTooManyCorrupt
	}
	return u.fatal != nil
}

// err is the one error that the list returns; nil when all could be read.
func (u *unlisted) err(resource schema.GroupResource) error {
	if len(u.corrupt) == 0 {
		return u.fatal
	}
	causes := make([]metav1.StatusCause, 0, len(u.corrupt)+1)
	for _, c := range u.corrupt {
		causes = append(causes, metav1.StatusCause{Type: metav1.CauseTypeUnexpectedServerResponse, Field: c.Key, Message: c.Error()})
	}
	switch {
	case errors.Is(u.fatal, errTooManyCorrupt):
		causes = append(causes, metav1.StatusCause{Type: metav1.CauseTypeTooMany, Message: u.fatal.Error()})
	case u.fatal != nil:
		causes = append(causes, metav1.StatusCause{Type: metav1.CauseTypeUnexpectedServerResponse, Message: u.fatal.Error()})
	}
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status:  metav1.StatusFailure,
		Code:    http.StatusInternalServerError,
		Reason:  metav1.StatusReasonStoreReadError,
		Message: fmt.Sprintf("%d of the listed %s cannot be read from the store, the first because of: %v", len(u.corrupt), resource, u.corrupt[0]),
		Details: &metav1.StatusDetails{Group: resource.Group, Kind: resource.Resource, Causes: causes},
	}}
}
