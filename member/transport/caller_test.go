package transport

import (
	"context"
	"io"
	"net"
	"net/http"
	"reflect"
	"strings"
	"testing"
	"time"
)

// callServer answers with the user for whom a call is.
func callServer(t *testing.T, ln net.Listener) {
	t.Helper()
	srv := &http.Server{ConnContext: WithPeer, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, peer := PeerFrom(r.Context())
		who := CallerFrom(r.Context())
		if who == nil {
			io.WriteString(w, peer+" for itself")
			return
		}
		io.WriteString(w, peer+" for "+who.User+" of "+strings.Join(who.Groups, ","))
	})}
	done := make(chan struct{})
	go func() { srv.Serve(Calls(ln)); close(done) }()
	t.Cleanup(func() { srv.Close(); <-done })
}

// TestCaller: a connection says for whom it is, and headers do not.
func TestCaller(t *testing.T) {
	ca := newCA(t)
	server, serverID := identity(t, ca, "n1")
	client, _ := identity(t, ca, "n2")
	p := serve(t, server)
	callServer(t, p.HTTPOver(Node))
	ask := func(who *Caller) (string, error) {
		tr := &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			c, err := client.Dial(ctx, p.Addr(), serverID, Node)
			if err != nil {
				return nil, err
			}
			if Spoken(c) != Node {
				t.Errorf("they speak %s", Spoken(c))
			}
			if who != nil {
				if err := Announce(c, *who); err != nil {
					c.Close()
					return nil, err
				}
			}
			return c, nil
		}}
		req, _ := http.NewRequest("GET", "http://n1/", nil)
		req.Header.Set("X-Remote-User", "root")
		res, err := tr.RoundTrip(req)
		if err != nil {
			return "", err
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		return string(b), err
	}
	for _, test := range []struct {
		who  *Caller
		want string // empty: it is refused
	}{
		{nil, "n2 for itself"},
		{&Caller{User: "ann", Groups: []string{"a", "b"}}, "n2 for ann of a,b"},
		{&Caller{Groups: []string{"a"}}, ""},
		{&Caller{User: strings.Repeat("x", maxCaller)}, ""},
	} {
		if got, err := ask(test.who); got != test.want || (err != nil) != (test.want == "") {
			t.Errorf("%+v: %q, %v", test.who, got, err)
		}
	}
}

// TestFormerProtocol: nodes of the version before still speak to each other and to
// those of now, without a word on the user.
func TestFormerProtocol(t *testing.T) {
	ca := newCA(t)
	server, serverID := identity(t, ca, "n1")
	client, _ := identity(t, ca, "n2")
	p := serve(t, server)
	callServer(t, p.HTTPOver(Node))
	c, err := client.dial(t.Context(), p.Addr().String(), serverID, all, nil, former[Node])
	if err != nil || Spoken(c) != former[Node] {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: n1\r\nConnection: close\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(c); err != nil || !strings.HasSuffix(string(b), "n2 for itself") {
		t.Errorf("%q, %v", b, err)
	}
}

// TestBrokenCaller: what cannot be read ends the connection, and no request is made
// of what follows.
func TestBrokenCaller(t *testing.T) {
	request := "GET / HTTP/1.1\r\nHost: n1\r\nConnection: close\r\n\r\n"
	for name, head := range map[string]string{
		"too long":      "\x00\xff\xff\xff\xff",
		"no JSON":       "\x00\x00\x00\x00\x02{]",
		"no name":       "\x00\x00\x00\x00\x02{}",
		"not a message": "\x00\x00\x00\x00\x04true",
		"twice":         "\x00\x00\x00\x00\x0e" + `{"user":"ann"}` + "\x00\x00\x00\x00\x0f" + `{"user":"root"}`,
	} {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		callServer(t, ln)
		c, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		c.SetDeadline(time.Now().Add(60 * time.Second))
		io.WriteString(c, head+request)
		if b, _ := io.ReadAll(c); strings.Contains(string(b), " for ") || strings.Contains(string(b), "200 OK") {
			t.Errorf("%s: answered %q", name, b)
		}
		c.Close()
	}
}

// FuzzCaller: whatever comes first, what is not a caller stays to be read.
func FuzzCaller(f *testing.F) {
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add([]byte("\x00\x00\x00\x00\x0e" + `{"user":"ann"}` + "GET"))
	f.Fuzz(func(t *testing.T, b []byte) {
		ours, theirs := net.Pipe()
		go func() { theirs.Write(b); theirs.Close() }()
		c, _ := callListener{one{conn: ours}}.Accept()
		got, err := io.ReadAll(c)
		if err == nil && len(b) > 0 && b[0] != callerMark && !reflect.DeepEqual(got, b) {
			t.Errorf("of %q is left %q", b, got)
		}
	})
}

type one struct {
	net.Listener
	conn net.Conn
}

func (o one) Accept() (net.Conn, error) { return o.conn, nil }
