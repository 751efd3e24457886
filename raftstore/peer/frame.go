package peer

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
)

// Frame is one call or reply. A stream of calls carries frames both ways: length of what follows (4),
// kind (1), call number (8), body. The caller numbers its calls; a reply bears
// the number of its call. Replies may come in any order, or never (a submitted
// command that succeeds is seen in the log instead).
type Frame struct {
	Kind byte
	Call uint64
	Body []byte
}

// Kinds of frames. Numbers are part of the protocol.
const (
	KindSubmit    = 1 // body: one encoded command. Reply only when it did not get through: KindVerdict
	KindReadIndex = 2 // body: empty. Reply: KindNumber, or KindVerdict
	KindTerm      = 3 // body: empty. Reply: KindNumber, the callee's current term; KindVerdict if it is no voter
	KindMember    = 4 // body: memberOp, id. Reply: KindDone
	KindProgress  = 5 // body: empty. Reply: KindNumber, the log index the callee has applied; KindVerdict if it has lost its state
	KindRoom      = 6 // body: empty. Reply: KindNumber, the free bytes of the callee's disk
	KindHash      = 7 // body: a log index (8). Reply: KindNumber, the keyspace's hash after it, or KindVerdict
	KindDiffers   = 8 // body: a log index (8), the hash (8) that most members have after it. Reply: KindDone
	// body: the caller's ID, 0, the ID of the leader it has lost. Reply: KindVoterState
	KindLeaderless = 9
	// body: empty. Reply: KindNumber, the highest number of a command that may be in the callee's log; KindDone from those older than the question
	KindSpeaks = 10
	// body: empty. Reply: KindNumber, the format (package settle) that the callee
	// uses, times 2^32, and the highest one that it knows; KindDone as above
	KindFormats = 11
	KindVerdict = 65
	KindNumber  = 66 // body: number (8)
	KindDone    = 67 // body: verdict, error text; empty when it was done
	// body: 1 when the callee has no leader either, else 0; its term, and term and index of its last log entry (8 each)
	KindVoterState = 68
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

// ErrStreamLost is the error of a call whose stream ended before its reply came.
var ErrStreamLost = errors.New("stream to member lost")

// Writer sends frames without blocking the caller: what comes while a
// write is under way goes out together in the next one.
type Writer struct {
	conn net.Conn
	wake chan struct{}
	done chan struct{}

	mu     sync.Mutex
	unsent []byte
	closed bool
}

// NewWriter sends nothing before Run is called.
func NewWriter(conn net.Conn) *Writer {
	return &Writer{conn: conn, wake: make(chan struct{}, 1), done: make(chan struct{})}
}

// Send queues f. False: the stream is gone and f was not sent.
func (w *Writer) Send(f Frame) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed || len(w.unsent) > maxUnsent {
		return false
	}
	w.unsent = binary.LittleEndian.AppendUint32(w.unsent, uint32(frameHeader-4+len(f.Body)))
	w.unsent = append(w.unsent, f.Kind)
	w.unsent = binary.LittleEndian.AppendUint64(w.unsent, f.Call)
	w.unsent = append(w.unsent, f.Body...)
	select {
	case w.wake <- struct{}{}:
	default:
	}
	return true
}

// Run writes until the connection fails or Close is called.
func (w *Writer) Run() {
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
			w.Close()
			return
		}
		if cap(buf) > 1<<20 {
			buf = nil
		}
	}
}

// Close closes the connection, too. It may be called twice.
func (w *Writer) Close() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.closed {
		w.closed = true
		close(w.done)
		_ = w.conn.Close()
	}
}

// ReadFrames calls handle for each frame until the stream ends. handle must
// not block and may keep the body.
func ReadFrames(conn net.Conn, handle func(Frame) error) error {
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

func readFrame(r *bufio.Reader) (Frame, error) {
	var head [frameHeader]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return Frame{}, err
	}
	n := binary.LittleEndian.Uint32(head[:])
	if n < frameHeader-4 || n > maxFrame {
		return Frame{}, fmt.Errorf("frame of %d bytes", n)
	}
	f := Frame{Kind: head[4], Call: binary.LittleEndian.Uint64(head[5:])}
	if body := int(n) - (frameHeader - 4); body > 0 {
		f.Body = make([]byte, body)
		if _, err := io.ReadFull(r, f.Body); err != nil {
			return Frame{}, err
		}
	}
	return f, nil
}

// NumberBody is the body of a KindNumber.
func NumberBody(n uint64) []byte { return binary.LittleEndian.AppendUint64(nil, n) }

// BodyNumber reads it.
func BodyNumber(b []byte) (uint64, error) {
	if len(b) != 8 {
		return 0, fmt.Errorf("number of %d bytes", len(b))
	}
	return binary.LittleEndian.Uint64(b), nil
}
