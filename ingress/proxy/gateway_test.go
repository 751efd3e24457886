package proxy

import (
	"bufio"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/ingress/route"
)

// gateway serves rules on port 80 and 443 for every host.
func (k *kit) gateway(rules ...route.GatewayRule) {
	table, _ := route.Build(nil, nil)
	k.Set(route.Merge(table, []route.Listener{{Place: route.Place{Port: 80}, Rules: rules}, {Place: route.Place{Port: 443}, TLS: true, Rules: rules}}, nil))
}

// when is a rule for a prefix.
func when(prefix string, a route.Action) route.GatewayRule {
	return route.GatewayRule{Hosts: []string{""}, When: []route.Condition{{Path: prefix}}, Rule: &route.Rule{Kind: "HTTPRoute", Owner: route.Owner{Namespace: "shop", Name: "r"}, Do: &a}}
}

func all(b *route.Backend) []route.Share { return []route.Share{{Backend: b, Weight: 1}} }

func fields(pairs ...string) (out []route.Field) {
	for i := 0; i < len(pairs); i += 2 {
		out = append(out, route.Field{Name: pairs[i], Value: pairs[i+1]})
	}
	return out
}

// TestRedirects: what is not said stays as it is, and a port that follows from
// the scheme is left out.
func TestRedirects(t *testing.T) {
	k := newKit(t, Config{})
	for _, tt := range []struct {
		redirect   route.Redirect
		from, want string
	}{
		{route.Redirect{Code: 302}, "http://a.example/x/y?q=%20", "http://a.example/x/y?q=%20"},
		{route.Redirect{Code: 301, Scheme: "https"}, "http://a.example/x", "https://a.example/x"},
		{route.Redirect{Code: 302, Host: "b.example"}, "https://a.example/x", "https://b.example/x"},
		{route.Redirect{Code: 302, Port: 8080}, "http://a.example/x", "http://a.example:8080/x"},
		{route.Redirect{Code: 302, Scheme: "https", Port: 443}, "http://a.example/x", "https://a.example/x"},
		{route.Redirect{Code: 302, Scheme: "http", Port: 443}, "http://a.example/x", "http://a.example:443/x"},
		{route.Redirect{Code: 303, Path: &route.Path{Value: "/new"}}, "http://a.example/x/y?q=1", "http://a.example/new?q=1"},
		{route.Redirect{Code: 307, Path: &route.Path{Value: "/new", Prefix: true}}, "http://a.example/x/y/z", "http://a.example/new/y/z"},
		{route.Redirect{Code: 308, Path: &route.Path{Value: "/", Prefix: true}}, "http://a.example/x/y", "http://a.example/y"},
		{route.Redirect{Code: 302, Path: &route.Path{Value: "", Prefix: true}}, "http://a.example/x", "http://a.example/"},
		{route.Redirect{Code: 302}, "http://[fd00::1]/x", "http://[fd00::1]/x"},
	} {
		a := route.Action{Redirect: &tt.redirect}
		a.Headers.Response.Set = fields("X-Why", "moved")
		k.gateway(when("/x", a))
		code, _, h := k.ask("GET", tt.from, "")
		if code != tt.redirect.Code || h.Get("Location") != tt.want || h.Get("X-Why") != "moved" {
			t.Errorf("%s: %d to %q, want %s", tt.from, code, h.Get("Location"), tt.want)
		}
	}
	conn, err := net.Dial("tcp", k.plain)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	fmt.Fprint(conn, "GET /x HTTP/1.0\r\n\r\n")
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusBadRequest {
		t.Errorf("a request without a host: %d to %q", resp.StatusCode, resp.Header.Get("Location"))
	}
}

// TestFilters: what the backend and the client get of a request whose route
// changes it.
func TestFilters(t *testing.T) {
	k := newKit(t, Config{})
	echo := backend(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-From", "backend")
		w.Header().Set("X-Gone", "1")
		_ = json.NewEncoder(w).Encode(map[string]any{"host": r.Host, "uri": r.RequestURI, "header": r.Header})
	})
	for _, tt := range []struct {
		rewrite           route.Rewrite
		prefix, from      string
		wantHost, wantURI string
	}{
		{route.Rewrite{}, "/a", "/a/b?q=;", "a.example", "/a/b?q=;"},
		{route.Rewrite{Host: "b.example"}, "/a", "/a", "b.example", "/a"},
		{route.Rewrite{Path: &route.Path{Value: "/x", Prefix: true}}, "/a", "/a/b%2Fc", "a.example", "/x/b%2Fc"},
		{route.Rewrite{Path: &route.Path{Value: "/x/", Prefix: true}}, "/a/", "/a/b", "a.example", "/x/b"},
		{route.Rewrite{Path: &route.Path{Value: "/", Prefix: true}}, "/a", "/a", "a.example", "/"},
		{route.Rewrite{Path: &route.Path{Value: "/x", Prefix: true}}, "/", "/b", "a.example", "/x/b"},
		{route.Rewrite{Path: &route.Path{Value: "/x y"}}, "/a", "/a/b?q", "a.example", "/x%20y?q"},
	} {
		a := route.Action{Rewrite: tt.rewrite, Shares: all(to("shop/web:80", echo))}
		a.Headers.Request = route.Edit{Set: fields("X-Set", "new"), Add: fields("X-Add", "more"), Remove: []string{"X-Remove"}}
		a.Headers.Response = route.Edit{Add: fields("X-From", "route"), Remove: []string{"X-Gone"}}
		a.Shares[0].Headers.Request.Set = fields("X-Share", "its")
		a.Shares[0].Headers.Response.Set = fields("X-Share", "its")
		k.gateway(when(tt.prefix, a))
		code, body, h := k.ask("GET", "http://a.example"+tt.from, "", "X-Set", "old", "X-Add", "one", "X-Remove", "it", "X-Real-Ip", "6.6.6.6")
		var got struct {
			Host, URI string
			Header    http.Header
		}
		if err := json.Unmarshal([]byte(body), &got); code != 200 || err != nil {
			t.Fatal(code, body, err)
		}
		if got.Host != tt.wantHost || got.URI != tt.wantURI {
			t.Errorf("%s: %s %s", tt.from, got.Host, got.URI)
		}
		g := got.Header
		if g.Get("X-Set") != "new" || fmt.Sprint(g["X-Add"]) != "[one more]" || g.Get("X-Remove") != "" || g.Get("X-Share") != "its" || g.Get("X-Real-Ip") != "127.0.0.1" || g.Get("X-Forwarded-Host") != "a.example" {
			t.Errorf("the backend got %v", g)
		}
		if fmt.Sprint(h["X-From"]) != "[backend route]" || h.Get("X-Gone") != "" || h.Get("X-Share") != "its" {
			t.Errorf("the client got %v", h)
		}
	}
	if line := k.log.String(); !strings.Contains(line, `"httproute":"shop/r"`) || !strings.Contains(line, `"backend":"shop/web:80"`) {
		t.Error(line)
	}
}

// TestShares: weights are kept to, and each share has its own fault.
func TestShares(t *testing.T) {
	k := newKit(t, Config{})
	say := func(s string) netip.AddrPort {
		return backend(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, s) })
	}
	k.gateway(when("/", route.Action{Shares: []route.Share{
		{Backend: to("a", say("a")), Weight: 90}, {Backend: to("b", say("b")), Weight: 10}, {Backend: to("c", say("c"))},
	}}))
	seen := map[string]int{}
	for range 500 {
		_, body, _ := k.ask("GET", "http://a.example/", "")
		seen[body]++
	}
	// 10 % of 500 is 50; less than 15 or more than 110 comes by chance less than
	// once in 10⁷.
	if seen["b"] < 15 || seen["b"] > 110 || seen["a"]+seen["b"] != 500 {
		t.Error(seen)
	}
	for _, tt := range []struct {
		name   string
		kind   string
		shares []route.Share
		code   int
		says   string
	}{
		{"no backend", "HTTPRoute", nil, 500, "HTTPRoute shop/r has no backend"},
		{"no weight", "HTTPRoute", []route.Share{{Backend: to("a")}}, 500, "no backend with a weight"},
		{"broken", "HTTPRoute", []route.Share{{Broken: "Service a/b does not exist", Weight: 1}}, 500, "Service a/b does not exist"},
		{"broken, of gRPC", "GRPCRoute", []route.Share{{Broken: "Service a/b does not exist", Weight: 1}}, 503, "does not exist"},
		{"not ready", "HTTPRoute", all(to("a/b:80")), 503, "a/b:80 has no ready endpoints"},
	} {
		r := when("/", route.Action{Shares: tt.shares})
		r.Rule.Kind = tt.kind
		k.gateway(r)
		if code, body, _ := k.ask("GET", "http://a.example/", ""); code != tt.code || !strings.Contains(body, tt.says) {
			t.Errorf("%s: %d %s", tt.name, code, body)
		}
	}
	if code, body, _ := k.ask("GET", "http://a.example/", ""); code != 503 {
		t.Error(code, body)
	}
}

// TestTimeouts: the route's hold, for the whole request and for one endpoint, and
// the proxy's own does not hold beside them.
func TestTimeouts(t *testing.T) {
	k := newKit(t, Config{ResponseTimeout: 50 * time.Millisecond})
	over := make(chan struct{})
	defer close(over)
	slow := backend(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/begun" {
			_, _ = io.WriteString(w, "some")
			_ = http.NewResponseController(w).Flush()
		}
		select {
		case <-over:
		case <-r.Context().Done():
		}
	})
	late := backend(t, func(w http.ResponseWriter, _ *http.Request) {
		time.Sleep(200 * time.Millisecond)
		_, _ = io.WriteString(w, "late")
	})
	k.gateway(
		when("/late", route.Action{Shares: all(to("a/late:80", late)), NoResponseTimeout: true}),
		when("/all", route.Action{Shares: all(to("a/b:80", slow)), Timeout: 100 * time.Millisecond, NoResponseTimeout: true}),
		when("/begun", route.Action{Shares: all(to("a/b:80", slow)), Try: time.Second, NoResponseTimeout: true}),
		when("/one", route.Action{Shares: all(to("a/b:80", slow)), Try: 100 * time.Millisecond, NoResponseTimeout: true}),
		when("/enough", route.Action{Shares: all(to("a/late:80", late)), Try: time.Minute, Timeout: time.Minute, NoResponseTimeout: true}),
	)
	for path, want := range map[string]string{"/all": "in the 100ms that the route gives it", "/one": "in the 100ms that the route gives an endpoint"} {
		if code, body, _ := k.ask("GET", "http://a.example"+path, ""); code != 504 || !strings.Contains(body, want) {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	for _, path := range []string{"/late", "/enough"} {
		if code, body, _ := k.ask("GET", "http://a.example"+path, ""); code != 200 || body != "late" {
			t.Errorf("%s: %d %s", path, code, body)
		}
	}
	eventually(t, "an answer has begun", func() bool { // where the endpoint's time is not over before it has
		req, err := http.NewRequestWithContext(t.Context(), "GET", "http://a.example/begun", nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := k.client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		b, err := io.ReadAll(resp.Body)
		if resp.StatusCode == http.StatusOK && err == nil {
			t.Errorf("an answer that stopped half way was taken for whole: %q", b)
		}
		return resp.StatusCode == http.StatusOK
	})
}

// TestPorts: a port opens and closes with the table, answers by its own
// listeners, and shows their certificates.
func TestPorts(t *testing.T) {
	// Open already: a port that is let go of may be another's the next moment.
	holder, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	local := uint16(holder.Addr().(*net.TCPAddr).Port)
	k := newKit(t, Config{Listen: func(_ context.Context, port uint16) (net.Listener, error) {
		if port != local {
			return nil, fmt.Errorf("asked for port %d, not %d", port, local)
		}
		return holder, nil
	}})
	server := httptest.NewTLSServer(nil) // its certificate is for example.com
	server.Close()
	cert := server.TLS.Certificates[0]
	echo := backend(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.WriteString(w, r.Header.Get("X-Forwarded-Port"))
	})
	table, _ := route.Build(nil, nil)
	rule := when("/", route.Action{Shares: all(to("a/b:80", echo))})
	k.Set(route.Merge(table, []route.Listener{{Place: route.Place{Port: 9443}, TLS: true, Certificates: []*tls.Certificate{&cert}, Rules: []route.GatewayRule{rule}}},
		[]route.Bind{{Local: local, Place: route.Place{Port: 9443}, TLS: true}}))
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: server.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs, ServerName: "example.com"}, DisableKeepAlives: true}
	client := http.Client{Transport: transport}
	get := func() (string, error) {
		resp, err := client.Get(fmt.Sprintf("https://127.0.0.1:%d/", local))
		if err != nil {
			return "", err
		}
		defer func() { _ = resp.Body.Close() }()
		b, err := io.ReadAll(resp.Body)
		return string(b), err
	}
	eventually(t, "the port answers", func() bool { got, err := get(); return err == nil && got == "9443" })
	if code, body, _ := k.ask("GET", "http://a.example/", ""); code != 404 {
		t.Error("the listener's rule is served on another port", code, body)
	}
	k.Set(table)
	eventually(t, "the port is closed", func() bool { _, err := get(); return err != nil })
}

// TestClients: a place for clients with a certificate takes no connection of others,
// nor requests over one that was opened before it asked for a certificate.
func TestClients(t *testing.T) {
	// Open already: a port that is let go of may be another's the next moment.
	holder, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	local := uint16(holder.Addr().(*net.TCPAddr).Port)
	k := newKit(t, Config{Listen: func(_ context.Context, port uint16) (net.Listener, error) {
		if port != local {
			return nil, fmt.Errorf("asked for port %d, not %d", port, local)
		}
		return holder, nil
	}})
	server := httptest.NewTLSServer(nil)
	server.Close()
	known := clientCertificate(t)
	authority := x509.NewCertPool()
	authority.AddCert(known.Leaf)
	cert := server.TLS.Certificates[0]
	own, err := selfSigned()
	if err != nil {
		t.Fatal(err)
	}
	echo := backend(t, func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") })
	empty, _ := route.Build(nil, nil)
	at := route.Place{Service: "g", Port: 443}
	set := func(c *route.Clients) {
		k.Set(route.Merge(empty, []route.Listener{{Place: at, TLS: true, Certificates: []*tls.Certificate{&cert}, Clients: c,
			Rules: []route.GatewayRule{when("/", route.Action{Shares: all(to("a/b:80", echo))})}}}, []route.Bind{{Place: at, Local: local, TLS: true}}))
	}
	roots := server.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs
	client := func(show ...tls.Certificate) func() (int, error) {
		// A certificate is shown whoever the server says it wants to have signed it.
		c := http.Client{Transport: &http.Transport{ForceAttemptHTTP2: true, TLSClientConfig: &tls.Config{RootCAs: roots, ServerName: "example.com",
			GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) {
				if len(show) == 0 {
					return &tls.Certificate{}, nil
				}
				return &show[0], nil
			}}}}
		t.Cleanup(c.CloseIdleConnections)
		return func() (int, error) {
			resp, err := c.Get(fmt.Sprintf("https://127.0.0.1:%d/", local))
			if err != nil {
				return 0, err
			}
			defer func() { _ = resp.Body.Close() }()
			_, err = io.Copy(io.Discard, resp.Body)
			return resp.StatusCode, err
		}
	}
	set(nil)
	before := client()
	eventually(t, "the port answers", func() bool { code, err := before(); return err == nil && code == 200 })
	set(&route.Clients{Roots: x509.NewCertPool()})
	if code, err := client(known)(); err == nil {
		t.Errorf("a client that no authority knows got %d", code)
	}
	set(&route.Clients{Roots: authority})
	if code, err := before(); err != nil || code != http.StatusMisdirectedRequest {
		t.Errorf("over a connection of before: %d, %v", code, err)
	}
	if code, err := client(known)(); err != nil || code != 200 {
		t.Errorf("a client with its certificate: %d, %v", code, err)
	}
	for what, get := range map[string]func() (int, error){"without a certificate": client(), "with another's": client(*own)} {
		if code, err := get(); err == nil {
			t.Errorf("a client %s got %d", what, code)
		}
	}
	set(&route.Clients{Roots: authority, Any: true})
	for what, get := range map[string]func() (int, error){"without a certificate": client(), "with another's": client(*own), "with its certificate": client(known)} {
		if code, err := get(); err != nil || code != 200 {
			t.Errorf("any client is let in, but one %s got %d, %v", what, code, err)
		}
	}
}

// clientCertificate is one that has signed itself.
func clientCertificate(t *testing.T) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	cert := &x509.Certificate{
		SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		BasicConstraintsValid: true, IsCA: true, KeyUsage: x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, cert, cert, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("not within a minute: " + what)
		}
	}
}
