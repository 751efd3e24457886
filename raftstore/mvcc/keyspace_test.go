package mvcc

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// ks is a keyspace with a log that grows by one entry per call.
type ks struct {
	*Keyspace
	index, seq uint64
	now        int64
}

func newKS() *ks { return &ks{Keyspace: New(), now: 1_000_000} }

func (k *ks) command(c Command) Outcome {
	k.index++
	return k.Apply(k.index, Batch{Time: k.now, Commands: []Command{c}})[0]
}

func (k *ks) txn(t Txn) TxnResult {
	k.seq++
	out := k.command(Command{Type: CmdTxn, ID: CommandID{1, k.seq}, Basis: k.index, Txn: t})
	if out.Err != nil {
		panic(out.Err)
	}
	return out.Result
}

func (k *ks) put(key, value string) TxnResult {
	return k.txn(Txn{Ops: []Op{{Type: OpPut, Key: key, Value: []byte(value)}}})
}

func (k *ks) del(key string) TxnResult {
	return k.txn(Txn{Ops: []Op{{Type: OpDelete, Key: key}}})
}

func (k *ks) tick() { k.command(Command{Type: CmdTick}) }

func (k *ks) limit(l Limits) { k.command(Command{Type: CmdLimits, Limits: l}) }

func TestRevisions(t *testing.T) {
	k := newKS()
	if k.Revision() != 1 || k.Oldest() != 1 {
		t.Fatalf("empty: %+v", k.Digest())
	}
	r := k.put("a", "1")
	want := TxnResult{Succeeded: true, Revision: 2, Previous: []*KeyValue{nil}}
	if diff := cmp.Diff(want, r); diff != "" {
		t.Error(diff)
	}
	r = k.put("a", "2")
	first := &KeyValue{Key: "a", Value: []byte("1"), CreateRevision: 2, ModRevision: 2, Version: 1}
	if diff := cmp.Diff(TxnResult{Succeeded: true, Revision: 3, Previous: []*KeyValue{first}}, r); diff != "" {
		t.Error(diff)
	}
	if r := k.del("b"); !r.Succeeded || r.Revision != 3 || k.Revision() != 3 {
		t.Errorf("deleting what is not there: %+v, revision %d", r, k.Revision())
	}
	k.del("a")
	k.put("a", "3")
	kv, rev, err := k.Get("a", 0)
	if err != nil || rev != 5 {
		t.Fatalf("%v, %v", rev, err)
	}
	if diff := cmp.Diff(&KeyValue{Key: "a", Value: []byte("3"), CreateRevision: 5, ModRevision: 5, Version: 1}, kv); diff != "" {
		t.Errorf("created again: %s", diff)
	}
	for rev, value := range map[int64]string{1: "", 2: "1", 3: "2", 4: "", 5: "3"} {
		kv, _, err := k.Get("a", rev)
		if err != nil || (kv == nil) != (value == "") || (kv != nil && string(kv.Value) != value) {
			t.Errorf("at %d: %+v, %v; want %q", rev, kv, err, value)
		}
	}
	var future *FutureRevisionError
	if _, _, err := k.Get("a", 6); !errors.As(err, &future) || !errors.Is(err, ErrFutureRevision) || future.Current != 5 {
		t.Errorf("future: %v", err)
	}
}

func TestCompare(t *testing.T) {
	k := newKS()
	k.put("a", "1")
	k.put("b", "1")
	create := Txn{Compares: []Compare{{"a", 0}}, Ops: []Op{{Type: OpPut, Key: "a", Value: []byte("x")}}}
	r := k.txn(create)
	if r.Succeeded || r.Revision != 3 || r.Current[0].ModRevision != 2 {
		t.Errorf("create over an existing key: %+v", r)
	}
	// All or nothing, over several keys, in one revision.
	r = k.txn(Txn{
		Compares: []Compare{{"a", 2}, {"b", 3}, {"c", 0}},
		Ops:      []Op{{Type: OpPut, Key: "c"}, {Type: OpDelete, Key: "a"}, {Type: OpPut, Key: "b", Value: []byte("2")}},
	})
	if !r.Succeeded || r.Revision != 4 || r.Previous[0] != nil || r.Previous[1].ModRevision != 2 || r.Previous[2].ModRevision != 3 {
		t.Errorf("%+v", r)
	}
	events, through, err := k.Events(4, 1)
	if err != nil || through != 4 || len(events) != 3 {
		t.Errorf("a revision was split: %v through %d, %v", events, through, err)
	}
	r = k.txn(Txn{Compares: []Compare{{"c", 4}, {"b", 3}}, Ops: []Op{{Type: OpDelete, Key: "c"}}})
	if r.Succeeded || k.Revision() != 4 || r.Current[0].ModRevision != 4 || r.Current[1].ModRevision != 4 {
		t.Errorf("half a match: %+v", r)
	}
}

func TestValidate(t *testing.T) {
	many := make([]Op, 20)
	for i := range many {
		many[i] = Op{Type: OpPut, Key: string(rune('a' + i))}
	}
	twice := append(append([]Op(nil), many...), Op{Type: OpDelete, Key: "c"})
	for name, tc := range map[string]struct {
		txn Txn
		ok  bool
	}{
		"empty":             {Txn{}, true},
		"many":              {Txn{Ops: many}, true},
		"many, one twice":   {Txn{Ops: twice}, false},
		"twice":             {Txn{Ops: []Op{{Type: OpPut, Key: "a"}, {Type: OpPut, Key: "a"}}}, false},
		"no key":            {Txn{Ops: []Op{{Type: OpPut}}}, false},
		"no type":           {Txn{Ops: []Op{{Key: "a"}}}, false},
		"negative TTL":      {Txn{Ops: []Op{{Type: OpPut, Key: "a", TTL: -1}}}, false},
		"endless TTL":       {Txn{Ops: []Op{{Type: OpPut, Key: "a", TTL: 1 << 62}}}, false},
		"compare no key":    {Txn{Compares: []Compare{{}}}, false},
		"negative revision": {Txn{Compares: []Compare{{"a", -1}}}, false},
	} {
		if err := tc.txn.Validate(); (err == nil) != tc.ok || (err != nil && !errors.Is(err, ErrInvalid)) {
			t.Errorf("%s: %v", name, err)
		}
		k := newKS()
		if out := k.command(Command{Type: CmdTxn, ID: CommandID{1, 1}, Txn: tc.txn}); (out.Err == nil) != tc.ok {
			t.Errorf("%s applied: %v", name, out.Err)
		}
	}
}

// A command that reaches the log twice is decided once, whatever came between.
func TestRepeatedCommand(t *testing.T) {
	k := newKS()
	k.put("a", "0")
	cmd := Command{Type: CmdTxn, ID: CommandID{7, 1}, Basis: k.index, Txn: Txn{
		Compares: []Compare{{"a", 2}}, Ops: []Op{{Type: OpPut, Key: "a", Value: []byte("1")}},
	}}
	first := k.command(cmd)
	k.put("a", "2")
	again := k.command(cmd)
	if !again.Duplicate || k.Revision() != 4 {
		t.Fatalf("%+v at %d", again, k.Revision())
	}
	if diff := cmp.Diff(first.Result, again.Result); diff != "" {
		t.Errorf("another answer: %s", diff)
	}

	// A comparison that failed stays failed, even when it would hold now.
	fails := Command{Type: CmdTxn, ID: CommandID{7, 2}, Basis: k.index, Txn: Txn{
		Compares: []Compare{{"b", 0}, {"a", 0}}, Ops: []Op{{Type: OpPut, Key: "b"}},
	}}
	refused := k.command(fails)
	if refused.Result.Succeeded {
		t.Fatal("succeeded")
	}
	k.del("a")
	out := k.command(fails)
	if out.Result.Succeeded || !out.Duplicate {
		t.Errorf("a failed comparison succeeded later: %+v", out)
	}
	// The answer shows what it met, not the present, which would satisfy it.
	if diff := cmp.Diff(refused.Result, out.Result); diff != "" {
		t.Errorf("a repeated refusal: %s", diff)
	}

	// One that changed nothing must not return what another changed.
	k.put("c", "1")
	nothing := Command{Type: CmdTxn, ID: CommandID{7, 3}, Basis: k.index, Txn: Txn{Ops: []Op{{Type: OpDelete, Key: "c"}}}}
	k.del("c")
	k.command(nothing)
	if out := k.command(nothing); out.Result.Previous[0] != nil {
		t.Errorf("it returned %+v", out.Result.Previous[0])
	}

	// Older than the window: refused, and never applied.
	k.limit(Limits{HistoryBytes: 1 << 20, HistoryAgeMillis: 1 << 40, Window: 2})
	late := Command{Type: CmdTxn, ID: CommandID{7, 9}, Basis: 1, Txn: Txn{Ops: []Op{{Type: OpPut, Key: "late"}}}}
	for range 5 {
		k.put("x", "")
	}
	if out := k.command(late); !errors.Is(out.Err, ErrExpired) {
		t.Errorf("late: %+v", out)
	}
	if out := k.command(cmd); !errors.Is(out.Err, ErrExpired) {
		t.Errorf("left the window: %+v", out)
	}

	// Applied, but what it replaced is forgotten.
	last := Command{Type: CmdTxn, ID: CommandID{7, 10}, Basis: k.index, Txn: Txn{Ops: []Op{{Type: OpPut, Key: "y"}}}}
	k.command(last)
	k.limit(Limits{HistoryBytes: 0, HistoryAgeMillis: 1 << 40, Window: 2})
	if out := k.command(last); !errors.Is(out.Err, ErrForgotten) {
		t.Errorf("forgotten: %+v", out)
	}
}

func TestExpiry(t *testing.T) {
	k := newKS()
	ttl := func(key string, s int64) {
		k.txn(Txn{Ops: []Op{{Type: OpPut, Key: key, TTL: s}}})
	}
	ttl("a", 10)
	ttl("b", 5)
	ttl("c", 5)
	ttl("kept", 5)
	k.put("kept", "for ever now")
	ttl("renewed", 5)
	ttl("renewed", 20)
	ttl("gone", 5)
	k.del("gone")
	rev := k.Revision()
	k.now += 4_999
	if k.Due(k.now) {
		t.Error("due too early")
	}
	k.tick()
	if k.Revision() != rev {
		t.Error("expired too early")
	}
	k.now++
	if !k.Due(k.now) {
		t.Error("not due")
	}
	k.tick()
	events, _, _ := k.Events(rev+1, 100)
	if len(events) != 2 || events[0].KV.Key != "b" || events[1].KV.Key != "c" || events[0].Type != Delete || events[0].Prev == nil {
		t.Errorf("%+v", events)
	}
	if k.Revision() != rev+1 {
		t.Errorf("%d revisions for one tick", k.Revision()-rev)
	}
	k.now -= 3_600_000 // a leader whose clock is behind
	k.put("z", "")
	if k.Time() != 1_005_000 {
		t.Errorf("store time went back to %d", k.Time())
	}
	k.now = 1_020_000
	k.tick()
	if l, _ := k.List(Range{}); l.Count != 2 {
		t.Errorf("left over: %+v", l)
	}
	if k.Due(1<<40) != true {
		t.Error("history never ages")
	}
}

func TestList(t *testing.T) {
	k := newKS()
	for _, key := range []string{"/a/1", "/a/2", "/a/3", "/ab", "/b/1"} {
		k.put(key, key)
	}
	k.del("/a/2")
	keys := func(l Listing) (out []string) {
		for _, kv := range l.KVs {
			out = append(out, kv.Key)
		}
		return out
	}
	for name, tc := range map[string]struct {
		r     Range
		keys  []string
		more  bool
		count int64
	}{
		"all":            {Range{}, []string{"/a/1", "/a/3", "/ab", "/b/1"}, false, 4},
		"prefix":         {Range{Prefix: "/a/"}, []string{"/a/1", "/a/3"}, false, 2},
		"limit":          {Range{Prefix: "/a/", Limit: 1}, []string{"/a/1"}, true, 2},
		"limit reached":  {Range{Prefix: "/a/", Limit: 2}, []string{"/a/1", "/a/3"}, false, 2},
		"from":           {Range{Prefix: "/a/", From: "/a/1\x00"}, []string{"/a/3"}, false, 1},
		"from before":    {Range{Prefix: "/a/", From: "/"}, []string{"/a/1", "/a/3"}, false, 2},
		"from behind":    {Range{Prefix: "/a/", From: "/b"}, nil, false, 0},
		"count":          {Range{Prefix: "/a", CountOnly: true}, nil, false, 3},
		"at":             {Range{Prefix: "/a/", Revision: 4}, []string{"/a/1", "/a/2", "/a/3"}, false, 3},
		"before it all":  {Range{Revision: 1}, nil, false, 0},
		"no such prefix": {Range{Prefix: "/zz"}, nil, false, 0},
	} {
		l, err := k.List(tc.r)
		if err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if diff := cmp.Diff(tc.keys, keys(l)); diff != "" || l.More != tc.more || l.Count != tc.count {
			t.Errorf("%s: %+v %s", name, l, diff)
		}
	}
}

func TestHistoryIsBounded(t *testing.T) {
	k := newKS()
	k.limit(Limits{HistoryBytes: 10 * (versionOverhead + 3), HistoryAgeMillis: 60_000, Window: 100})
	for range 100 {
		k.put("a", "xx")
	}
	if got := k.Revision() - k.Oldest(); got != 10 {
		t.Errorf("%d revisions in history", got)
	}
	var compacted *CompactedError
	for _, err := range []error{
		func() error { _, _, err := k.Get("a", 90); return err }(),
		func() error { _, err := k.List(Range{Revision: 90}); return err }(),
		func() error { _, _, err := k.Events(91, 1); return err }(),
	} {
		if !errors.As(err, &compacted) || !errors.Is(err, ErrCompacted) || compacted.Oldest != 91 {
			t.Errorf("%v", err)
		}
	}
	if kv, _, err := k.Get("a", 91); err != nil || kv.ModRevision != 91 {
		t.Errorf("oldest readable: %+v, %v", kv, err)
	}
	k.now += 60_001
	k.tick()
	if k.Oldest() != k.Revision() || k.Digest().HistoryBytes != 0 {
		t.Errorf("after its age: %+v", k.Digest())
	}
	if kv, _, err := k.Get("a", 0); err != nil || kv == nil {
		t.Errorf("the present aged too: %v, %v", kv, err)
	}
	k.del("a")
	if k.tree.Len() != 1 {
		t.Error("the deletion is not in history")
	}
	k.now += 60_001
	k.tick()
	if k.tree.Len() != 0 {
		t.Error("a deleted key stays in memory")
	}
}
