package image

import (
	"context"
	"errors"
	"io"
	"syscall"

	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

// ErrWorker is returned when the process that reads an image's bytes ended early, or
// reported what makes no sense.
var ErrWorker = errors.New("the process that reads images failed")

// errNet stands for the errors of a network, for which there is no one value.
var errNet = errors.New("network")

// marks are the errors that are told apart by name on the other side of a pipe.
var marks = map[string]error{
	"invalidName": ErrInvalidName, "unsafeLayer": ErrUnsafeLayer, "digest": ErrDigest, "platform": ErrPlatform,
	"stalled": ErrStalled, "noTLS": ErrNoTLS, "tooLarge": ErrTooLarge, "notAnArchive": ErrNotAnArchive,
	"noSpace": syscall.ENOSPC, "ended": io.ErrUnexpectedEOF, "net": errNet, "canceled": context.Canceled,
}

// maxErrorText bounds an error's text in bytes.
const maxErrorText = 8 << 10

// workError is an error of a worker in a form that can be sent.
type workError struct {
	Text  string   `json:"text"`
	Marks []string `json:"marks,omitempty"`
	// BadLayer: no tool could unpack it.
	BadLayer bool `json:"badLayer,omitempty"`
	// Status is the registry's answer, and Says its words; 0: it gave none.
	Status int    `json:"status,omitempty"`
	Says   string `json:"says,omitempty"`
}

// newWorkError is nil for nil.
func newWorkError(err error) *workError {
	if err == nil {
		return nil
	}
	w := &workError{Text: cut(err.Error()), BadLayer: isBadLayer(err)}
	for name, is := range marks {
		if errors.Is(err, is) {
			w.Marks = append(w.Marks, name)
		}
	}
	if isNetError(err) {
		w.Marks = append(w.Marks, "net")
	}
	w.Status, w.Says = answerOf(err)
	w.Says = cut(w.Says)
	return w
}

func cut(s string) string { return s[:min(len(s), maxErrorText)] }

// Error implements error.
func (w *workError) Error() string { return cut(w.Text) }

// Is implements the interface of errors.Is.
func (w *workError) Is(target error) bool {
	for _, name := range w.Marks {
		if marks[name] == target {
			return true
		}
	}
	return false
}

// received is the error for callers in this process.
func (w *workError) received() error {
	switch {
	case w == nil:
		return nil
	case w.BadLayer:
		return &badLayerError{w}
	}
	return w
}

// answerOf is what a registry answered; 0: nothing.
func answerOf(err error) (status int, words string) {
	var answer *transport.Error
	var sent *workError
	switch {
	case errors.As(err, &answer):
		return answer.StatusCode, says(answer)
	case errors.As(err, &sent):
		return sent.Status, cut(sent.Says)
	}
	return 0, ""
}
