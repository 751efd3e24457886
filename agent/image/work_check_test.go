package image

import (
	"errors"
	"math"
	"slices"
	"strings"
	"testing"
)

// TestUnpackedCheck: a size and a fingerprint that cannot be true are not taken.
func TestUnpackedCheck(t *testing.T) {
	req := unpackRequest{limits: Limits{Unpacked: 100}, below: 40}
	sum := strings.Repeat("0a", 32)
	for _, u := range []unpacked{{0, sum}, {60, sum}} {
		if err := u.check(req); err != nil {
			t.Errorf("%+v: %v", u, err)
		}
	}
	for _, u := range []unpacked{{-1, sum}, {61, sum}, {math.MaxInt64, sum}, {1, ""}, {1, sum + "0"}, {1, strings.ToUpper(sum)}, {1, sum + "\n"}, {1, strings.Repeat("x", 1<<20)}} {
		if err := u.check(req); !errors.Is(err, ErrWorker) || len(err.Error()) > 200 {
			t.Errorf("%d bytes, %.80q: %.200v", u.Size, u.Sum, err)
		}
	}
}

// TestShortNotes: what a process says of a download does not fill the log.
func TestShortNotes(t *testing.T) {
	many := slices.Repeat([]string{strings.Repeat("x", 1<<20)}, 100)
	got := shortNotes(many)
	if len(got) != maxNotes || len(strings.Join(got, "")) != maxNotes*maxNote {
		t.Errorf("%d notes, %d bytes", len(got), len(strings.Join(got, "")))
	}
	if got := shortNotes([]string{"a", "b"}); !slices.Equal(got, []string{"a", "b"}) {
		t.Errorf("%q", got)
	}
}

// TestListedIsBounded: what is reported of an archive is held against the limits.
func TestListedIsBounded(t *testing.T) {
	s := openLimited(t, Limits{Manifest: 10, Layers: 2})
	config := []byte(`{"rootfs":{"diff_ids":[]}}`)
	for what, l := range map[string]listed{
		"manifest": {Config: config, Manifest: make([]byte, 11)},
		"layers":   {Config: config, Layers: make([]listedLayer, 3)},
	} {
		if _, err := s.loaded(l, nil, ""); !errors.Is(err, ErrTooLarge) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := s.loaded(listed{Config: config, Manifest: make([]byte, 10)}, nil, ""); err != nil {
		t.Error(err)
	}
}
