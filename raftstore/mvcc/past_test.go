package mvcc

import (
	"errors"
	"strings"
	"testing"
)

func TestRevisionAt(t *testing.T) {
	k := newKS()
	at := func(millis, want int64) {
		t.Helper()
		if rev, err := k.RevisionAt(millis); err != nil || rev != want {
			t.Errorf("at %d: %d, %v; want %d", millis, rev, err, want)
		}
	}
	before := func(millis int64) {
		t.Helper()
		var early *TimeCompactedError
		if _, err := k.RevisionAt(millis); !errors.As(err, &early) || !errors.Is(err, ErrCompacted) || !strings.Contains(err.Error(), "oldest revision is") {
			t.Errorf("at %d: %v", millis, err)
		}
	}
	k.limit(Limits{HistoryBytes: 1 << 30, HistoryAgeMillis: 60_000, Window: 100})
	start := k.now
	k.put("a", "1") // 2
	k.now += 1000
	k.put("a", "2") // 3
	k.put("b", "1") // 4, in the same millisecond
	before(start - 1)
	at(start, 2)
	at(start+999, 2)
	at(start+1000, 4)
	at(start+1_000_000, 4)

	k.now = start + 60_500 // the first change leaves
	k.put("a", "3")        // 5
	before(start - 1)
	at(start, 2) // nothing changed between it and the next: still known
	at(start+1000, 4)

	k.now = start + 1_000_000 // all leave
	k.tick()
	before(start + 60_000)
	at(start+60_500, 5)
	at(k.now, 5)
	if e := k.Extent(); e.Oldest != 5 || e.OldestTime != start+60_500 || e.NewestTime != k.now {
		t.Errorf("%+v", e)
	}

	// After a restore the time of the oldest revision is not known any more:
	// then it is the snapshot's.
	r := rebuilt(t, k.Keyspace)
	if rev, err := r.RevisionAt(k.now); err != nil || rev != 5 {
		t.Errorf("restored: %d, %v", rev, err)
	}
	if _, err := r.RevisionAt(k.now - 1); !errors.Is(err, ErrCompacted) {
		t.Errorf("restored, before its snapshot: %v", err)
	}
}

// A deleted key's history shows the deletion and outlives it.
func TestHistoryOfADeletedKey(t *testing.T) {
	k := newKS()
	k.txn(Txn{Origin: "ann", Ops: []Op{{Type: OpPut, Key: "a", Value: []byte("1"), TTL: 5}}})
	k.txn(Txn{Origin: "bob", Ops: []Op{{Type: OpDelete, Key: "a"}}})
	k.txn(Txn{Origin: "cy", Ops: []Op{{Type: OpPut, Key: "a", Value: []byte("2"), TTL: 5}}})
	k.now += 5000
	k.tick()
	var story []string
	h := k.History("a", 0)
	for _, c := range h.Changes {
		story = append(story, map[EventType]string{Put: "put", Delete: "delete"}[c.Type]+" by "+c.Origin)
	}
	if got, want := strings.Join(story, ", "), "put by ann, delete by bob, put by cy, delete by expiry"; got != want || h.Base != nil || h.More {
		t.Errorf("%s; %+v", got, h)
	}
	if h := k.History("never", 0); len(h.Changes) != 0 || h.Base != nil || h.Extent != k.Extent() {
		t.Errorf("a key that never was: %+v", h)
	}
}

func TestFoldersForgetWhatIsEmpty(t *testing.T) {
	k := newKS()
	k.put("/r/pods/ns/a", "12345")
	k.put("/r/pods/ns/a", "1")
	k.put("/r/pods/other/b", "1")
	if got := k.Folder("/r/pods/ns/"); got != (Use{1, 13}) {
		t.Errorf("%+v", got)
	}
	if got := k.Size("/r/pods/ns/a"); got != 13 || k.Size("/r/pods/ns/") != 0 {
		t.Errorf("size %d", got)
	}
	k.del("/r/pods/ns/a")
	k.del("/r/pods/other/b")
	if all := k.Folders(); len(all) != 0 {
		t.Errorf("left: %v", all)
	}
}
