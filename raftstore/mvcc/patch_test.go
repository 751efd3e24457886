package mvcc

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

const filler = " and what stays as it is, which is a good deal more than what changes: "

// A keyspace that gets patches and one that gets the whole values are the same
// after each entry; a patch that is wrong changes neither, and its command is not
// remembered.
func TestRandomPatches(t *testing.T) {
	for seed := range uint64(20) {
		r := rand.New(rand.NewPCG(seed, 9))
		patched, whole := New(), New()
		var repeat *Command
		kinds := map[string]int{}
		for i := range 300 {
			c := Command{Type: CmdTxn, ID: CommandID{1, uint64(i)}, Basis: uint64(max(0, i-5)), Txn: Txn{Origin: "a"}}
			key := fmt.Sprintf("/k/%d", r.IntN(5))
			op := Op{Type: OpPut, Key: key, Value: fmt.Appendf(nil, "%d%s%d", r.IntN(1000), filler, r.IntN(3)), TTL: int64(r.IntN(2) * 50)}
			cmpr := Compare{Key: key}
			if kv, _, _ := patched.Get(key, 0); kv != nil {
				cmpr.ModRevision = kv.ModRevision
			}
			short := op
			if short.Patch = patched.Patch(key, cmpr.ModRevision, op.Value); short.Patch != nil {
				short.Value = nil
			}
			kind := "whole"
			if short.Patch != nil {
				kind = "patch"
				switch r.IntN(8) {
				case 0:
					cmpr.ModRevision--
					kind = "fails"
				case 1:
					short.Patch.Sum++
					kind = "wrong"
				case 2:
					short.Patch.Bytes = short.Patch.Bytes[:1]
					kind = "wrong"
				case 3:
					short.Patch.Size++
					kind = "wrong"
				}
			}
			kinds[kind]++
			c.Txn.Compares = []Compare{cmpr}
			shortC := c
			c.Txn.Ops, shortC.Txn.Ops = []Op{op}, []Op{short}
			a, b := Batch{Time: int64(i) * 700}, Batch{Time: int64(i) * 700}
			if repeat != nil && r.IntN(4) == 0 { // a command comes a second time
				a.Commands, b.Commands = append(a.Commands, *repeat), append(b.Commands, *repeat)
			}
			a.Commands = append(a.Commands, shortC)
			if kind != "wrong" {
				b.Commands = append(b.Commands, c)
			}
			if kind == "patch" {
				repeat = &shortC
			}
			outs, want := patched.Apply(uint64(i+1), a), whole.Apply(uint64(i+1), b)
			if kind == "wrong" {
				last := outs[len(outs)-1]
				if !errors.Is(last.Err, ErrPatch) || last.Result.Succeeded {
					t.Fatalf("seed %d, %d: a wrong patch: %+v", seed, i, last)
				}
				outs = outs[:len(outs)-1]
			}
			if diff := cmp.Diff(want, outs, cmp.Comparer(func(a, b error) bool { return fmt.Sprint(a) == fmt.Sprint(b) })); diff != "" {
				t.Fatalf("seed %d, %d (%s): %s", seed, i, kind, diff)
			}
			if patched.Digest() != whole.Digest() {
				t.Fatalf("seed %d, %d (%s): %+v and %+v", seed, i, kind, patched.Digest(), whole.Digest())
			}
			if r.IntN(50) == 0 {
				patched = rebuilt(t, patched)
			}
		}
		for _, kind := range []string{"whole", "patch", "fails", "wrong"} {
			if kinds[kind] == 0 {
				t.Errorf("seed %d: %v", seed, kinds)
			}
		}
	}
}

func TestPatchNeedsComparison(t *testing.T) {
	k := newKS()
	value := []byte("1" + filler + "1")
	res := k.txn(Txn{Ops: []Op{{Type: OpPut, Key: "/a", Value: value}}})
	p := k.Patch("/a", res.Revision, []byte("2"+filler+"1"))
	if p == nil {
		t.Fatal("no patch")
	}
	for what, txn := range map[string]Txn{
		"no comparison":     {Ops: []Op{{Type: OpPut, Key: "/a", Patch: p}}},
		"another key":       {Compares: []Compare{{"/b", 3}}, Ops: []Op{{Type: OpPut, Key: "/a", Patch: p}}},
		"of what is absent": {Compares: []Compare{{"/a", 0}}, Ops: []Op{{Type: OpPut, Key: "/a", Patch: p}}},
		"of a deletion":     {Compares: []Compare{{"/a", res.Revision}}, Ops: []Op{{Type: OpDelete, Key: "/a", Patch: p}}},
	} {
		if err := txn.Validate(); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for what, got := range map[string]*Patch{
		"another revision": k.Patch("/a", res.Revision-1, value),
		"an absent key":    k.Patch("/b", 0, value),
		"a short value":    k.Patch("/a", res.Revision, []byte("short")),
		"nothing alike":    k.Patch("/a", res.Revision, []byte(strings.Repeat("0123456789", 20))),
	} {
		if got != nil {
			t.Errorf("%s: %+v", what, got)
		}
	}
	txn := Txn{Compares: []Compare{{"/a", res.Revision}}, Ops: []Op{{Type: OpPut, Key: "/a", Patch: p}}}
	if n, whole := txn.HistoryBytes(), (&Txn{Ops: []Op{{Type: OpPut, Key: "/a", Value: value}}}).HistoryBytes(); n != whole {
		t.Errorf("it takes %d bytes of the history, whole %d", n, whole)
	}
}

// A value that changed in memory is no base: its maker takes the whole value
// instead of a patch, and a member that meets it in Apply stops before anything is
// shown.
func TestPatchOfChangedMemory(t *testing.T) {
	k := newKS()
	res := k.txn(Txn{Ops: []Op{{Type: OpPut, Key: "/a", Value: []byte("1" + filler + "1")}}})
	value := []byte("2" + filler + "1")
	p := k.Patch("/a", res.Revision, value)
	kv, _, _ := k.Get("/a", 0)
	kv.Value[5] ^= 4
	if k.Patch("/a", res.Revision, value) != nil {
		t.Error("a patch was made of it")
	}
	defer func() {
		if r := recover(); r == nil || !strings.Contains(fmt.Sprint(r), "changed in memory") {
			t.Errorf("Apply went on: %v", r)
		}
		if k.Revision() != res.Revision {
			t.Errorf("revision %d", k.Revision())
		}
	}()
	k.txn(Txn{Compares: []Compare{{"/a", res.Revision}}, Ops: []Op{{Type: OpPut, Key: "/a", Patch: p}}})
}
