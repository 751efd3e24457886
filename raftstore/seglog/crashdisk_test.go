package seglog

import (
	"errors"
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"slices"
)

// crashDisk is a directory in memory that knows what of it is on disk. What was
// done since the last sync may be there after a power cut or not: blocks in any
// order, each as it was after any of the writes to it; changes of names in
// order, as a journal keeps them.
type crashDisk struct {
	rng   *rand.Rand
	block int // bytes that reach the disk whole

	names   map[string]*crashFile // now
	durable map[string]*crashFile // at the last sync
	renames []map[string]*crashFile

	left int // changes until the process ends; negative: it lives on
	life int // files opened in an earlier one are dead
}

type crashFile struct {
	now, durable []byte
	pending      []change
}

// change is a write, or one of the length.
type change struct {
	at   int
	data []byte
	size int // -1: a write
}

var errKilled = errors.New("the process was killed")

func newCrashDisk(rng *rand.Rand) *crashDisk {
	return &crashDisk{
		rng: rng, block: []int{512, 4096}[rng.IntN(2)], left: -1,
		names: map[string]*crashFile{}, durable: map[string]*crashFile{},
	}
}

// step counts a change; it fails when the process has ended before it.
func (d *crashDisk) step() error {
	if d.left == 0 {
		return errKilled
	}
	if d.left > 0 {
		d.left--
	}
	return nil
}

// restart lets another process have the disk. The kernel has lived on.
func (d *crashDisk) restart() { d.left, d.life = -1, d.life+1 }

// powerCut leaves what is on disk, and of what was on its way anything.
func (d *crashDisk) powerCut() {
	names := d.durable
	if n := d.rng.IntN(len(d.renames) + 1); n > 0 {
		names = d.renames[n-1]
	}
	done := map[*crashFile]bool{}
	for _, name := range slices.Sorted(maps.Keys(names)) { // in order: a seed is one history
		if f := names[name]; !done[f] {
			f.powerCut(d.rng, d.block)
			done[f] = true
		}
	}
	d.names, d.durable, d.renames = maps.Clone(names), maps.Clone(names), nil
	d.restart()
}

func (f *crashFile) powerCut(rng *rand.Rand, block int) {
	// versions[i] is the file after i changes.
	versions := [][]byte{f.durable}
	for _, c := range f.pending {
		last := versions[len(versions)-1]
		next := c.apply(slices.Clone(last))
		if len(next) < len(last) { // the end of the file is moved as a whole or not
			if rng.IntN(2) == 0 {
				break
			}
			versions = nil
		}
		versions = append(versions, next)
	}
	mood := rng.IntN(4)
	pick := func() int {
		switch mood {
		case 0:
			return 0 // nothing got there
		case 1:
			return len(versions) - 1 // all of it did
		}
		return rng.IntN(len(versions))
	}
	out := make([]byte, len(versions[pick()]))
	for at := 0; at < len(out); at += block {
		v := versions[pick()]
		if at < len(v) {
			copy(out[at:min(at+block, len(out))], v[at:])
		}
	}
	f.now, f.durable, f.pending = slices.Clone(out), out, nil
}

func (c change) apply(b []byte) []byte {
	if c.size >= 0 {
		if c.size <= len(b) {
			return b[:c.size]
		}
		return append(b, make([]byte, c.size-len(b))...)
	}
	if end := c.at + len(c.data); end > len(b) {
		b = append(b, make([]byte, end-len(b))...)
	}
	copy(b[c.at:], c.data)
	return b
}

func (d *crashDisk) list() (names []string, err error) {
	for name := range d.names {
		names = append(names, name)
	}
	slices.Sort(names)
	return names, nil
}

func (d *crashDisk) open(name string) (file, error) {
	f, ok := d.names[name]
	if !ok {
		return nil, &fs.PathError{Op: "open", Path: name, Err: fs.ErrNotExist}
	}
	return &crashHandle{d, f, d.life}, nil
}

func (d *crashDisk) rewrite(change func(map[string]*crashFile)) error {
	if err := d.step(); err != nil {
		return err
	}
	change(d.names)
	d.renames = append(d.renames, maps.Clone(d.names))
	return nil
}

func (d *crashDisk) create(name string) (file, error) {
	err := d.rewrite(func(m map[string]*crashFile) { m[name] = &crashFile{} })
	if err != nil {
		return nil, err
	}
	return d.open(name)
}

func (d *crashDisk) rename(from, to string) error {
	return d.rewrite(func(m map[string]*crashFile) { m[to] = m[from]; delete(m, from) })
}

func (d *crashDisk) remove(name string) error {
	return d.rewrite(func(m map[string]*crashFile) { delete(m, name) })
}

func (d *crashDisk) sync() error {
	if err := d.step(); err != nil {
		return err
	}
	d.durable, d.renames = maps.Clone(d.names), nil
	return nil
}

type crashHandle struct {
	d    *crashDisk
	f    *crashFile
	life int
}

func (h *crashHandle) step() error {
	if h.life != h.d.life {
		return errKilled
	}
	return h.d.step()
}

func (h *crashHandle) change(c change) {
	h.f.pending = append(h.f.pending, c)
	h.f.now = c.apply(h.f.now)
}

func (h *crashHandle) ReadAt(b []byte, at int64) (int, error) {
	if at > int64(len(h.f.now)) {
		return 0, io.EOF
	}
	n := copy(b, h.f.now[at:])
	if n < len(b) {
		return n, io.EOF
	}
	return n, nil
}

func (h *crashHandle) WriteAt(b []byte, at int64) (int, error) {
	err := h.step()
	if err != nil {
		// It may have ended in the middle of it.
		if h.life != h.d.life {
			return 0, err
		}
		b = b[:h.d.rng.IntN(len(b)+1)]
	}
	h.change(change{at: int(at), data: slices.Clone(b), size: -1})
	return len(b), err
}

func (h *crashHandle) Truncate(size int64) error {
	if err := h.step(); err != nil {
		return err
	}
	h.change(change{size: int(size)})
	return nil
}

func (h *crashHandle) sync() error {
	if err := h.step(); err != nil {
		return err
	}
	h.f.durable, h.f.pending = slices.Clone(h.f.now), nil
	return nil
}

func (h *crashHandle) datasync() error      { return h.sync() }
func (h *crashHandle) size() (int64, error) { return int64(len(h.f.now)), nil }
func (h *crashHandle) forget()              {}
func (h *crashHandle) Close() error         { return nil }
