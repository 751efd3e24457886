package mvcc

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func (k *ks) deletion(seq uint64, keys ...Compare) Outcome {
	return k.command(Command{Type: CmdDelete, ID: CommandID{9, seq}, Basis: k.index, Delete: Deletion{Keys: keys, Origin: "sweeper"}})
}

// Each key is decided for itself and goes under a revision of its own, so that
// a watcher can go on behind any of them.
func TestDeletion(t *testing.T) {
	k := newKS()
	a, b, c := k.put("/a", "1").Revision, k.put("/b", "2").Revision, k.put("/c", "3").Revision
	k.put("/b", "changed since")
	before := k.Revision()
	out := k.deletion(1, Compare{"/a", a}, Compare{"/absent", 2}, Compare{"/b", b}, Compare{"/c", c})
	if out.Err != nil || !out.Result.Succeeded || out.Result.Revision != before+2 {
		t.Fatalf("%+v", out)
	}
	var got []string
	for _, kv := range out.Result.Previous {
		if kv == nil {
			got = append(got, "stays")
			continue
		}
		got = append(got, kv.Key+"="+string(kv.Value))
	}
	if diff := cmp.Diff([]string{"/a=1", "stays", "stays", "/c=3"}, got); diff != "" {
		t.Error(diff)
	}
	events, through, err := k.Events(before+1, 1)
	if err != nil || through != before+1 || len(events) != 1 || events[0].Type != Delete || events[0].KV.Key != "/a" || string(events[0].Prev.Value) != "1" {
		t.Errorf("first event %+v through %d, %v", events, through, err)
	}
	events, through, err = k.Events(before+2, 10)
	if err != nil || through != before+2 || len(events) != 1 || events[0].KV.Key != "/c" || string(events[0].Prev.Value) != "3" {
		t.Errorf("events from the second deletion on: %+v through %d, %v", events, through, err)
	}
	if h := k.History("/c", 1); len(h.Changes) != 1 || h.Changes[0].Origin != "sweeper" {
		t.Errorf("history: %+v", h)
	}
	if l, _ := k.List(Range{}); len(l.KVs) != 1 || string(l.KVs[0].Value) != "changed since" {
		t.Errorf("left: %+v", l)
	}
}

// A deletion that reaches the log twice gets the same answer, from the history.
func TestDeletionRepeated(t *testing.T) {
	k := newKS()
	var all []Compare
	for i := range 6 {
		key := fmt.Sprint("/k", i)
		all = append(all, Compare{key, k.put(key, key).Revision})
	}
	cmd := func(seq uint64, keys ...Compare) Command {
		return Command{Type: CmdDelete, ID: CommandID{9, seq}, Basis: k.index, Delete: Deletion{Keys: keys}}
	}
	// One of another command, right before: its key has a revision of its own.
	k.command(cmd(1, all[1]))
	some := cmd(2, all[0], Compare{"/k1", 999}, all[2], Compare{"/k3", 999}, all[4])
	first := k.command(some)
	none := cmd(3, Compare{"/k3", 999})
	nothing := k.command(none)
	k.put("/k2", "anew")
	for _, again := range []struct {
		c    Command
		want Outcome
	}{{some, first}, {none, nothing}} {
		got := k.command(again.c)
		if again.want.Duplicate = true; cmp.Diff(again.want, got) != "" {
			t.Errorf("repeated: %s", cmp.Diff(again.want, got))
		}
	}
	if kv, _, _ := k.Get("/k2", 0); kv == nil {
		t.Error("a repeated deletion took effect again")
	}
	k.limit(Limits{HistoryBytes: 1, HistoryAgeMillis: 1 << 40, Window: 100})
	k.put("/x", "")
	if got := k.command(some); !errors.Is(got.Err, ErrForgotten) || !got.Duplicate {
		t.Errorf("beyond the history: %+v", got)
	}
}

func TestDeletionRules(t *testing.T) {
	many := make([]Compare, MaxDeletes+1)
	for i := range many {
		many[i] = Compare{fmt.Sprintf("/%05d", i), 1}
	}
	k := newKS()
	for what, keys := range map[string][]Compare{
		"0 keys":                    nil,
		"1025 keys":                 many,
		"is empty":                  {{"", 1}},
		"has the revision":          {{"/a", 0}},
		"does not come after":       {{"/b", 1}, {"/a", 1}},
		`"/a", does not come after`: {{"/a", 1}, {"/a", 1}},
	} {
		out := k.deletion(1, keys...)
		if !errors.Is(out.Err, ErrInvalid) || !strings.Contains(out.Err.Error(), what) {
			t.Errorf("%s: %v", what, out.Err)
		}
	}
	if out := k.deletion(2, many[:MaxDeletes]...); out.Err != nil {
		t.Errorf("as many as can be: %v", out.Err)
	}
}
