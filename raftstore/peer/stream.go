package peer

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/datadir"
)

// Every stream between members begins with a greeting: what it carries, the
// version of that, and the dialer's epoch. The answer is one byte, and when it
// says that the epoch is another, that epoch.
const (
	RaftStream = 'R' // hashicorp/raft's RPCs
	CallStream = 'C' // our own calls, see frame.go

	streamVersion = 2

	epochSize    = 16
	greetingSize = 2 + epochSize

	greetingTaken = 1
	greetingEpoch = 2 // the other's epoch follows

	preambleTimeout = 10 * time.Second
)

// EpochError is returned for a stream to a member that lives in another epoch.
type EpochError struct {
	Member string        // its ID
	Epoch  datadir.Epoch // its own
}

func (e *EpochError) Error() string {
	return fmt.Sprintf("member %s lives in epoch %s of the store", e.Member, e.Epoch)
}

func appendEpoch(b []byte, e datadir.Epoch) []byte {
	return binary.LittleEndian.AppendUint64(binary.LittleEndian.AppendUint64(b, e.Number), e.ID)
}

func epochOf(b []byte) datadir.Epoch {
	return datadir.Epoch{Number: binary.LittleEndian.Uint64(b), ID: binary.LittleEndian.Uint64(b[8:])}
}

// StreamConfig of Streams. All but PeerID, May and Refused are required.
type StreamConfig struct {
	ID    string // this member's
	Epoch datadir.Epoch
	// Listener accepts streams of other members, already authenticated. It is
	// closed by Close.
	Listener net.Listener
	// Dial opens an authenticated stream to a member. Called concurrently.
	Dial func(ctx context.Context, id string) (net.Conn, error)
	// PeerID returns the ID that the other end of an accepted stream has proved
	// to have. Nil: every stream is trusted.
	PeerID func(net.Conn) string
	// May says why the peer with that ID may not use a stream of that kind now;
	// nil: it may. It is asked when the stream begins and whenever something was
	// read from it.
	May    func(kind byte, id string) error
	Logger *slog.Logger
	// Refused is called with the ID of a member that took a connection and
	// refused the stream. Optional; it must not block.
	Refused func(id string)
}

// Streams owns the listener and every connection made or accepted, so that
// closing it unblocks all their readers. It is raft's StreamLayer: to raft
// an address is a member's ID.
type Streams struct {
	cfg      StreamConfig
	raftIn   chan net.Conn
	callIn   func(net.Conn) // serves one accepted stream of calls until it ends
	ctx      context.Context
	cancel   context.CancelFunc
	wg       sync.WaitGroup
	mu       sync.Mutex
	conns    map[*trackedConn]struct{}
	isClosed bool
}

var _ raft.StreamLayer = (*Streams)(nil)

// NewStreams takes the listener over; Close ends what it begins.
func NewStreams(cfg StreamConfig) *Streams {
	s := &Streams{cfg: cfg, raftIn: make(chan net.Conn), conns: make(map[*trackedConn]struct{})}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	return s
}

// Start begins to accept; callIn gets the streams of calls.
func (s *Streams) Start(callIn func(net.Conn)) {
	s.callIn = callIn
	s.wg.Add(1)
	go s.acceptLoop()
}

func (s *Streams) acceptLoop() {
	defer s.wg.Done()
	for {
		conn, err := s.cfg.Listener.Accept()
		if err != nil {
			if s.ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			s.cfg.Logger.Warn("accept a member's stream", "err", err)
			select {
			case <-time.After(100 * time.Millisecond):
			case <-s.ctx.Done():
				return
			}
			continue
		}
		tc, err := s.track(conn)
		if err != nil {
			return
		}
		s.wg.Add(1)
		go func() {
			defer s.wg.Done()
			s.accepted(tc)
		}()
	}
}

func (s *Streams) accepted(conn *trackedConn) {
	var pre [greetingSize]byte
	_ = conn.SetDeadline(time.Now().Add(preambleTimeout))
	if _, err := io.ReadFull(conn, pre[:]); err != nil {
		_ = conn.Close()
		return
	}
	if pre[1] != streamVersion {
		s.cfg.Logger.Warn("member speaks another version of the store's protocol", "version", pre[1])
		_ = conn.Close()
		return
	}
	bound, err := s.bind(conn, pre[0])
	if err != nil {
		s.cfg.Logger.Warn("refused a member's stream", "err", err)
		_ = conn.Close()
		return
	}
	answer := []byte{greetingTaken}
	theirs := epochOf(pre[2:])
	if theirs != s.cfg.Epoch {
		s.cfg.Logger.Debug("refused a stream from another epoch of the store", "theirs", theirs, "ours", s.cfg.Epoch)
		answer = appendEpoch([]byte{greetingEpoch}, s.cfg.Epoch)
	}
	if _, err := conn.Write(answer); err != nil || theirs != s.cfg.Epoch {
		_ = conn.Close()
		return
	}
	_ = conn.SetDeadline(time.Time{})
	switch {
	case pre[0] == RaftStream:
		select {
		case s.raftIn <- bound:
		case <-s.ctx.Done():
		}
	case pre[0] == CallStream:
		s.callIn(bound)
		_ = conn.Close()
	default:
		_ = conn.Close()
	}
}

// bind ties an accepted stream to what its peer may do.
func (s *Streams) bind(conn *trackedConn, kind byte) (net.Conn, error) {
	if s.cfg.PeerID == nil {
		return conn, nil
	}
	id := s.cfg.PeerID(conn.Conn)
	may := func() error { return s.cfg.May(kind, id) }
	if err := may(); err != nil {
		return nil, err
	}
	return BoundConn{conn, id, may}, nil
}

// Open opens a stream of the given kind to a member.
func (s *Streams) Open(ctx context.Context, id string, kind byte) (net.Conn, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.ctx, cancel)()
	conn, err := s.cfg.Dial(ctx, id)
	if err != nil {
		return nil, fmt.Errorf("dial member %s: %w", id, err)
	}
	tc, err := s.track(conn)
	if err != nil {
		return nil, err
	}
	deadline, ok := ctx.Deadline()
	if !ok {
		deadline = time.Now().Add(preambleTimeout)
	}
	_ = tc.SetDeadline(deadline)
	if err := s.greet(tc, id, kind); err != nil {
		_ = tc.Close()
		return nil, fmt.Errorf("greet member %s: %w", id, err)
	}
	_ = tc.SetDeadline(time.Time{})
	return tc, nil
}

// greet begins a stream. Members that were removed are hung up on without a
// word; those of another epoch get an answer.
func (s *Streams) greet(conn net.Conn, id string, kind byte) error {
	if _, err := conn.Write(appendEpoch([]byte{kind, streamVersion}, s.cfg.Epoch)); err != nil {
		return err
	}
	var answer [1 + epochSize]byte
	_, err := io.ReadFull(conn, answer[:1])
	switch {
	case err == nil && answer[0] == greetingTaken:
		return nil
	case err == nil && answer[0] == greetingEpoch:
		if _, err = io.ReadFull(conn, answer[1:]); err == nil {
			err = &EpochError{Member: id, Epoch: epochOf(answer[1:])}
		}
	case err == nil:
		err = fmt.Errorf("it answers %d", answer[0])
	}
	if fn := s.cfg.Refused; fn != nil && s.ctx.Err() == nil {
		fn(id)
	}
	return err
}

// Dial implements raft.StreamLayer.
func (s *Streams) Dial(address raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	if string(address) == s.cfg.ID {
		return s.dialSelf(timeout)
	}
	ctx, cancel := context.WithTimeout(s.ctx, timeout)
	defer cancel()
	return s.Open(ctx, string(address), RaftStream)
}

// dialSelf connects raft with itself, see Store.standForElection.
func (s *Streams) dialSelf(timeout time.Duration) (net.Conn, error) {
	a, b := net.Pipe()
	near, err := s.track(a)
	if err != nil {
		return nil, errors.Join(err, b.Close())
	}
	far, err := s.track(b)
	if err != nil {
		return nil, errors.Join(err, near.Close())
	}
	select {
	case s.raftIn <- far:
		return near, nil
	case <-time.After(timeout):
		err = errors.New("raft does not accept")
	case <-s.ctx.Done():
		err = net.ErrClosed
	}
	return nil, errors.Join(err, near.Close(), far.Close())
}

// Accept implements net.Listener, for raft.
func (s *Streams) Accept() (net.Conn, error) {
	select {
	case c := <-s.raftIn:
		return c, nil
	case <-s.ctx.Done():
		return nil, net.ErrClosed
	}
}

// Addr implements net.Listener: this member's raft address is its ID.
func (s *Streams) Addr() net.Addr { return memberAddr(s.cfg.ID) }

// Close closes the listener and every connection. It may be called twice.
func (s *Streams) Close() error {
	s.mu.Lock()
	closed := s.isClosed
	s.isClosed = true
	conns := s.conns
	s.conns = nil
	s.mu.Unlock()
	if closed {
		return nil
	}
	s.cancel()
	err := s.cfg.Listener.Close()
	for c := range conns {
		_ = c.Conn.Close()
	}
	return err
}

// Wait returns when everything that was started has ended. Call after Close.
func (s *Streams) Wait() { s.wg.Wait() }

type memberAddr string

func (memberAddr) Network() string  { return "member" }
func (a memberAddr) String() string { return string(a) }

// trackedConn forgets itself when it is closed.
type trackedConn struct {
	net.Conn
	s *Streams
}

func (s *Streams) track(conn net.Conn) (*trackedConn, error) {
	tc := &trackedConn{Conn: conn, s: s}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.isClosed {
		_ = conn.Close()
		return nil, net.ErrClosed
	}
	s.conns[tc] = struct{}{}
	return tc, nil
}

func (c *trackedConn) Close() error {
	c.s.mu.Lock()
	delete(c.s.conns, c)
	c.s.mu.Unlock()
	return c.Conn.Close()
}

// BoundConn is an accepted stream that ends when its peer may not use it any
// more.
type BoundConn struct {
	net.Conn
	ID  string // of the peer, proved
	may func() error
}

// Read checks the right before it returns what was read.
func (c BoundConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err != nil {
		return n, err
	}
	if err := c.may(); err != nil {
		_ = c.Close()
		return 0, err
	}
	return n, nil
}
