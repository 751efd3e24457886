package main

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"time"
)

// answerLines answers each datagram with who it is and where the datagram came from,
// until the socket is closed.
func answerLines(conn net.PacketConn) {
	b := make([]byte, 512)
	for {
		_, from, err := conn.ReadFrom(b)
		if err != nil {
			return
		}
		host, _, _ := net.SplitHostPort(from.String())
		_, _ = fmt.Fprintf(to{conn, from}, "I am pod %s on node %s; you come from %s\n", podName(), orUnknown("NODE_NAME"), host)
	}
}

// to writes datagrams to one address.
type to struct {
	conn net.PacketConn
	addr net.Addr
}

func (t to) Write(b []byte) (int, error) { return t.conn.WriteTo(b, t.addr) }

// ask sends a datagram, again if it may have been lost, and prints the answer.
func ask(ctx context.Context, addr string) error {
	conn, err := (&net.Dialer{}).DialContext(ctx, "udp", addr)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	b := make([]byte, 512)
	for range 5 {
		if err = conn.SetDeadline(time.Now().Add(time.Second)); err != nil {
			return err
		}
		if _, err = conn.Write([]byte("who is there?")); err != nil {
			return err
		}
		var n int
		if n, err = conn.Read(b); err == nil {
			fmt.Print(string(b[:n]))
			return nil
		}
	}
	return err
}

// method tells how it was asked.
func method(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("X-Method", r.Method)
	fmt.Fprintf(w, "%s %s\n", r.Method, r.URL.Path)
}
