package main

import (
	"errors"
	"strings"
	"testing"
	"unicode/utf8"
)

// TestSetupMessage: a long error is cut between characters; the API refuses an event
// with half of one.
func TestSetupMessage(t *testing.T) {
	for n := range 4 {
		got := setupMessage(errors.New(strings.Repeat("x", n) + strings.Repeat("…", 1024)))
		if !utf8.ValidString(got) || len(got) > 1024 || len(got) < 1020 {
			t.Errorf("%d bytes, valid: %t", len(got), utf8.ValidString(got))
		}
	}
}
