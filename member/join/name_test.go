package join

import (
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/join/jointest"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

func TestNameOf(t *testing.T) {
	s := jointest.New()
	for key, v := range map[string]any{
		memberPrefix + "here": Record{ID: "here", Name: "n1"},
		removed + "gone":      Removal{Name: "n2", Removed: time.Now()},
		memberPrefix + "both": Record{ID: "both", Name: "n3"},
		removed + "both":      Removal{Name: "before"},
	} {
		if _, err := s.Txn(t.Context(), mvcc.Txn{Ops: []mvcc.Op{put(key, v)}}); err != nil {
			t.Fatal(err)
		}
	}
	for id, want := range map[string]string{"here": "n1", "gone": "n2", "both": "n3", "unknown": "", "": ""} {
		if got := NameOf(t.Context(), s, id); got != want {
			t.Errorf("%q is called %q, want %q", id, got, want)
		}
	}
}
