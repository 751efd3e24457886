package raftstore

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
)

// A stream of calls carries frames both ways: length of what follows (4),
// kind (1), call number (8), body. The caller numbers its calls; a reply bears
// the number of its call. Replies may come in any order, or never (a submitted
// command that succeeds is seen in the log instead).
type frame struct {
	kind byte
	call uint64
	body []byte
}

// Kinds of frames. Numbers are part of the protocol.
const (
	frameSubmit    = 1 // body: one encoded command. Reply only when it did not get through: frameVerdict
	frameReadIndex = 2 // body: empty. Reply: frameNumber, or frameVerdict
	frameTerm      = 3 // body: empty. Reply: frameNumber, the callee's current term; frameVerdict if it is no voter
	frameMember    = 4 // body: memberOp, id. Reply: frameDone
	frameProgress  = 5 // body: empty. Reply: frameNumber, the log index the callee has applied; frameVerdict if it has lost its state
	frameRoom      = 6 // body: empty. Reply: frameNumber, the free bytes of the callee's disk
	frameHash      = 7 // body: a log index (8). Reply: frameNumber, the keyspace's hash after it, or frameVerdict
	frameDiffers   = 8 // body: a log index (8), the hash (8) that most members have after it. Reply: frameDone
	// body: the caller's ID, 0, the ID of the leader it has lost. Reply: frameStanding
	frameLeaderless = 9
	frameVerdict    = 65
	frameNumber     = 66 // body: number (8)
	frameDone       = 67 // body: verdict, error text; empty when it was done
	// body: 1 when the callee has no leader either, else 0; its term, and term and index of its last log entry (8 each)
	frameStanding = 68
)

const (
	frameHeader = 13
	// maxFrame bounds what a peer may make us read: the largest transaction
	// that can be configured, and some.
	maxFrame = 64 << 20
	// maxUnsent is how much may wait for a slow peer before its stream is
	// given up.
	maxUnsent = 128 << 20
)

var errStreamLost = errors.New("stream to member lost")

// frameWriter sends frames without blocking the caller: what comes while a
// write is under way goes out together in the next one.
type frameWriter struct {
	conn net.Conn
	wake chan struct{}
	done chan struct{}

	mu     sync.Mutex
	unsent []byte
	closed bool
}

func newFrameWriter(conn net.Conn) *frameWriter {
	return &frameWriter{conn: conn, wake: make(chan struct{}, 1), done: make(chan struct{})}
}

// send queues f. False: the stream is gone and f was not sent.
func (w *frameWriter) send(f frame) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed || len(w.unsent) > maxUnsent {
		return false
	}
	w.unsent = binary.LittleEndian.AppendUint32(w.unsent, uint32(frameHeader-4+len(f.body)))
	w.unsent = append(w.unsent, f.kind)
	w.unsent = binary.LittleEndian.AppendUint64(w.unsent, f.call)
	w.unsent = append(w.unsent, f.body...)
	select {
	case w.wake <- struct{}{}:
	default:
	}
	return true
}

// run writes until the connection fails or close is called.
func (w *frameWriter) run() {
	var buf []byte
	for {
		select {
		case <-w.wake:
		case <-w.done:
			return
		}
		w.mu.Lock()
		buf, w.unsent = w.unsent, buf[:0]
		w.mu.Unlock()
		if _, err := w.conn.Write(buf); err != nil {
			w.close()
			return
		}
		if cap(buf) > 1<<20 {
			buf = nil
		}
	}
}

func (w *frameWriter) close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.closed = true
		close(w.done)
		_ = w.conn.Close()
	}
}

// readFrames calls handle for each frame until the stream ends. handle must
// not block and may keep the body.
func readFrames(conn net.Conn, handle func(frame) error) error {
	r := bufio.NewReaderSize(conn, 64<<10)
	for {
		f, err := readFrame(r)
		if err != nil {
			return err
		}
		if err := handle(f); err != nil {
			return err
		}
	}
}

func readFrame(r *bufio.Reader) (frame, error) {
	var head [frameHeader]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return frame{}, err
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n < frameHeader-4 || n > maxFrame {
		return frame{}, fmt.Errorf("frame of %d bytes", n)
	}
	f := frame{kind: head[4], call: binary.LittleEndian.Uint64(head[5:])}
	if body := int(n) - (frameHeader - 4); body > 0 {
		f.body = make([]byte, body)
		if _, err := io.ReadFull(r, f.body); err != nil {
			return frame{}, err
		}
	}
	return f, nil
}

func numberBody(n uint64) []byte { return binary.LittleEndian.AppendUint64(nil, n) }

func bodyNumber(b []byte) (uint64, error) {
	if len(b) != 8 {
		return 0, fmt.Errorf("number of %d bytes", len(b))
	}
	return binary.LittleEndian.Uint64(b), nil
}
