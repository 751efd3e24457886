package mvcc

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

// pages reads a folder page by page at a revision (0: the present, as the
// first page finds it), and between is called after each page. It checks that
// each page tells how many keys there are from its beginning on.
func pages(t *testing.T, k *Keyspace, prefix string, limit int, rev int64, between func()) (looked []int) {
	t.Helper()
	if rev == 0 {
		rev = k.Revision()
	}
	all, err := k.List(Range{Prefix: prefix, Revision: rev})
	if err != nil {
		t.Fatal(err)
	}
	left, from := len(all.KVs), ""
	for {
		l, n, err := k.list(Range{Prefix: prefix, From: from, Limit: limit, Revision: rev})
		if err != nil {
			t.Fatal(err)
		}
		looked = append(looked, n)
		if l.Count != int64(left) || l.More != (left > len(l.KVs)) {
			t.Fatalf("a page from %q at revision %d: %d keys and more=%v of %d, %d are left", from, rev, len(l.KVs), l.More, l.Count, left)
		}
		left -= len(l.KVs)
		if !l.More {
			return looked
		}
		from = l.KVs[len(l.KVs)-1].Key + "\x00"
		between()
	}
}

// A page looks at no more keys than it returns and the one behind it, from the
// first page of a folder to its last, while its objects change and go, and
// while a list before it is not finished.
func TestPageCostsWhatItReturns(t *testing.T) {
	const keys, limit = 1000, 10
	k := newKS()
	for i := range keys {
		k.put(fmt.Sprintf("/registry/pods/ns/%04d", i), "1")
		k.put(fmt.Sprintf("/registry/leases/%04d", i), "1")
	}
	n := 0
	looked := pages(t, k.Keyspace, "/registry/pods/", limit, 0, func() {
		n++
		k.put(fmt.Sprintf("/registry/pods/ns/%04d", n), "2")   // behind the list, or before it
		k.put(fmt.Sprintf("/registry/pods/ns/%04d", 999), "2") // not read yet
		k.put(fmt.Sprint("/registry/leases/new-", n), "1")
		k.del(fmt.Sprintf("/registry/pods/ns/%04d", 2*n))
	})
	if len(looked) != keys/limit {
		t.Errorf("%d pages", len(looked))
	}
	for i, n := range looked {
		if n > limit+1 {
			t.Fatalf("page %d looked at %d keys to return %d", i, n, limit)
		}
	}
	if l, n, err := k.list(Range{Prefix: "/registry/leases/", CountOnly: true}); err != nil || n > 0 || l.Count != int64(keys+len(looked)-1) {
		t.Errorf("counted %d, looked at %d: %v", l.Count, n, err)
	}
	// Where the count is not known and not wanted, too.
	if l, n, err := k.list(Range{Prefix: "/registry/p", Limit: limit, NoCount: true}); err != nil || n > limit+1 || !l.More {
		t.Errorf("looked at %d keys, more=%v: %v", n, l.More, err)
	}
}

// Counts are right at every revision that can be read, whatever came and went
// since, with more lists under way than are remembered, and after a restore.
func TestCountsOfPages(t *testing.T) {
	for seed := range uint64(8) {
		r := rand.New(rand.NewPCG(seed, 1))
		k := New()
		for i, b := range randomBatches(r, 300) {
			k.Apply(uint64(i+1), b)
			if i%10 != 0 {
				continue
			}
			for _, prefix := range []string{"", "/", "/a/", "/b", "/b/", "/none/"} {
				rev := k.Oldest() + r.Int64N(k.Revision()-k.Oldest()+1)
				pages(t, k, prefix, 1+r.IntN(4), rev, func() {})
				pages(t, k, prefix, 1+r.IntN(4), 0, func() {})
			}
		}
		again := rebuilt(t, k)
		for rev := again.Oldest(); rev <= again.Revision(); rev++ {
			pages(t, again, "/a/", 2, rev, func() {})
		}
	}
	var s rests
	for i := range int64(3 * maxRests) {
		s.note(rest{i, "/a/", "/a/1"}, i)
	}
	if len(s.by) != maxRests || len(s.ring) != maxRests {
		t.Errorf("%d and %d lists are remembered", len(s.by), len(s.ring))
	}
	if n, ok := s.find(rest{3*maxRests - 1, "/a/", "/a/1"}); !ok || n != 3*maxRests-1 {
		t.Errorf("the latest list: %d, %v", n, ok)
	}
}

// BenchmarkPage reads pages of 500 from 300 000 keys: the first one, and one
// from the middle that this member has not served the page before.
func BenchmarkPage(b *testing.B) {
	k := newKS()
	value := strings.Repeat("x", 16)
	for i := range 3000 {
		var t Txn
		for j := range 100 {
			t.Ops = append(t.Ops, Op{Type: OpPut, Key: fmt.Sprintf("/registry/pods/ns/%06d", 100*i+j), Value: []byte(value)})
		}
		k.txn(t)
	}
	for name, r := range map[string]Range{
		"first":     {Prefix: "/registry/pods/", Limit: 500},
		"foreign":   {Prefix: "/registry/pods/", Limit: 500, From: "/registry/pods/ns/150000"},
		"uncounted": {Prefix: "/registry/pods/", Limit: 500, From: "/registry/pods/ns/150000", NoCount: true},
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				if l, err := k.List(r); err != nil || len(l.KVs) != 500 {
					b.Fatal(len(l.KVs), err)
				}
			}
		})
	}
}
