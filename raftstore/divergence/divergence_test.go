package divergence

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/clusterd/clusterd/raftstore/peer"
)

// fakeMembers answer with their hashes, and note which members were called. A member
// without a hash is silent.
type fakeMembers struct {
	hashes map[string]uint64
	called []string
}

func (f *fakeMembers) Ask(ids []string, _ byte, _ []byte) (<-chan peer.Answer, func()) {
	ch := make(chan peer.Answer, len(ids))
	for _, id := range ids {
		if hash, ok := f.hashes[id]; ok {
			ch <- peer.Answer{ID: id, Frame: peer.Frame{Kind: peer.KindNumber, Body: peer.NumberBody(hash)}}
		}
	}
	return ch, func() {}
}

func (f *fakeMembers) Call(id string, _ byte, _ []byte, _ peer.ReplyFunc) uint64 {
	f.called = append(f.called, id)
	return 0
}

// TestCompare: the leader a has hash 1 after entry 7.
func TestCompare(t *testing.T) {
	for _, tc := range []struct {
		name    string
		others  []string
		hashes  map[string]uint64
		called  []string
		stopped bool
	}{
		{"all agree", []string{"b", "c"}, map[string]uint64{"b": 1, "c": 1}, nil, false},
		{"one of three differs", []string{"b", "c"}, map[string]uint64{"b": 1, "c": 2}, []string{"c"}, false},
		{"the leader differs", []string{"b", "c"}, map[string]uint64{"b": 2, "c": 2}, nil, true},
		{"one of two differs: the leader is right", []string{"b"}, map[string]uint64{"b": 2}, []string{"b"}, false},
		{"one of three differs, one is silent: either may be wrong", []string{"b", "c"}, map[string]uint64{"b": 2}, nil, false},
		{"all three differ", []string{"b", "c"}, map[string]uint64{"b": 2, "c": 3}, nil, false},
		{"two and two", []string{"b", "c", "d"}, map[string]uint64{"b": 1, "c": 2, "d": 2}, nil, false},
		{"one of five differs, one is silent", []string{"b", "c", "d", "e"}, map[string]uint64{"b": 1, "c": 1, "d": 2}, []string{"d"}, false},
		{"two of five differ from the leader, two are silent", []string{"b", "c", "d", "e"}, map[string]uint64{"b": 2, "c": 2}, nil, false},
		{"one is silent", []string{"b", "c"}, map[string]uint64{"b": 1}, nil, false},
	} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			m := &fakeMembers{hashes: tc.hashes}
			hashes := &Hashes{}
			hashes.Note(7, 1)
			var stopped error
			c := New(Config{
				ID: "a", Hashes: hashes, Members: m, Logger: slog.New(slog.DiscardHandler),
				IDs:   func() ([]string, error) { return append([]string{"a"}, tc.others...), nil },
				Leads: func() bool { return true }, Applied: func() uint64 { return 7 },
				Stop: func(err error) { stopped = err; cancel() },
			})
			ended := make(chan struct{})
			go func() { defer close(ended); c.Run(ctx) }()
			time.Sleep(comparePeriod + compareTimeout + time.Millisecond)
			cancel()
			<-ended
			if called := slices.Compact(m.called); !slices.Equal(called, tc.called) {
				t.Errorf("%s: asked to stop: %v", tc.name, m.called)
			}
			if (stopped != nil) != tc.stopped || stopped != nil && !errors.Is(stopped, Err) {
				t.Errorf("%s: the leader stops: %v", tc.name, stopped)
			}
		})
	}
}

// TestDiffers: a member trusts the leader's hash only for entries that it has itself.
func TestDiffers(t *testing.T) {
	hashes := &Hashes{}
	hashes.Note(7, 1)
	var stopped error
	reached := error(nil)
	c := New(Config{Hashes: hashes, Stop: func(err error) { stopped = err }, Reach: func(context.Context, uint64) error { return reached }})
	word := func(index, right uint64) []byte { return append(peer.NumberBody(index), peer.NumberBody(right)...) }
	for _, body := range [][]byte{nil, word(7, 1), word(8, 2), word(7+4096, 2), word(7, 2)[:15]} {
		if c.Differs(body); stopped != nil {
			t.Errorf("%v: %v", body, stopped)
			stopped = nil
		}
	}
	if c.Differs(word(7, 2)); !errors.Is(stopped, Err) {
		t.Errorf("it differs, and goes on: %v", stopped)
	}
	if hash, ok := c.Answer(t.Context(), peer.NumberBody(7)); hash != 1 || !ok {
		t.Errorf("answers %d, %v", hash, ok)
	}
	if _, ok := c.Answer(t.Context(), peer.NumberBody(8)); ok {
		t.Error("answers for an entry that it has not seen")
	}
	reached = context.DeadlineExceeded
	if _, ok := c.Answer(t.Context(), peer.NumberBody(7)); ok {
		t.Error("answers for an entry that it has not reached")
	}
}
