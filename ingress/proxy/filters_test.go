package proxy

import (
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/clusterd/clusterd/ingress/route"
)

// TestOrigins: which pages a route's origin is for.
func TestOrigins(t *testing.T) {
	for in, want := range map[string]bool{
		"* https://a.example":                             true,
		"https://a.example https://a.example":             true,
		"https://a.example https://A.example:443":         true,
		"https://a.example http://a.example":              false,
		"https://a.example https://a.example:8443":        false,
		"https://a.example https://b.a.example":           false,
		"https://*.a.example https://x.y.a.example":       true,
		"https://*.a.example https://a.example":           false,
		"https://*.a.example https://evil.example":        false,
		"https://*.a.example https://b.a.example.evil":    false,
		"https://*:8443 https://z.example:8443":           true,
		"https://* https://z.example":                     true,
		"https://* http://z.example":                      false,
		"http://shop-*.a.example http://shop-1.a.example": true,
		"http://[fd00::1]:80 http://[fd00::1]":            true,
		"https://a.example null":                          false,
		"https://* null":                                  false,
	} {
		allowed, origin, _ := strings.Cut(in, " ")
		if got := matchesOrigin(allowed, origin); got != want {
			t.Errorf("%s: %t", in, got)
		}
	}
}

// TestCORS: what browsers are answered, for pages that may and for others.
func TestCORS(t *testing.T) {
	k := newKit(t, Config{})
	var asked atomic.Int64
	web := backend(t, func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		w.Header().Set("Access-Control-Allow-Origin", "the backend's")
		w.Header().Set("Access-Control-Allow-Credentials", "true")
		if r.Header.Get("Fail") != "" {
			panic(http.ErrAbortHandler)
		}
	})
	serve := func(c route.CORS) { k.gateway(when("/", route.Action{CORS: &c, Shares: all(to("shop/web:80", web))})) }
	const page = "https://page.example"
	for _, tt := range []struct {
		name          string
		cors          route.CORS
		method        string
		header        []string
		code          int
		allows, lists string // the origin that is allowed; other headers that answer
	}{
		{"question", route.CORS{Origins: []string{page}, Methods: []string{"PUT", "GET"}, Headers: []string{"X-A"}, MaxAge: 60}, "OPTIONS",
			[]string{"Origin", page, "Access-Control-Request-Method", "PUT", "Access-Control-Request-Headers", "x-a"}, 204, page, "PUT, GET|X-A|60|||"},
		{"question, with what answers show", route.CORS{Origins: []string{page}, Expose: []string{"X-B", "X-C"}, MaxAge: 5}, "OPTIONS",
			[]string{"Origin", page, "Access-Control-Request-Method", "GET"}, 204, page, "||5||X-B, X-C|"},
		{"every method, asked for", route.CORS{Origins: []string{"*"}, Methods: []string{"*"}, Headers: []string{"*"}, MaxAge: 5, Credentials: true}, "OPTIONS",
			[]string{"Origin", page, "Access-Control-Request-Method", "PATCH", "Access-Control-Request-Headers", "x-a,x-b"}, 204, page, "PATCH|x-a,x-b|5|true||"},
		{"no header asked for", route.CORS{Origins: []string{"*"}, Headers: []string{"*"}, MaxAge: 5}, "OPTIONS",
			[]string{"Origin", page, "Access-Control-Request-Method", "GET"}, 204, page, "||5|||"},
		{"question of another", route.CORS{Origins: []string{"https://other.example"}, Methods: []string{"*"}, Credentials: true}, "OPTIONS",
			[]string{"Origin", page, "Access-Control-Request-Method", "PUT"}, 204, "", "|||||"},
		{"request", route.CORS{Origins: []string{page}, Expose: []string{"X-B", "*"}, Credentials: true}, "GET", []string{"Origin", page}, 200, page, "|||true|X-B|"},
		{"request, all exposed", route.CORS{Origins: []string{"*"}, Expose: []string{"*"}}, "GET", []string{"Origin", page}, 200, page, "||||*|"},
		{"request of another", route.CORS{Origins: []string{"https://other.example"}, Credentials: true}, "GET", []string{"Origin", page}, 200, "", "|||||"},
		{"no page", route.CORS{Origins: []string{"*"}, Credentials: true}, "GET", nil, 200, "", "|||||"},
		{"OPTIONS of a program", route.CORS{Origins: []string{"*"}}, "OPTIONS", []string{"Origin", page}, 200, page, "|||||"},
		{"an answer of our own", route.CORS{Origins: []string{page}}, "GET", []string{"Origin", page, "Fail", "1"}, 502, page, "|||||"},
	} {
		serve(tt.cors)
		before := asked.Load()
		code, _, h := k.ask(tt.method, "http://a.example/", "", tt.header...)
		var lists strings.Builder
		for _, name := range []string{"Methods", "Headers"} {
			lists.WriteString(h.Get("Access-Control-Allow-"+name) + "|")
		}
		lists.WriteString(h.Get("Access-Control-Max-Age") + "|" + h.Get("Access-Control-Allow-Credentials") + "|" + h.Get("Access-Control-Expose-Headers") + "|")
		if got := strings.Join(h.Values("Access-Control-Allow-Origin"), " and "); code != tt.code || got != tt.allows || lists.String() != tt.lists {
			t.Errorf("%s: %d allows %q: %s", tt.name, code, got, lists.String())
		}
		if !slices.Contains(h.Values("Vary"), "Origin") {
			t.Errorf("%s: a cache may give it to other origins: %q", tt.name, h.Values("Vary"))
		}
		if own := tt.code == 204; own == (asked.Load() > before) {
			t.Errorf("%s: the backend was asked %d times", tt.name, asked.Load()-before)
		}
	}
}

// TestRetry: what is sent again, to whom, with what body, and what the client gets.
func TestRetry(t *testing.T) {
	k := newKit(t, Config{})
	// attempted are the attempts at an endpoint and the bodies that they brought.
	type attempted struct {
		n      atomic.Int64
		bodies chan string
	}
	// start makes an endpoint that answers the n-th attempt with code(n); 0 ends the
	// connection, -1 never answers.
	start := func(code func(n int) int) (netip.AddrPort, *attempted) {
		a := &attempted{bodies: make(chan string, 20)}
		return backend(t, func(w http.ResponseWriter, r *http.Request) {
			n := int(a.n.Add(1))
			b, err := io.ReadAll(r.Body)
			a.bodies <- fmt.Sprintf("%d bytes, %v", len(b), err)
			switch c := code(n); c {
			case 0:
				panic(http.ErrAbortHandler)
			case -1:
				<-r.Context().Done()
			default:
				w.WriteHeader(c)
				fmt.Fprintf(w, "attempt %d", n)
			}
		}), a
	}
	then := func(codes ...int) func(int) int { return func(n int) int { return codes[min(n, len(codes))-1] } }
	for _, tt := range []struct {
		name, method string
		body         int
		retry        route.Retry
		try          time.Duration
		codes        func(int) int
		want         int
		attempts     int
	}{
		{"an answer with a code", "GET", 0, route.Retry{Codes: []int{500, 503}, Attempts: 2}, 0, then(503, 500, 200), 200, 3},
		{"too often", "GET", 0, route.Retry{Codes: []int{503}, Attempts: 2}, 0, then(503), 503, 3},
		{"another code", "GET", 0, route.Retry{Codes: []int{503}, Attempts: 2}, 0, then(500, 200), 500, 1},
		{"a body is sent again", "POST", keptBody, route.Retry{Codes: []int{503}, Attempts: 1}, 0, then(503, 200), 200, 2},
		{"a long body is not", "POST", keptBody + 1, route.Retry{Codes: []int{503}, Attempts: 1}, 0, then(503, 200), 503, 1},
		{"a connection that ends", "POST", 3, route.Retry{Attempts: 1}, 0, then(0, 200), 200, 2},
		{"an endpoint that is late", "POST", 3, route.Retry{Attempts: 1}, 3 * time.Second, then(-1, 200), 200, 2},
	} {
		web, a := start(tt.codes)
		k.gateway(when("/", route.Action{Retry: &tt.retry, Try: tt.try, NoResponseTimeout: true, Shares: all(to("shop/web:80", web))}))
		got, page, _ := k.ask(tt.method, "http://a.example/", strings.Repeat("x", tt.body))
		if got != tt.want || a.n.Load() != int64(tt.attempts) {
			t.Errorf("%s: %d after %d attempts: %s", tt.name, got, a.n.Load(), page)
		}
		for range a.n.Load() {
			if b := <-a.bodies; b != fmt.Sprintf("%d bytes, <nil>", tt.body) {
				t.Errorf("%s: a body of %s", tt.name, b)
			}
		}
	}

	// The backoff is kept, and doubles; the time of the request bounds all.
	web, _ := start(then(503))
	k.gateway(when("/", route.Action{Retry: &route.Retry{Codes: []int{503}, Attempts: 2, Backoff: 20 * time.Millisecond}, Shares: all(to("shop/web:80", web))}))
	began := time.Now()
	if got, _, _ := k.ask("GET", "http://a.example/", ""); got != 503 || time.Since(began) < 60*time.Millisecond {
		t.Errorf("%d after %v", got, time.Since(began))
	}
	k.gateway(when("/", route.Action{Timeout: 50 * time.Millisecond, Retry: &route.Retry{Codes: []int{503}, Attempts: 2, Backoff: time.Hour}, Shares: all(to("shop/web:80", web))}))
	if got, page, _ := k.ask("GET", "http://a.example/", ""); got != http.StatusGatewayTimeout {
		t.Errorf("%d: %s", got, page)
	}
	none := to("shop/none:80", refusing(t))
	k.gateway(when("/", route.Action{Retry: &route.Retry{Attempts: 1}, Shares: all(none)}))
	if got, page, _ := k.ask("GET", "http://a.example/", ""); got != 503 || !strings.Contains(page, "(2)") {
		t.Errorf("%d: %s", got, page)
	}
}

// TestMirror: the mirror gets the request as its backend does, and can neither delay
// nor change what the client gets.
func TestMirror(t *testing.T) {
	k := newKit(t, Config{})
	type copied struct{ uri, host, body, header string }
	got := make(chan copied, 300) // more than there are requests: it never blocks the mirror
	hold := make(chan struct{})
	t.Cleanup(func() { k.Close() })
	shadow := backend(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got <- copied{r.RequestURI, r.Host, string(b), r.Header.Get("X-Rule") + r.Header.Get("X-Share")}
		if r.URL.Path == "/held" {
			select {
			case <-hold:
			case <-r.Context().Done():
			}
		}
		w.WriteHeader(500)
	})
	web := backend(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/unread" {
			_, _ = io.Copy(io.Discard, r.Body)
		}
		fmt.Fprint(w, "the backend's")
	})
	serve := func(of, in int, endpoints ...route.Mirror) {
		a := route.Action{Mirrors: append(endpoints, route.Mirror{Backend: to("shop/shadow:80", shadow), Of: of, In: in}), Shares: all(to("shop/web:80", web))}
		a.Headers.Request.Set = fields("X-Rule", "rule")
		a.Shares[0].Headers.Request.Set = fields("X-Share", "share")
		k.gateway(when("/", a))
	}
	ask := func(method, path, body string) {
		t.Helper()
		if code, page, _ := k.ask(method, "http://a.example"+path, body); code != 200 || page != "the backend's" {
			t.Errorf("%s %s: %d %s", method, path, code, page)
		}
	}
	count := func(result string) float64 { return testutil.ToFloat64(k.metrics.mirrored.WithLabelValues(result)) }
	until := func(what string, holds func() bool) {
		t.Helper()
		for end := time.Now().Add(time.Minute); !holds(); time.Sleep(time.Millisecond) {
			if time.Now().After(end) {
				t.Fatal(what)
			}
		}
	}

	serve(1, 1)
	ask("GET", "/x?q=1", "")
	if c := <-got; c != (copied{"/x?q=1", "a.example", "", "rule"}) {
		t.Errorf("%+v", c)
	}
	long := strings.Repeat("x", mirroredBody)
	ask("POST", "/x", long)
	if c := <-got; c.body != long {
		t.Errorf("a body of %d bytes", len(c.body))
	}
	ask("POST", "/x", long+"x")
	until("a long body is dropped", func() bool { return count("dropped") == 1 })
	ask("GET", "/held", "")
	<-got
	ask("GET", "/x", "") // the mirror that hangs delays none
	<-got
	close(hold)
	until("the copies are counted", func() bool { return count("sent") == 4 })

	serve(0, 1)
	ask("GET", "/x", "")
	serve(1, 2, route.Mirror{Backend: to("shop/gone:80", refusing(t)), Of: 1, In: 1})
	const requests = 200
	for range requests {
		ask("GET", "/x", "")
		until("copies are sent", func() bool { return len(k.mirroring) < mirrors/2 }) // beyond mirrors they are dropped
	}
	until("the mirror that is gone is counted", func() bool { return count("failed") == requests })
	// Of 200 with a chance of one half each: outside of these less often than once in 10^9 runs.
	if n := count("sent") - 4; n < 50 || n > 150 {
		t.Errorf("%v of %d were mirrored", n, requests)
	}
}
