package capability

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/clusterd/clusterd/raftstore/peer"
)

// fakeMembers answer at once with the number that they have; what is asked of
// those without one is kept in late.
type fakeMembers struct {
	newest map[string]uint64
	asked  map[string]int
	late   []peer.ReplyFunc
}

func (f *fakeMembers) Call(id string, kind byte, _ []byte, reply peer.ReplyFunc) uint64 {
	f.asked[id]++
	n, ok := f.newest[id]
	switch {
	case kind != peer.KindSpeaks:
		reply(peer.Frame{}, false, errors.New("another question"))
	case !ok:
		f.late = append(f.late, reply)
	case n == 0: // older than the question
		reply(peer.Frame{Kind: peer.KindDone}, true, nil)
	default:
		reply(peer.Frame{Kind: peer.KindNumber, Body: peer.NumberBody(n)}, true, nil)
	}
	return 0
}

func TestAll(t *testing.T) {
	// A deadline that has passed beside an answer that has come would be drawn for.
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		m := &fakeMembers{newest: map[string]uint64{"a": 5, "b": 6, "old": 0, "four": 4}, asked: make(map[string]int)}
		k := New(m)
		for _, tc := range []struct {
			what string
			ids  []string
			want bool
		}{
			{"no other member", nil, true},
			{"all new", []string{"a", "b"}, true},
			{"one older than the question", []string{"a", "old"}, false},
			{"one that knows less", []string{"a", "four"}, false},
			{"one that does not answer", []string{"a", "away"}, false},
			{"all new, again", []string{"a", "b"}, true},
			{"older, again", []string{"a", "old", "four", "away"}, false},
		} {
			if got := k.All(ctx, tc.ids, 5); got != tc.want {
				t.Errorf("%s: %t", tc.what, got)
			}
		}
		for id, n := range m.asked {
			if n != 1 {
				t.Errorf("%s was asked %d times", id, n)
			}
		}

		// A number above what was said before is asked for again.
		m.newest["a"] = 7
		if k.All(ctx, []string{"a"}, 8) || !k.All(ctx, []string{"a"}, 7) || m.asked["a"] != 2 {
			t.Errorf("a was asked %d times", m.asked["a"])
		}
		// An answer that comes late counts.
		m.late[0](peer.Frame{Kind: peer.KindNumber, Body: peer.NumberBody(5)}, true, nil)
		if !k.All(ctx, []string{"away"}, 5) {
			t.Error("an answer came too late to count")
		}
		// A member that was older is asked again after the pause.
		time.Sleep(pause)
		m.newest["old"] = 5
		if !k.All(ctx, []string{"old"}, 5) {
			t.Error("a renewed member was not asked again")
		}
	})
}

func TestAllLostStream(t *testing.T) {
	m := &fakeMembers{newest: map[string]uint64{}, asked: make(map[string]int)}
	k := New(m)
	k.timeout = time.Hour
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if k.All(ctx, []string{"a"}, 5) || len(m.late) != 1 {
		t.Fatalf("a context that is over: %d asked", len(m.late))
	}
	m.late[0](peer.Frame{}, false, peer.ErrStreamLost)
	if k.All(context.Background(), []string{"a"}, 5) {
		t.Error("a lost stream counted as an answer")
	}
	if len(m.late) != 1 {
		t.Error("who could not be reached was asked again at once")
	}
}
