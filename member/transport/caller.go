package transport

import (
	"bufio"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// Caller is the user for whom a server makes a node call.
type Caller struct {
	User   string              `json:"user"`
	UID    string              `json:"uid,omitempty"`
	Groups []string            `json:"groups,omitempty"`
	Extra  map[string][]string `json:"extra,omitempty"`
}

// A connection for a node call may begin with the user it is for, before the HTTP
// of the call: a zero byte, with which no request begins, a length and JSON. It is
// not a header, since users send headers, too, which are passed on. It holds for
// all requests of the connection.
const (
	callerMark  = 0
	maxCaller   = 64 << 10
	callerWrite = 10 * time.Second
)

// Announce says for whom the calls over a new connection are. The node at its other
// end has to understand it: see Spoken.
func Announce(c net.Conn, who Caller) error {
	if who.User == "" {
		return errors.New("a node call for a user without a name")
	}
	body, err := json.Marshal(who)
	if err != nil {
		return err
	}
	if len(body) > maxCaller {
		return fmt.Errorf("what is known of user %q has %d bytes, which is more than a node call carries", who.User, len(body))
	}
	frame := binary.BigEndian.AppendUint32([]byte{callerMark}, uint32(len(body)))
	c.SetWriteDeadline(time.Now().Add(callerWrite))
	defer c.SetWriteDeadline(time.Time{})
	if _, err := c.Write(append(frame, body...)); err != nil {
		return fmt.Errorf("say for whom a node call is: %w", err)
	}
	return nil
}

// Calls is a listener of node calls that takes what Announce has sent. CallerFrom
// tells it to the handler.
func Calls(ln net.Listener) net.Listener { return callListener{ln} }

type callListener struct{ net.Listener }

func (l callListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &callConn{Conn: c, from: bufio.NewReader(c)}, nil
}

// callConn takes the caller off before the first byte is read.
type callConn struct {
	net.Conn
	from *bufio.Reader

	mu     sync.Mutex
	taken  bool
	err    error
	caller *Caller
}

// Read implements net.Conn.
func (c *callConn) Read(p []byte) (int, error) {
	if err := c.take(); err != nil {
		return 0, err
	}
	return c.from.Read(p)
}

func (c *callConn) take() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.taken {
		c.caller, c.err = readCaller(c.from)
		// One that was interrupted by a deadline before its first byte goes on later.
		var timeout net.Error
		c.taken = !(errors.As(c.err, &timeout) && timeout.Timeout())
	}
	return c.err
}

func readCaller(r *bufio.Reader) (*Caller, error) {
	first, err := r.Peek(1)
	if err != nil || first[0] != callerMark {
		return nil, err
	}
	var head [5]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, broken(err)
	}
	n := binary.BigEndian.Uint32(head[1:])
	if n > maxCaller {
		return nil, fmt.Errorf("a node call says in %d bytes for whom it is", n)
	}
	body := make([]byte, n)
	if _, err := io.ReadFull(r, body); err != nil {
		return nil, broken(err)
	}
	var who Caller
	if err := json.Unmarshal(body, &who); err != nil {
		return nil, fmt.Errorf("for whom a node call is: %w", err)
	}
	if who.User == "" {
		return nil, errors.New("a node call for a user without a name")
	}
	return &who, nil
}

// broken is an error in the middle, after which nothing can be read.
func broken(err error) error { return fmt.Errorf("for whom a node call is: %v", err) }

type callKey struct{}

// CallerFrom is the user for whom the request is; nil: the server that sends it asks
// for itself, or is of a version that does not say, see CallerUnknown.
func CallerFrom(ctx context.Context) *Caller {
	c, ok := ctx.Value(callKey{}).(*callConn)
	if !ok {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.caller
}

// CallerUnknown reports whether the request came over the former name of a protocol: servers
// that speak it do not say for whom a call is, be it themselves or any user of theirs.
func CallerUnknown(ctx context.Context) bool {
	c, ok := ctx.Value(callKey{}).(*callConn)
	if !ok {
		return false
	}
	spoken := Spoken(c)
	return present(spoken) != spoken
}

// Spoken is the protocol of a connection that Dial returned, or that runs over one.
func Spoken(c net.Conn) string {
	t := tlsOf(c)
	if t == nil {
		return ""
	}
	return t.ConnectionState().NegotiatedProtocol
}
