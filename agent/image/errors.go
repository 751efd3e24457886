package image

import (
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
)

var (
	// ErrInvalidName is returned when a reference cannot be an image's name. It
	// is permanent: the caller should not try again.
	ErrInvalidName = errors.New("invalid image name")
	// ErrInUse is returned when an image cannot be removed because a container
	// is mounted from it.
	ErrInUse = errors.New("image is in use")
	// ErrNotFound is returned when an image is not on this node.
	ErrNotFound = errors.New("no such image on this node")
	// ErrClosed is returned after Close.
	ErrClosed = errors.New("image store is closed")
	// ErrUnsafeLayer is returned when a layer names a path outside its root.
	ErrUnsafeLayer = errors.New("layer names a path outside its root")
	// ErrDigest is returned when content does not have the digest it was
	// announced with.
	ErrDigest = errors.New("content does not match its digest")
	// ErrPlatform is returned when an image has nothing for this node's platform.
	ErrPlatform = errors.New("no image for this platform")
	// ErrStalled is returned when a registry stopped sending in the middle.
	ErrStalled = errors.New("the registry stopped sending")
	// ErrNoTLS is returned when a registry speaks plain HTTP and is not named with
	// plainHTTP in the settings of registries.
	ErrNoTLS = errors.New("the registry does not speak TLS")
)

// Reason says why a pull failed, in one word for conditions and metrics.
type Reason string

// The reasons of a PullError.
const (
	ReasonNotFound     Reason = "NotFound"     // the registry knows no such image
	ReasonUnauthorized Reason = "Unauthorized" // credentials missing, wrong, or not enough
	ReasonThrottled    Reason = "Throttled"    // the registry asks to come back later
	ReasonUnreachable  Reason = "Unreachable"  // no answer: network, name resolution, TLS
	ReasonPlatform     Reason = "Platform"     // nothing for this node's platform
	ReasonCorrupt      Reason = "Corrupt"      // what came does not match its digest, or is no layer
	ReasonTooLarge     Reason = "TooLarge"     // over one of the Limits
	ReasonOther        Reason = "Other"
)

// PullError is a failed pull.
type PullError struct {
	Ref    string // full name
	Reason Reason
	// Says is what the registry answered, in its own words; empty when it did
	// not answer.
	Says string
	// Mirror is who gave that answer, if it was a mirror and not the registry itself.
	Mirror string
	// Before is what mirrors said that were asked before, as the end of a sentence.
	Before string
	Err    error
}

func (e *PullError) Error() string {
	if e.Says != "" {
		who := "the registry"
		if e.Mirror != "" {
			who = "mirror " + e.Mirror
		}
		return fmt.Sprintf("pull %s: %s says: %s%s", e.Ref, who, e.Says, e.Before)
	}
	return fmt.Sprintf("pull %s: %v", e.Ref, e.Err)
}

func (e *PullError) Unwrap() error { return e.Err }

// pullError sorts an error of a pull.
func pullError(ref string, err error) *PullError {
	pe := &PullError{Ref: ref, Reason: ReasonOther, Err: err}
	var (
		mirror *mirrorError
		after  *afterMirrors
	)
	if errors.As(err, &after) {
		pe.Before = after.mirrors()
	}
	if errors.As(err, &mirror) {
		pe.Mirror = mirror.host
	}
	status, words := answerOf(err)
	switch {
	case status != 0:
		pe.Says = words
		switch status {
		case http.StatusNotFound:
			pe.Reason = ReasonNotFound
		case http.StatusUnauthorized, http.StatusForbidden:
			pe.Reason = ReasonUnauthorized
		case http.StatusTooManyRequests:
			pe.Reason = ReasonThrottled
		}
	case errors.Is(err, ErrTooLarge):
		pe.Reason = ReasonTooLarge
	case errors.Is(err, ErrPlatform):
		pe.Reason = ReasonPlatform
	case errors.Is(err, ErrDigest), errors.Is(err, ErrUnsafeLayer), isBadLayer(err):
		pe.Reason = ReasonCorrupt
	case errors.Is(err, ErrStalled), errors.Is(err, ErrNoTLS), isNetError(err):
		pe.Reason = ReasonUnreachable
	}
	return pe
}

// says gives the registry's own words without the request around them.
func says(e *transport.Error) string {
	var words []string
	for _, d := range e.Errors {
		text := d.Message
		if d.Code != "" {
			text = strings.TrimSuffix(fmt.Sprintf("%s: %s", d.Code, d.Message), ": ")
		}
		words = append(words, text)
	}
	if len(words) == 0 {
		text := e.Error()
		if e.Request != nil { // it repeats the URL, which the reference already says
			_, text, _ = strings.Cut(text, ": ")
			if i := strings.Index(text, "unexpected status code"); i > 0 {
				text = text[i:]
			}
		}
		return text
	}
	return strings.Join(words, "; ")
}
