package proxy

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/clusterd/clusterd/ingress/route"
)

// briefly is a BodyTimeout that tests wait out.
const briefly = 100 * time.Millisecond

// long is for what has to come about, on a machine that is busy.
const long = time.Minute

// TestClientSendsNothingMore: a client that stops in the midst of its body is answered,
// its connection closed, and the backend's let go.
func TestClientSendsNothingMore(t *testing.T) {
	for _, p := range []route.Protocol{route.HTTP, route.H2C} {
		t.Run(string(p), func(t *testing.T) {
			ended := make(chan error, 1)
			k := newKit(t, Config{BodyTimeout: briefly})
			to := to("ns/slow:80", backend(t, func(w http.ResponseWriter, r *http.Request) {
				_, err := io.ReadAll(r.Body)
				ended <- err
			}))
			to.Protocol = p
			k.rules(route.Rule{Backend: to})
			conn, err := net.Dial("tcp", k.plain)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(long))
			fmt.Fprint(conn, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nabc")
			in := bufio.NewReader(conn)
			resp, err := http.ReadResponse(in, nil)
			if err != nil {
				t.Fatal(err)
			}
			text, _ := io.ReadAll(resp.Body)
			if resp.StatusCode != http.StatusRequestTimeout || !resp.Close || !strings.Contains(string(text), "nothing of the request's body came for 100ms") {
				t.Errorf("%d, close %t: %s", resp.StatusCode, resp.Close, text)
			}
			// What comes now is no request.
			fmt.Fprint(conn, "GET / HTTP/1.1\r\nHost: a\r\n\r\n")
			if _, err := in.ReadByte(); err == nil {
				t.Error("the connection is used again")
			}
			select {
			case err := <-ended:
				if err == nil {
					t.Error("the backend has a whole request")
				}
			case <-time.After(long):
				t.Error("the backend still waits for the rest")
			}
		})
	}
}

// TestClientSendsNothingMoreOverTLS: the same on a stream of HTTP/2, whose connection
// others use on.
func TestClientSendsNothingMoreOverTLS(t *testing.T) {
	k := newKit(t, Config{BodyTimeout: briefly})
	k.rules(route.Rule{Backend: to("ns/slow:80", backend(t, func(_ http.ResponseWriter, r *http.Request) { _, _ = io.ReadAll(r.Body) }))})
	rest, stop := io.Pipe()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://a/", io.MultiReader(strings.NewReader("abc"), rest))
	if err != nil {
		t.Fatal(err)
	}
	k.client.Timeout = long
	for _, body := range []bool{true, false} {
		if !body {
			req, _ = http.NewRequestWithContext(t.Context(), http.MethodGet, "https://a/", nil)
		}
		resp, err := k.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		want := http.StatusOK
		if body {
			want = http.StatusRequestTimeout
		}
		if resp.StatusCode != want || resp.ProtoMajor != 2 {
			t.Errorf("%s %s, want %d", resp.Proto, resp.Status, want)
		}
		stop.Close() // the client waits for the end of what it sends
		resp.Body.Close()
	}
}

// TestClientSendsNothingMoreOfWhatIsAnswered: a backend that answers before it has the
// whole body ends the request; the client's connection does not last because of it.
func TestClientSendsNothingMoreOfWhatIsAnswered(t *testing.T) {
	k := newKit(t, Config{BodyTimeout: briefly})
	k.rules(route.Rule{Backend: to("ns/quick:80", backend(t, func(w http.ResponseWriter, r *http.Request) {
		rc := http.NewResponseController(w)
		_ = rc.EnableFullDuplex()
		w.Header().Set("Content-Length", "2")
		fmt.Fprint(w, "ok")
		_ = rc.Flush()
		_, _ = io.ReadAll(r.Body) // what the proxy has of it
	}))})
	conn, err := net.Dial("tcp", k.plain)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(long))
	fmt.Fprint(conn, "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nabc")
	all, err := io.ReadAll(conn)
	if errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the connection stays open after %q", all)
	}
}

// TestStreamsMayRest: gRPC to a backend that speaks it.
func TestStreamsMayRest(t *testing.T) {
	for _, test := range []struct {
		major    int
		content  string
		protocol route.Protocol
		want     bool
	}{
		{2, "application/grpc", route.H2C, true},
		{2, "application/grpc+proto", route.HTTPS, true},
		{2, "application/grpc", route.HTTP, false},
		{1, "application/grpc", route.H2C, false},
		{2, "application/json", route.H2C, false},
	} {
		r := &http.Request{ProtoMajor: test.major, Header: http.Header{"Content-Type": {test.content}}}
		if got := rests(r, &route.Backend{Protocol: test.protocol}); got != test.want {
			t.Errorf("%+v: %t", test, got)
		}
	}
}

// slowClient is a client that is slow, with the server's part of it.
type slowClient struct {
	http.ResponseWriter
	*io.PipeReader
}

func (c slowClient) SetReadDeadline(time.Time) error { return c.CloseWithError(os.ErrDeadlineExceeded) }

// TestBodyIsTimedWhileItIsWaitedFor: a client that sends now and then may take as long as
// it likes, and so may who reads what has come.
func TestBodyIsTimedWhileItIsWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, w := io.Pipe()
		client := slowClient{PipeReader: r}
		body := newClientBody(r, time.Minute, http.NewResponseController(client))
		go func() {
			for range 100 {
				time.Sleep(50 * time.Second)
				fmt.Fprint(w, "x")
			}
		}()
		one := make([]byte, 1)
		for i := range 100 {
			if _, err := body.Read(one); err != nil {
				t.Fatalf("byte %d: %v", i, err)
			}
			if i%10 == 0 {
				time.Sleep(10 * time.Minute) // the backend is slow
			}
		}
		before := time.Now()
		if _, err := body.Read(one); !errors.Is(err, errBodyIdle) || time.Since(before) != time.Minute {
			t.Errorf("after %s: %v", time.Since(before), err)
		}
		if err := body.Close(); err != nil || !body.wasIdle() {
			t.Errorf("%v, idle %t", err, body.wasIdle())
		}
		if _, err := body.Read(one); !errors.Is(err, http.ErrBodyReadAfterClose) {
			t.Errorf("after the end: %v", err)
		}
	})
}
