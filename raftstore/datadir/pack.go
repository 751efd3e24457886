package datadir

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/klauspost/compress/zstd"

	"github.com/clusterd/clusterd/raftstore/wire"
)

// A packed file is a magic, a version, and blocks. A block is the length of
// what it holds (4), the length of that compressed (4), the checksum of both
// lengths and the compressed bytes (4), and these. Each is compressed for
// itself, so that several are worked on at a time. The last one says 0 and 8,
// and holds how many bytes there are in all (8).
const (
	packMagic   = "CLDRPACK"
	packVersion = 1
	packHead    = len(packMagic) + 4
	blockHead   = 12
	packTail    = blockHead + 8

	blockBytes = 512 << 10
	blockMax   = 4 << 20 // longer is corruption
)

// packer compresses what is written to it. Objects of the API take a fifth
// of the room.
type packer struct {
	w       io.Writer
	enc     *zstd.Encoder
	buf     []byte // the open block
	out     []byte
	total   uint64
	started bool
}

func newPacker(w io.Writer) (*packer, error) {
	enc, err := zstd.NewWriter(nil, zstd.WithEncoderLevel(zstd.SpeedFastest), zstd.WithEncoderConcurrency(1),
		zstd.WithEncoderCRC(false), zstd.WithWindowSize(blockBytes))
	return &packer{w: w, enc: enc}, err
}

// Write implements io.Writer.
func (p *packer) Write(b []byte) (n int, err error) {
	for len(b) > 0 {
		m := min(len(b), blockBytes-len(p.buf))
		p.buf = append(p.buf, b[:m]...)
		b, n = b[m:], n+m
		if len(p.buf) == blockBytes {
			if err := p.flush(); err != nil {
				return n, err
			}
		}
	}
	return n, nil
}

func (p *packer) flush() error {
	p.out = p.out[:0]
	if !p.started {
		p.started = true
		p.out = binary.LittleEndian.AppendUint32(append(p.out, packMagic...), packVersion)
	}
	if n := len(p.buf); n > 0 {
		p.total += uint64(n)
		at := len(p.out)
		p.out = p.enc.EncodeAll(p.buf, append(p.out, make([]byte, blockHead)...))
		finishBlock(p.out[at:], n)
		p.buf = p.buf[:0]
	}
	_, err := p.w.Write(p.out)
	return err
}

// finishBlock fills in the head of a block that holds n bytes.
func finishBlock(block []byte, n int) {
	binary.LittleEndian.PutUint32(block, uint32(n))
	binary.LittleEndian.PutUint32(block[4:], uint32(len(block)-blockHead))
	binary.LittleEndian.PutUint32(block[8:], blockSum(block))
}

func blockSum(block []byte) uint32 {
	return wire.Update(wire.Update(0, block[:8]), block[blockHead:])
}

// finish writes what is left, and the end.
func (p *packer) finish() error {
	if err := p.flush(); err != nil {
		return err
	}
	tail := make([]byte, packTail)
	binary.LittleEndian.PutUint64(tail[blockHead:], p.total)
	finishBlock(tail, 0)
	_, err := p.w.Write(tail)
	return errors.Join(err, p.enc.Close())
}

// isPacked reports whether a file of size bytes is packed, and how many bytes
// it holds.
func isPacked(f io.ReaderAt, size int64) (packed bool, holds int64, err error) {
	head := make([]byte, packHead)
	if _, err := f.ReadAt(head, 0); err != nil || string(head[:len(packMagic)]) != packMagic {
		if errors.Is(err, io.EOF) {
			err = nil
		}
		return false, size, err
	}
	if v := binary.LittleEndian.Uint32(head[len(packMagic):]); v != packVersion {
		return true, 0, fmt.Errorf("%w: packed file %d", wire.ErrVersion, v)
	}
	tail := make([]byte, packTail)
	if _, err := f.ReadAt(tail, size-packTail); err != nil {
		return true, 0, &wire.DamageError{Offset: max(0, size-packTail), Err: fmt.Errorf("%w: %w", wire.ErrCorrupt, err)}
	}
	if binary.LittleEndian.Uint32(tail) != 0 || binary.LittleEndian.Uint32(tail[4:]) != 8 || binary.LittleEndian.Uint32(tail[8:]) != blockSum(tail) {
		return true, 0, &wire.DamageError{Offset: size - packTail, Err: fmt.Errorf("%w: it has no end", wire.ErrCorrupt)}
	}
	return true, int64(binary.LittleEndian.Uint64(tail[blockHead:])), nil
}

// blocks reads the blocks of a packed file one after the other.
type blocks struct {
	r   *bufio.Reader
	at  int64 // of the block read last
	end int64 // behind it
}

func newBlocks(r io.Reader) (*blocks, error) {
	b := &blocks{r: bufio.NewReaderSize(r, 256<<10), end: int64(packHead)}
	_, err := b.r.Discard(packHead)
	return b, err
}

func (b *blocks) damaged(what string, args ...any) error {
	return &wire.DamageError{Offset: b.at, Err: fmt.Errorf("%w: "+what, append([]any{wire.ErrCorrupt}, args...)...)}
}

// next returns a block, head included, grown from buf; holds is 0 for the last
// one.
func (b *blocks) next(buf []byte) (block []byte, holds int, err error) {
	b.at = b.end
	head := append(buf[:0], make([]byte, blockHead)...)
	if _, err := io.ReadFull(b.r, head); err != nil {
		return nil, 0, b.damaged("it ends in a block: %w", err)
	}
	holds, n := int(binary.LittleEndian.Uint32(head)), int(binary.LittleEndian.Uint32(head[4:]))
	if holds > blockMax || n > blockMax {
		return nil, 0, b.damaged("block of %d bytes in %d", holds, n)
	}
	block = append(head, make([]byte, n)...)
	if _, err := io.ReadFull(b.r, block[blockHead:]); err != nil {
		return nil, 0, b.damaged("it ends in a block: %w", err)
	}
	if got, want := blockSum(block), binary.LittleEndian.Uint32(block[8:]); got != want {
		return nil, 0, b.damaged("block's checksum is %08x, stored was %08x", got, want)
	}
	b.end += int64(len(block))
	return block, holds, nil
}

// checkPacked reads all blocks of a packed file. What they hold was whole when
// they were written.
func checkPacked(r io.Reader) error {
	b, err := newBlocks(r)
	if err != nil {
		return err
	}
	var block []byte
	for {
		var holds int
		if block, holds, err = b.next(block); err != nil {
			return err
		}
		if holds > 0 {
			continue
		}
		if _, err := b.r.ReadByte(); err == nil {
			b.at = b.end
			return b.damaged("it goes on behind its end")
		}
		return nil
	}
}

// unpacker reads what was packed, a few blocks ahead.
type unpacker struct {
	file  io.Closer
	queue chan unpacked
	stop  chan struct{}
	wg    sync.WaitGroup
	now   []byte
	err   error
}

type unpacked struct {
	data []byte
	err  error // io.EOF at the end
}

// unpackAhead is how many blocks are unpacked before they are wanted.
const unpackAhead = 4

func newUnpacker(f io.ReadCloser) (*unpacker, error) {
	dec, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxMemory(blockMax))
	if err != nil {
		return nil, err
	}
	b, err := newBlocks(f)
	if err != nil {
		dec.Close()
		return nil, err
	}
	u := &unpacker{file: f, queue: make(chan unpacked, unpackAhead), stop: make(chan struct{})}
	u.wg.Go(func() {
		defer dec.Close()
		u.run(b, dec)
	})
	return u, nil
}

func (u *unpacker) run(b *blocks, dec *zstd.Decoder) {
	var block []byte
	for {
		var next unpacked
		var holds int
		if block, holds, next.err = b.next(block); next.err == nil {
			if holds == 0 {
				next.err = io.EOF
			} else if next.data, next.err = dec.DecodeAll(block[blockHead:], make([]byte, 0, holds)); next.err != nil || len(next.data) != holds {
				next.err = b.damaged("block does not hold %d bytes: %v", holds, next.err)
			}
		}
		select {
		case u.queue <- next:
		case <-u.stop:
			return
		}
		if next.err != nil {
			return
		}
	}
}

// Read implements io.Reader.
func (u *unpacker) Read(b []byte) (int, error) {
	for len(u.now) == 0 && u.err == nil {
		next := <-u.queue
		u.now, u.err = next.data, next.err
	}
	if len(u.now) == 0 {
		return 0, u.err
	}
	n := copy(b, u.now)
	u.now = u.now[n:]
	return n, nil
}

// Close implements io.Closer.
func (u *unpacker) Close() error {
	close(u.stop)
	u.wg.Wait()
	return u.file.Close()
}
