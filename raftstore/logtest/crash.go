package logtest

import (
	"bytes"
	"fmt"
	"math/rand/v2"

	"github.com/hashicorp/raft"
)

// Model knows what a log may hold.
type Model struct {
	term, next uint64
	has        []*raft.Log // acknowledged, in order; those before low may be gone
	low        uint64      // first index that must be there
	// Of the operation that a crash may have interrupted: the log may end
	// earlier, down to keep entries; or go on with these; or be empty.
	keep   int
	under  []*raft.Log
	torn   int // size of the first of an append that was interrupted; -1: none was
	made   byte
	marked bool // the last operation was Mark
}

func (m *Model) settle(has []*raft.Log) {
	m.has, m.under, m.keep = has, nil, len(has)
}

// crashSizes are few, so that records of different appends end at the same
// places.
var crashSizes = []int{0, 8, 100, 456, 456, 456, 968, 968, 2000, 4000}

// Step does one operation, as raft might.
func (m *Model) Step(rng *rand.Rand, l Log) error {
	m.settle(m.has)
	op := rng.IntN(12)
	if m.torn >= 0 || m.marked {
		op = 0 // what is interesting is what comes next
	}
	m.marked = false
	switch {
	case op < 7:
		var es []*raft.Log
		size, n := crashSizes[rng.IntN(len(crashSizes))], 1+rng.IntN(4)
		if m.torn >= 0 && rng.IntN(2) == 0 {
			size, n = m.torn, 1 // in the place of the one that was torn
		}
		m.torn = size
		for range n {
			e := Entry(m.next+uint64(len(es)), m.term, size)
			if m.made++; size > 0 {
				e.Data[0] = m.made // no two are alike
			}
			es = append(es, e)
			if rng.IntN(2) == 0 {
				size = crashSizes[rng.IntN(len(crashSizes))]
			}
		}
		if len(m.has) == 0 {
			m.low = m.next
		}
		m.under = es
		if err := l.StoreLogs(es); err != nil {
			return err
		}
		m.next += uint64(len(es))
		m.torn = -1
		m.settle(append(m.has, es...))
	case op < 9:
		m.marked = true
		return l.Mark()
	case op == 9 && len(m.has) > 1: // a conflict with a new leader
		at := 1 + rng.IntN(len(m.has)-1)
		if m.has[at].Index <= m.low {
			return nil
		}
		m.keep = at
		m.term++
		if err := l.DeleteRange(m.has[at].Index, m.next-1); err != nil {
			return err
		}
		m.next = m.has[at].Index
		m.settle(m.has[:at])
	case op == 10 && len(m.has) > 1: // a snapshot was taken
		at := rng.IntN(len(m.has) - 1)
		if m.has[at].Index < m.low {
			return nil
		}
		from, _ := l.FirstIndex()
		m.low = m.has[at+1].Index
		return l.DeleteRange(from, m.has[at].Index)
	case op == 11 && len(m.has) > 0 && rng.IntN(3) == 0: // a snapshot was installed
		m.keep = 0
		from, _ := l.FirstIndex()
		if err := l.DeleteRange(from, m.next-1); err != nil {
			return err
		}
		m.next += uint64(rng.IntN(1000))
		m.term++
		m.settle(nil)
	}
	return nil
}

// Found compares a log that was opened after a crash, and takes what it holds
// for the truth from then on.
func (m *Model) Found(l Log) error {
	first, _ := l.FirstIndex()
	last, _ := l.LastIndex()
	known := append(append([]*raft.Log(nil), m.has...), m.under...)
	if last == 0 {
		if m.keep > 0 {
			return fmt.Errorf("it is empty, and %d entries from %d on were acknowledged", m.keep, m.low)
		}
		m.settle(nil)
		return nil
	}
	if len(known) == 0 {
		return fmt.Errorf("it holds %d to %d, and nothing was appended", first, last)
	}
	base := known[0].Index
	var has []*raft.Log
	if first > base {
		has = append(has, known[:first-base]...)
	}
	for i := first; i <= last; i++ {
		var got raft.Log
		if err := l.GetLog(i, &got); err != nil {
			return err
		}
		if i < base || i-base >= uint64(len(known)) {
			return fmt.Errorf("it holds entry %d of term %d, which was not appended behind what is before it", i, got.Term)
		}
		if want := known[i-base]; got.Term != want.Term || got.Index != i || !bytes.Equal(got.Data, want.Data) {
			return fmt.Errorf("entry %d of term %d and %d bytes is one of term %d and %d bytes", i, want.Term, len(want.Data), got.Term, len(got.Data))
		}
		has = append(has, known[i-base])
	}
	if len(has) < m.keep {
		return fmt.Errorf("it ends at %d, and entry %d was acknowledged", last, known[m.keep-1].Index)
	}
	if first > m.low {
		return fmt.Errorf("it begins at %d, and entry %d was acknowledged", first, m.low)
	}
	m.next = last + 1
	if m.low > last {
		m.low = last
	}
	m.settle(has)
	return nil
}

// NewModel is of an empty log.
func NewModel() *Model { return &Model{term: 1, next: 1, torn: -1} }

// AfterMark reports whether the last operation was Mark.
func (m *Model) AfterMark() bool { return m.marked }

// AfterTorn reports whether the last append was interrupted.
func (m *Model) AfterTorn() bool { return m.torn >= 0 }
