package transport

import (
	"crypto/tls"
	"net"
	"testing"
	"time"
)

// A kernel acknowledges what comes for a program that does not read, and this one knows
// what came for a program that did not read it.
func TestLinkOf(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	raw, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	theirs, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer theirs.Close()
	ours := Over(nil, plainConn{tls.Client(&liveConn{Conn: raw, all: &live{}}, &tls.Config{})})
	until := func(what string, ok func(Link) bool) {
		t.Helper()
		for end := time.Now().Add(60 * time.Second); ; time.Sleep(time.Millisecond) {
			link, err := LinkOf(ours)
			if err != nil {
				t.Fatal(err)
			}
			if ok(link) {
				return
			}
			if time.Now().After(end) {
				t.Fatalf("%s: %+v", what, link)
			}
		}
	}
	began := time.Now()
	raw.Write([]byte("ping"))
	until("acknowledged", func(l Link) bool { return !l.Unacked && l.Acked <= time.Since(began)+time.Second })
	time.Sleep(20 * time.Millisecond)
	wrote := time.Now()
	theirs.Write([]byte("pong"))
	until("received", func(l Link) bool { return l.Received <= time.Since(wrote)+10*time.Millisecond })
	if _, err := LinkOf(Over(nil, one{}.conn)); err == nil {
		t.Error("a link of nothing")
	}
	a, b := net.Pipe()
	defer a.Close()
	defer b.Close()
	if _, err := LinkOf(a); err == nil {
		t.Error("a link of a pipe")
	}
	// What is more than the other end takes is not acknowledged.
	until("not acknowledged", func(l Link) bool {
		raw.SetWriteDeadline(time.Now().Add(200 * time.Millisecond)) // may end before the other end is full
		for err = nil; !l.Unacked && err == nil; {
			_, err = raw.Write(make([]byte, 1<<20))
		}
		return l.Unacked
	})
}
