package proxy

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/ingress/route"
	"github.com/clusterd/clusterd/leaktest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

// kit is a proxy that serves on two ports of the loopback.
type kit struct {
	*Proxy
	t             *testing.T
	plain, secure string
	log           *lockedBuffer
	client        *http.Client
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func newKit(t *testing.T, cfg Config) *kit {
	k := &kit{t: t, log: &lockedBuffer{}}
	cfg.Access = slog.New(slog.NewJSONHandler(k.log, nil))
	k.Proxy = New(cfg)
	listen := func() net.Listener {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		return l
	}
	plain, secure := listen(), listen()
	k.plain, k.secure = plain.Addr().String(), secure.Addr().String()
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- k.Serve(ctx, plain, secure) }()
	transport := &http.Transport{
		ForceAttemptHTTP2: true,
		TLSClientConfig:   &tls.Config{InsecureSkipVerify: true},
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			to := k.plain
			if strings.HasSuffix(addr, ":443") {
				to = k.secure
			}
			return new(net.Dialer).DialContext(ctx, network, to)
		},
	}
	k.client = &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	t.Cleanup(func() {
		transport.CloseIdleConnections()
		stop()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	return k
}

// backend serves fn and is an endpoint.
func backend(t *testing.T, fn http.HandlerFunc) netip.AddrPort {
	s := httptest.NewUnstartedServer(fn)
	s.Config.Protocols = new(http.Protocols)
	s.Config.Protocols.SetHTTP1(true)
	s.Config.Protocols.SetUnencryptedHTTP2(true)
	s.Start()
	t.Cleanup(s.Close)
	return netip.MustParseAddrPort(s.Listener.Addr().String())
}

// refusing returns an address that refuses connections: bound, so that no other
// socket gets it, and not listened on.
func refusing(t *testing.T) netip.AddrPort {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Close(fd) })
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), uint16(name.(*unix.SockaddrInet4).Port))
}

func (k *kit) rules(rules ...route.Rule) {
	table, _ := route.Build(rules, nil)
	k.Set(table)
}

func to(name string, endpoints ...netip.AddrPort) *route.Backend {
	return &route.Backend{Name: name, Protocol: route.HTTP, Endpoints: endpoints}
}

// ask sends a request and returns the status, the answer and its header.
func (k *kit) ask(method, url, body string, header ...string) (int, string, http.Header) {
	k.t.Helper()
	req, err := http.NewRequestWithContext(k.t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		k.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := k.client.Do(req)
	if err != nil {
		k.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		k.t.Fatal(err)
	}
	return resp.StatusCode, string(b), resp.Header
}

func TestWhatTheBackendIsTold(t *testing.T) {
	k := newKit(t, Config{})
	echo := backend(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		_ = json.NewEncoder(w).Encode(map[string]any{"host": r.Host, "uri": r.RequestURI, "header": r.Header, "body": string(body)})
	})
	k.rules(route.Rule{Host: "a.example", Backend: to("shop/web:80", echo), Owner: route.Owner{Namespace: "shop", Name: "web"}})
	for _, tt := range []struct{ scheme, port string }{{"http", "80"}, {"https", "443"}} {
		code, body, _ := k.ask("POST", tt.scheme+"://a.example/x%2Fy/;z?q=1;2&%zz", "the body",
			"X-Forwarded-For", "6.6.6.6", "X-Forwarded-Proto", "gopher", "Forwarded", "for=6.6.6.6", "X-Real-Ip", "6.6.6.6", "X-Forwarded-Port", "1", "X-Request-Id", "one")
		var got struct {
			Host, URI, Body string
			Header          http.Header
		}
		if err := json.Unmarshal([]byte(body), &got); code != 200 || err != nil {
			t.Fatal(code, body, err)
		}
		if got.Host != "a.example" || got.URI != "/x%2Fy/;z?q=1;2&%zz" || got.Body != "the body" {
			t.Errorf("%s: %+v", tt.scheme, got)
		}
		for h, want := range map[string]string{
			"X-Forwarded-For": "127.0.0.1", "X-Real-Ip": "127.0.0.1", "X-Forwarded-Proto": tt.scheme, "X-Forwarded-Host": "a.example",
			"X-Forwarded-Port": tt.port, "Forwarded": "", "X-Request-Id": "one",
		} {
			if v := got.Header.Get(h); v != want {
				t.Errorf("%s: %s is %q, want %q", tt.scheme, h, v, want)
			}
		}
	}
	eventually(t, "both requests are counted", func() bool { // which is done after the answer
		return testutil.ToFloat64(k.metrics.requests.WithLabelValues("shop", "web", "200")) == 2
	})
	line, _, _ := strings.Cut(k.log.String(), "\n")
	for _, want := range []string{`"host":"a.example"`, `"path":"/x%2Fy/;z"`, `"status":200`, `"ingress":"shop/web"`, `"endpoint":"` + echo.String(), `"id":"one"`} {
		if !strings.Contains(line, want) {
			t.Errorf("the log has no %s: %s", want, line)
		}
	}
}

func TestRefusals(t *testing.T) {
	k := newKit(t, Config{})
	if code, body, _ := k.ask("GET", "http://a.example/", ""); code != 503 || !strings.Contains(body, "not known yet") {
		t.Error(code, body)
	}
	rude := backend(t, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	k.rules(
		route.Rule{Host: "a.example", Path: "/none", Backend: to("a/none:80")},
		route.Rule{Host: "a.example", Path: "/fault", Backend: &route.Backend{Fault: "Service a/x does not exist"}},
		route.Rule{Host: "a.example", Path: "/dead", Backend: to("a/dead:80", refusing(t), refusing(t))},
		route.Rule{Host: "a.example", Path: "/rude", Backend: to("a/rude:80", rude)},
		route.Rule{Path: "/secure", Backend: to("a/b:80"), Redirect: true},
	)
	for _, tt := range []struct {
		method, url string
		code        int
		says        string
	}{
		{"GET", "http://a.example/other", 404, `no Ingress of this cluster has a rule for host "a.example" and path "/other"`},
		{"GET", "http://a.example/none", 503, "a/none:80 has no ready endpoints"},
		{"GET", "http://a.example/fault", 503, "Service a/x does not exist"},
		{"POST", "http://a.example/dead", 503, "none of the endpoints of a/dead:80 that were tried (2) took the connection"},
		{"GET", "http://a.example/rude", 502, "a/rude:80 ended the connection"},
		{"GET", "http://a.example/none/%2e%2e/x", 400, `must not have "." or ".."`},
		{"GET", "http://a.example/none/..%2fx", 400, `must not have "." or ".."`},
		{"POST", "http://a.example/secure?a=%20b", 308, ""},
		{"GET", "https://a.example/secure", 503, "a/b:80 has no ready endpoints"},
	} {
		code, body, header := k.ask(tt.method, tt.url, "")
		if code != tt.code || !strings.Contains(body, tt.says) {
			t.Errorf("%s %s: %d %s", tt.method, tt.url, code, body)
		}
		if loc := header.Get("Location"); (loc == "https://a.example/secure?a=%20b") != (tt.code == 308) {
			t.Errorf("%s: Location %q", tt.url, loc)
		}
		if tt.code != 308 && (header.Get("X-Content-Type-Options") != "nosniff" || !strings.HasPrefix(header.Get("Content-Type"), "text/plain")) {
			t.Errorf("%s: %v", tt.url, header)
		}
	}
}

func TestASlowBackend(t *testing.T) {
	k := newKit(t, Config{ResponseTimeout: 20 * time.Millisecond})
	over := make(chan struct{})
	defer close(over)
	k.rules(route.Rule{Backend: to("a/slow:80", backend(t, func(http.ResponseWriter, *http.Request) { <-over }))})
	if code, body, _ := k.ask("POST", "http://a.example/", "text"); code != 504 || !strings.Contains(body, "a/slow:80 did not answer in 20ms") {
		t.Error(code, body)
	}
}

// TestABackendDies: a request that no endpoint has seen is answered by a live one,
// whatever its method; one that may have been seen is sent again only if that
// does no harm.
func TestABackendDies(t *testing.T) {
	k := newKit(t, Config{})
	alive := backend(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		fmt.Fprintf(w, "%s %s", r.Method, b)
	})
	for range 8 {
		k.rules(route.Rule{Backend: to("a/b:80", refusing(t), alive)})
		for _, method := range []string{"GET", "POST"} {
			if code, body, _ := k.ask(method, "http://a.example/", "text"); code != 200 || body != method+" text" {
				t.Fatalf("%s: %d %s", method, code, body)
			}
		}
	}
	var mu sync.Mutex
	seen := map[string]int{}
	rude := backend(t, func(_ http.ResponseWriter, r *http.Request) {
		mu.Lock()
		seen[r.Method]++
		mu.Unlock()
		panic(http.ErrAbortHandler)
	})
	k.rules(route.Rule{Backend: to("a/b:80", rude)})
	for _, method := range []string{"GET", "POST"} {
		if code, body, _ := k.ask(method, "http://a.example/", ""); code != 502 {
			t.Errorf("%s: %d %s", method, code, body)
		}
	}
	mu.Lock()
	defer mu.Unlock()
	if seen["POST"] != 1 || seen["GET"] != 1 {
		t.Errorf("sent to the only endpoint: %v", seen)
	}
}

// TestAgain: a request that does no harm is sent to each other endpoint when one ends
// the connection, and to none when one takes too long: it is at work there.
func TestAgain(t *testing.T) {
	k := newKit(t, Config{ResponseTimeout: 50 * time.Millisecond})
	var mu sync.Mutex
	seen := map[string]int{}
	over := make(chan struct{})
	defer close(over)
	serve := func(name string, do func(w http.ResponseWriter)) netip.AddrPort {
		return backend(t, func(w http.ResponseWriter, _ *http.Request) {
			mu.Lock()
			seen[name]++
			mu.Unlock()
			do(w)
		})
	}
	rude := func(http.ResponseWriter) { panic(http.ErrAbortHandler) }
	slow := func(http.ResponseWriter) { <-over }
	k.rules(route.Rule{Backend: to("a/b:80", serve("rude 1", rude), serve("rude 2", rude), serve("rude 3", rude))})
	if code, body, _ := k.ask("GET", "http://a.example/", ""); code != 502 {
		t.Errorf("%d %s", code, body)
	}
	k.rules(route.Rule{Backend: to("a/b:80", serve("slow 1", slow), serve("slow 2", slow))})
	if code, body, _ := k.ask("GET", "http://a.example/", ""); code != 504 {
		t.Errorf("%d %s", code, body)
	}
	mu.Lock()
	defer mu.Unlock()
	if seen["rude 1"] != 1 || seen["rude 2"] != 1 || seen["rude 3"] != 1 || seen["slow 1"]+seen["slow 2"] != 1 {
		t.Errorf("sent: %v", seen)
	}
}

// TestEarlyAnswer: a backend that answers before it has read the request's body gets
// all of it, over HTTP/1.1, too.
func TestEarlyAnswer(t *testing.T) {
	k := newKit(t, Config{})
	k.rules(route.Rule{Backend: to("a/b:80", backend(t, func(w http.ResponseWriter, r *http.Request) {
		if err := http.NewResponseController(w).EnableFullDuplex(); err != nil {
			t.Error(err)
		}
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		n, err := io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, n, err)
	}))})
	conn, err := net.Dial("tcp", k.plain)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	const size = 200_000
	fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: a.example\r\nContent-Length: %d\r\n\r\nfirst", size)
	in := bufio.NewReader(conn)
	resp, err := http.ReadResponse(in, nil) // the answer's header is here, the body is not
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if _, err := io.WriteString(conn, strings.Repeat("x", size-len("first"))); err != nil {
		t.Fatal(err)
	}
	if body, err := io.ReadAll(resp.Body); err != nil || string(body) != fmt.Sprint(size, nil) {
		t.Errorf("the backend got %q, %v; want %d bytes", body, err, size)
	}
}

// TestNoUpgradeToHTTP2: what would become HTTP/2 behind the proxy is sent on as the
// request that it is.
func TestNoUpgradeToHTTP2(t *testing.T) {
	k := newKit(t, Config{})
	k.rules(route.Rule{Backend: to("a/b:80", backend(t, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "%q %q %q", r.Header.Get("Connection"), r.Header.Get("Upgrade"), r.Header.Get("Http2-Settings"))
	}))})
	_, body, _ := k.ask("GET", "http://a.example/", "", "Connection", "Upgrade, HTTP2-Settings", "Upgrade", "h2c", "Http2-Settings", "AAMAAABkAAQAAP__")
	if body != `"" "" ""` {
		t.Errorf("the backend is asked for %s", body)
	}
}

func TestUpgrade(t *testing.T) {
	k := newKit(t, Config{})
	echo := backend(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Upgrade") != "websocket" {
			t.Errorf("no upgrade: %v", r.Header)
			return
		}
		conn, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = conn.Close() }()
		fmt.Fprint(rw, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		_ = rw.Flush()
		for {
			line, err := rw.ReadString('\n')
			if err != nil {
				return
			}
			fmt.Fprint(rw, strings.ToUpper(line))
			_ = rw.Flush()
		}
	})
	for _, p := range []route.Protocol{route.HTTP, route.H2C} {
		b := to("a/b:80", echo)
		b.Protocol = p
		k.rules(route.Rule{Backend: b})
		conn, err := net.Dial("tcp", k.plain)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		fmt.Fprint(conn, "GET /chat HTTP/1.1\r\nHost: a.example\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
		in := bufio.NewReader(conn)
		resp, err := http.ReadResponse(in, nil)
		if err != nil || resp.StatusCode != http.StatusSwitchingProtocols {
			t.Fatal(resp, err)
		}
		for _, word := range []string{"one", "two"} {
			fmt.Fprintln(conn, word)
			if line, err := in.ReadString('\n'); err != nil || line != strings.ToUpper(word)+"\n" {
				t.Errorf("%q, %v", line, err)
			}
		}
	}
}

// TestTrailersAndStreams: what gRPC needs of HTTP/2, over TLS to the proxy and
// without it to the backend.
func TestTrailersAndStreams(t *testing.T) {
	k := newKit(t, Config{})
	ready := make(chan struct{})
	b := to("a/b:80", backend(t, func(w http.ResponseWriter, r *http.Request) {
		if r.ProtoMajor != 2 || r.Header.Get("Te") != "trailers" {
			t.Errorf("%s, TE %q", r.Proto, r.Header.Get("Te"))
		}
		w.Header().Set("Trailer", "Grpc-Status")
		fmt.Fprint(w, "first")
		_ = http.NewResponseController(w).Flush()
		<-ready
		fmt.Fprint(w, "second")
		w.Header().Set("Grpc-Status", "0")
	}))
	b.Protocol = route.H2C
	k.rules(route.Rule{Backend: b})
	req, _ := http.NewRequestWithContext(t.Context(), "POST", "https://a.example/svc/Call", strings.NewReader("x"))
	req.Header.Set("Te", "trailers")
	resp, err := k.client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	first := make([]byte, 5)
	if _, err := io.ReadFull(resp.Body, first); err != nil || string(first) != "first" {
		t.Fatalf("%q, %v", first, err)
	}
	close(ready)
	rest, err := io.ReadAll(resp.Body)
	if err != nil || string(rest) != "second" || resp.Trailer.Get("Grpc-Status") != "0" || resp.ProtoMajor != 2 {
		t.Errorf("%q %v %v %s", rest, err, resp.Trailer, resp.Proto)
	}
}

func TestCertificates(t *testing.T) {
	k := newKit(t, Config{})
	own, err := selfSigned()
	if err != nil {
		t.Fatal(err)
	}
	table, _ := route.Build(nil, []route.Certificate{{Host: "a.example", Pair: own}})
	shown := func(name string) []byte {
		conn, err := tls.Dial("tcp", k.secure, &tls.Config{ServerName: name, InsecureSkipVerify: true})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = conn.Close() }()
		return conn.ConnectionState().PeerCertificates[0].Raw
	}
	if bytes.Equal(shown("a.example"), own.Certificate[0]) {
		t.Error("a certificate before there is a table")
	}
	k.Set(table)
	if !bytes.Equal(shown("A.example"), own.Certificate[0]) || bytes.Equal(shown("b.example"), own.Certificate[0]) {
		t.Error("the wrong certificate")
	}
	if c, err := tls.Dial("tcp", k.secure, &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS11}); err == nil { //nolint:gosec // what must fail
		_ = c.Close()
		t.Error("TLS 1.1 was taken")
	}
}

func TestChoose(t *testing.T) {
	p := New(Config{})
	all := []netip.AddrPort{}
	for i := range 5 {
		all = append(all, netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, 0, byte(i)}), 80))
	}
	b := &route.Backend{Endpoints: all}
	// Those that nothing is on are chosen before those that are busy.
	var calls []*call
	for range 200 {
		c := &call{rule: &route.Rule{Backend: b}}
		a, ok := p.balance.choose(b, c)
		if !ok {
			t.Fatal("none")
		}
		c.take(p.balance, a)
		calls = append(calls, c)
	}
	for _, a := range all {
		if n := p.balance.busy[a].calls.Load(); n < 20 || n > 60 {
			t.Errorf("%s has %d of 200", a, n)
		}
	}
	for _, c := range calls {
		c.release()
		c.release()
	}
	if len(p.balance.busy) != 0 {
		t.Errorf("left: %v", p.balance.busy)
	}
	// The one that stands is found among those that do not.
	for _, a := range all[:4] {
		p.balance.avoid(a)
	}
	for range 20 {
		if a, _ := p.balance.choose(b, &call{}); a != all[4] {
			t.Fatalf("%s was chosen", a)
		}
	}
	// A sticky client keeps its endpoint when another goes.
	p.balance.bad = map[netip.AddrPort]time.Time{}
	counts := map[netip.AddrPort]int{}
	for i := range 500 {
		c := &call{client: netip.AddrFrom4([4]byte{192, 0, byte(i >> 8), byte(i)})}
		b.Sticky, b.Endpoints = true, all
		one, _ := p.balance.choose(b, c)
		counts[one]++
		if one != all[0] {
			b.Endpoints = all[1:]
			if two, _ := p.balance.choose(b, c); two != one {
				t.Fatalf("%s moved from %s to %s", c.client, one, two)
			}
		}
		b.Endpoints = all
		p.balance.avoid(one)
		if two, _ := p.balance.choose(b, c); two == one {
			t.Fatalf("%s stays at one that takes no connections", c.client)
		}
		p.balance.bad = map[netip.AddrPort]time.Time{}
	}
	for _, a := range all {
		if counts[a] < 50 {
			t.Errorf("%s has %d of 500 clients", a, counts[a])
		}
	}
}

// TestEndsAfterWhatIsUnderWay: a request that has begun is answered though the
// end was announced.
func TestEndsAfterWhatIsUnderWay(t *testing.T) {
	begun, finish := make(chan struct{}), make(chan struct{})
	slow := backend(t, func(w http.ResponseWriter, _ *http.Request) {
		close(begun)
		<-finish
		fmt.Fprint(w, "whole")
	})
	p := New(Config{})
	table, _ := route.Build([]route.Rule{{Backend: to("a/b:80", slow)}}, nil)
	p.Set(table)
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	secure, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended, answered := make(chan error, 1), make(chan error, 1)
	go func() { ended <- p.Serve(ctx, plain, secure) }()
	transport := &http.Transport{}
	defer transport.CloseIdleConnections()
	go func() {
		resp, err := (&http.Client{Transport: transport}).Get("http://" + plain.Addr().String())
		if err != nil {
			answered <- err
			return
		}
		defer func() { _ = resp.Body.Close() }()
		b, err := io.ReadAll(resp.Body)
		if string(b) != "whole" {
			err = errors.Join(err, fmt.Errorf("answer: %q", b))
		}
		answered <- err
	}()
	<-begun
	stop()
	close(finish)
	if err := errors.Join(<-answered, <-ended); err != nil {
		t.Error(err)
	}
	if len(p.balance.busy) != 0 {
		t.Errorf("calls are still counted: %v", p.balance.busy)
	}
}
