package wire

import (
	"bufio"
	"fmt"
	"io"
	"runtime"
	"sync"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// ReadSnapshot reads what WriteSnapshot wrote and rebuilds the keyspace. It
// returns one only if every checksum and the keyspace's own hash agree; a fault
// comes as a *DamageError.
//
// One goroutine reads chunks and checks them, some decode them, and the caller's
// puts the records together in their order. All have ended when it returns.
func ReadSnapshot(src io.Reader) (*mvcc.Keyspace, error) { return ReadSnapshotOf(src, nil) }

// ReadSnapshotOf is ReadSnapshot; begins is called with what the snapshot says of itself
// before the rest is read. It may be a lie: only the chunk's checksum is verified.
func ReadSnapshotOf(src io.Reader, begins func(mvcc.Header)) (*mvcc.Keyspace, error) {
	s := snapshotReader{r: bufio.NewReaderSize(src, 256<<10)}
	version, err := s.begin()
	if err != nil {
		return nil, &DamageError{s.off, err}
	}
	d := &decoding{
		version: version,
		todo:    make(chan *chunk, chunksAhead),
		order:   make(chan *chunk, chunksAhead),
		free:    make(chan []byte, 2*chunksAhead),
		stop:    make(chan struct{}),
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer close(d.stop)
	wg.Go(func() { d.read(&s) })
	for range max(1, runtime.GOMAXPROCS(0)-1) {
		wg.Go(d.work)
	}
	a := assembly{begins: begins}
	for c := range d.order {
		<-c.done
		k, err := a.take(c)
		if err != nil {
			return nil, &DamageError{c.off, err}
		}
		if k != nil {
			return k, nil
		}
	}
	panic("wire: a snapshot without an end and without an error")
}

// chunksAhead is how many chunks are read before they are put together.
const chunksAhead = 16

// chunk is one on its way from the file into the keyspace.
type chunk struct {
	off     int64
	kind    byte
	payload []byte
	// What it holds, once done is closed.
	done    chan struct{}
	err     error
	headers []mvcc.Header
	base    []mvcc.BaseKey
	changes []mvcc.Change
	window  []mvcc.WindowEntry
	written uint64 // of chunkEnd: the number of records before it
}

func (c *chunk) records() int {
	return len(c.headers) + len(c.base) + len(c.changes) + len(c.window)
}

type decoding struct {
	version uint32
	todo    chan *chunk
	order   chan *chunk // the same in the order of the file; closed behind the last one
	free    chan []byte
	stop    chan struct{} // closed when the reader wants no more
}

// read hands out the chunks of a file up to the last one, or to a fault.
func (d *decoding) read(s *snapshotReader) {
	defer close(d.todo)
	defer close(d.order)
	for {
		s.off = s.pos
		select {
		case s.buf = <-d.free:
		default:
			s.buf = nil
		}
		c := &chunk{off: s.off, done: make(chan struct{})}
		c.kind, c.payload, c.err = s.chunk()
		// Decided before a worker has the chunk: from then on it is the worker's.
		last := c.err != nil || c.kind == chunkEnd
		if c.err != nil {
			close(c.done)
		} else {
			select {
			case d.todo <- c:
			case <-d.stop:
				return
			}
		}
		select {
		case d.order <- c:
		case <-d.stop:
			return
		}
		if last {
			return
		}
	}
}

// work decodes chunks until there are no more.
func (d *decoding) work() {
	for c := range d.todo {
		c.decode(d.version)
		select {
		case d.free <- c.payload:
		default:
		}
		c.payload = nil
		close(c.done)
	}
}

// decode takes the records out of the payload. Nothing in them aliases it.
func (c *chunk) decode(version uint32) {
	r := reader{b: c.payload}
	for r.rest() > 0 || c.kind == chunkEnd {
		switch c.kind {
		case chunkHeader:
			c.headers = append(c.headers, r.header())
		case chunkBase:
			kv := r.kv()
			if r.err == nil {
				c.base = append(c.base, mvcc.NewBaseKey(kv))
			}
		case chunkChange:
			change := mvcc.Change{Type: mvcc.EventType(r.byte()), Time: int64(r.uint64())}
			if version > 1 {
				change.Origin = r.string()
			}
			change.KV = r.kv()
			c.changes = append(c.changes, change)
		case chunkWindow:
			c.window = append(c.window, mvcc.WindowEntry{
				ID:      mvcc.CommandID{Session: r.uint64(), Seq: r.uvarint()},
				Verdict: mvcc.Verdict(r.byte()), Revision: r.int(), Index: r.uvarint(),
			})
		case chunkEnd:
			c.written = r.uvarint()
			c.err = r.done()
			return
		default:
			c.err = fmt.Errorf("%w: chunk of kind %d", ErrVersion, c.kind)
			return
		}
		if r.err != nil {
			c.err = r.err
			return
		}
	}
}

// assembly puts the records of chunks together.
type assembly struct {
	begins  func(mvcc.Header) // may be nil
	builder *mvcc.Builder
	records uint64
	last    byte
}

// take adds the next chunk's records. It returns the keyspace after the last
// one.
func (a *assembly) take(c *chunk) (*mvcc.Keyspace, error) {
	switch {
	case c.err != nil:
		return nil, c.err
	case c.kind < a.last || (a.builder == nil) != (c.kind == chunkHeader):
		return nil, fmt.Errorf("%w: chunk of kind %d after %d", ErrCorrupt, c.kind, a.last)
	case len(c.headers) > 1:
		return nil, fmt.Errorf("%w: second header", ErrCorrupt)
	}
	a.last = c.kind
	a.records += uint64(c.records())
	switch c.kind {
	case chunkHeader:
		if len(c.headers) == 1 {
			if a.begins != nil {
				a.begins(c.headers[0])
			}
			a.builder = mvcc.NewBuilder(c.headers[0])
		}
	case chunkEnd:
		if c.written != a.records {
			return nil, fmt.Errorf("%w: %d records, %d were written", ErrCorrupt, a.records, c.written)
		}
		return a.builder.Finish()
	}
	for i := range c.base {
		if err := a.builder.BaseKey(c.base[i]); err != nil {
			return nil, err
		}
	}
	for i := range c.changes {
		if err := a.builder.Change(c.changes[i]); err != nil {
			return nil, err
		}
	}
	for i := range c.window {
		if err := a.builder.Window(c.window[i]); err != nil {
			return nil, err
		}
	}
	return nil, nil
}
