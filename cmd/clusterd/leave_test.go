package main

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/join"
)

// TestPersistently: what a server without a leader, or one that does not answer, could not
// do is tried again; what the cluster refuses is not.
func TestPersistently(t *testing.T) {
	busy, no := &join.Refusal{Code: join.CodeBusy}, &join.Refusal{Code: join.CodeNeeded}
	lost := errors.New("connection reset")
	for what, c := range map[string]struct {
		answers []error
		want    error
	}{
		"at once": {[]error{nil}, nil},
		"later":   {[]error{busy, lost, nil}, nil},
		"refused": {[]error{busy, no}, no},
	} {
		n := 0
		err := persistently(t.Context(), func(context.Context) error { n++; return c.answers[n-1] })
		if !errors.Is(err, c.want) || (err == nil) != (c.want == nil) || n != len(c.answers) {
			t.Errorf("%s: %v after %d tries", what, err, n)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if err := persistently(ctx, func(context.Context) error { return lost }); !errors.Is(err, lost) {
		t.Errorf("without an answer: %v", err)
	}
}
