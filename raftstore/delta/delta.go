// Package delta says what a value has that the one before it has not, as a patch:
// pieces to copy from the one before, and bytes between them. It is a function of
// values alone. What it writes is in raft's log and described in ../formats.md.
package delta

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math/bits"
)

// ErrPatch is returned by Expand for a patch that cannot be applied to its base.
var ErrPatch = errors.New("patch does not fit its base")

const (
	// minCopy is the shortest piece that is copied: to name it takes 2 to 6 bytes.
	minCopy = 8
	// step is the distance of the places of a base that are looked up.
	step = 4
	// maxSearched bounds the part of a value, between what it has in common with its
	// base at both ends, in which pieces are looked for, and how far from there they
	// are: all writes pay for the search.
	maxSearched = 64 << 10

	tableBits = 11
)

// Make returns a patch that makes target of base; nil if none was found that takes
// less than half of target. It takes time in proportion to both, and none of it
// depends on anything but them.
func Make(base, target []byte) []byte {
	m := maker{base: base, target: target, most: len(target) / 2}
	head := commonHead(base, target)
	tail := commonTail(base[head:], target[head:])
	if head < minCopy {
		head = 0
	}
	if tail < minCopy {
		tail = 0
	}
	m.copies(0, 0, head)
	if end := len(target) - tail; end-head <= maxSearched && len(base) <= 1<<31-1 {
		m.search(head, end)
	}
	m.copies(len(base)-tail, len(target)-tail, tail)
	if m.literal(len(target)); len(m.patch) > m.most || len(target) > bound(base, m.patch) {
		return nil
	}
	return m.patch
}

// bound is the most that a patch may make of its base, so that few bytes cannot
// become anything. It is part of the meaning of the log.
func bound(base, patch []byte) int { return 2*len(base) + len(patch) }

type maker struct {
	base, target []byte
	most         int
	patch        []byte
	done         int // of target
	at           int // in base, behind the last piece copied
}

// copies notes that n bytes of target from to are those of base from from.
func (m *maker) copies(from, to, n int) {
	if n == 0 {
		return
	}
	m.literal(to)
	m.patch = binary.AppendUvarint(m.patch, uint64(n))
	m.patch = binary.AppendVarint(m.patch, int64(from-m.at))
	m.done, m.at = to+n, from+n
}

// literal writes what of target is left up to end. Behind each follows a copy, but
// for the last.
func (m *maker) literal(end int) {
	m.patch = binary.AppendUvarint(m.patch, uint64(end-m.done))
	m.patch = append(m.patch, m.target[m.done:end]...)
	m.done = end
}

// search looks for pieces of base in target[from:end].
func (m *maker) search(from, end int) {
	low, high := max(0, from-maxSearched), min(len(m.base), from+2*maxSearched)
	if end-from < minCopy || high-low < minCopy {
		return
	}
	var table [1 << tableBits]int32 // 1 + the first place of base with such bytes
	for at := high - minCopy; at >= low; at -= step {
		table[slot(m.base[at:])] = int32(at + 1)
	}
	for to := from; to+minCopy <= end; {
		if len(m.patch)+to-m.done > m.most {
			return // it is not going to be short
		}
		// A field that has changed and kept its length is the usual case.
		at := m.at + to - m.done
		n := m.matches(at, to, end)
		if other := int(table[slot(m.target[to:])]) - 1; n < minCopy && other >= 0 {
			at, n = other, m.matches(other, to, end)
		}
		if n < minCopy {
			to++
			continue
		}
		for to > m.done && at > 0 && m.base[at-1] == m.target[to-1] {
			at, to, n = at-1, to-1, n+1
		}
		m.copies(at, to, n)
		to += n
	}
}

// matches is how many bytes base from at on has in common with target[to:end].
func (m *maker) matches(at, to, end int) int {
	if at < 0 || at >= len(m.base) {
		return 0
	}
	return commonHead(m.base[at:], m.target[to:end])
}

func slot(b []byte) uint64 {
	return binary.LittleEndian.Uint64(b) * 0x9E3779B97F4A7C15 >> (64 - tableBits)
}

func commonHead(a, b []byte) int {
	n, limit := 0, min(len(a), len(b))
	for ; n+8 <= limit; n += 8 {
		if x := binary.LittleEndian.Uint64(a[n:]) ^ binary.LittleEndian.Uint64(b[n:]); x != 0 {
			return n + bits.TrailingZeros64(x)/8
		}
	}
	for n < limit && a[n] == b[n] {
		n++
	}
	return n
}

func commonTail(a, b []byte) int {
	n := 0
	for n < len(a) && n < len(b) && a[len(a)-1-n] == b[len(b)-1-n] {
		n++
	}
	return n
}

// Expand applies a patch to its base; the result has size bytes, and aliases
// neither. Its rules are part of the meaning of the log.
func Expand(base, patch []byte, size int) ([]byte, error) {
	if size < 0 || size > bound(base, patch) {
		return nil, fmt.Errorf("%w: %d bytes are to come of %d and a patch of %d", ErrPatch, size, len(base), len(patch))
	}
	out := make([]byte, 0, size)
	at := 0
	for {
		n, used := binary.Uvarint(patch)
		if used <= 0 || n > uint64(len(patch)-used) || n > uint64(size-len(out)) {
			return nil, fmt.Errorf("%w: bad bytes to insert behind %d of %d", ErrPatch, len(out), size)
		}
		out = append(out, patch[used:used+int(n)]...)
		if patch = patch[used+int(n):]; len(patch) == 0 {
			break
		}
		n, used = binary.Uvarint(patch)
		if used <= 0 || n > uint64(size-len(out)) {
			return nil, fmt.Errorf("%w: bad length of a copy behind %d of %d", ErrPatch, len(out), size)
		}
		patch = patch[used:]
		move, used := binary.Varint(patch)
		if used <= 0 || move < int64(-at) || move > int64(len(base)-at) || n > uint64(len(base)-at-int(move)) {
			return nil, fmt.Errorf("%w: bad place of a copy behind %d of %d", ErrPatch, len(out), size)
		}
		patch = patch[used:]
		at += int(move)
		out = append(out, base[at:at+int(n)]...)
		at += int(n)
	}
	if len(out) != size {
		return nil, fmt.Errorf("%w: it gives %d bytes instead of %d", ErrPatch, len(out), size)
	}
	return out, nil
}
