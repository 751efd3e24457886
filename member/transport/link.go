package transport

import (
	"crypto/tls"
	"errors"
	"fmt"
	"math"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Link is what the kernel knows of a TCP connection. It tells a way or a machine that
// is gone from a program that is slow: a kernel acknowledges what comes, whether its
// program has been given a processor or not.
type Link struct {
	Received time.Duration // since data came last, read by this program or not
	Acked    time.Duration // since the other kernel acknowledged something last
	Unacked  bool          // there is data that it has not acknowledged
}

// errNoLink is LinkOf's for what is no TCP connection.
var errNoLink = errors.New("not a TCP connection")

// LinkOf tells of the connection below one of this package's.
func LinkOf(c net.Conn) (Link, error) {
	raw, ok := below(c).(syscall.Conn)
	if !ok {
		return Link{}, errNoLink
	}
	fd, err := raw.SyscallConn()
	if err != nil {
		return Link{}, err
	}
	var info *unix.TCPInfo
	cerr := fd.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) })
	if err = errors.Join(cerr, err); err != nil {
		return Link{}, fmt.Errorf("ask the kernel for a connection's state: %w", err)
	}
	return Link{
		Received: millis(info.Last_data_recv), Acked: millis(info.Last_ack_recv),
		Unacked: info.Unacked > 0 || info.Notsent_bytes > 0,
	}, nil
}

func millis(n uint32) time.Duration {
	if n == math.MaxUint32 {
		return math.MaxInt64
	}
	return time.Duration(n) * time.Millisecond
}

// below is the connection that others of this package's run over.
func below(c net.Conn) net.Conn {
	for {
		switch o := c.(type) {
		case *callConn:
			c = o.Conn
		case overConn:
			c = o.below
		case plainConn:
			c = o.Conn
		case *liveConn:
			c = o.Conn
		case *tls.Conn:
			c = o.NetConn()
		default:
			return c
		}
	}
}
