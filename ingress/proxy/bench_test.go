package proxy

import (
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"net/netip"
	"net/url"
	"testing"

	"github.com/clusterd/clusterd/ingress/route"
)

// BenchmarkProxy compares a request through the proxy with one through the
// library alone, and with none between: backend, proxy and client share the
// processors.
func BenchmarkProxy(b *testing.B) {
	serve := func(h http.Handler) string {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			b.Fatal(err)
		}
		s := &http.Server{Handler: h}
		done := make(chan error, 1)
		go func() { done <- s.Serve(l) }()
		b.Cleanup(func() { _ = s.Close(); <-done })
		return l.Addr().String()
	}
	addr := serve(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") }))
	p := New(Config{})
	table, _ := route.Build([]route.Rule{{Backend: to("a/b:80", netip.MustParseAddrPort(addr))}}, nil)
	p.Set(table)
	alone := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: "http", Host: addr})
	alone.Transport = &http.Transport{MaxIdleConnsPerHost: 32}
	b.Cleanup(func() { p.Close(); alone.Transport.(*http.Transport).CloseIdleConnections() })
	for name, at := range map[string]string{"proxy": serve(p), "library": serve(alone), "none": addr} {
		b.Run(name, func(b *testing.B) {
			transport := &http.Transport{MaxIdleConnsPerHost: 32}
			defer transport.CloseIdleConnections()
			c := http.Client{Transport: transport}
			b.RunParallel(func(pb *testing.PB) {
				for pb.Next() {
					resp, err := c.Get("http://" + at + "/")
					if err != nil {
						b.Error(err)
						return
					}
					_, _ = io.Copy(io.Discard, resp.Body)
					_ = resp.Body.Close()
				}
			})
		})
	}
}

// BenchmarkFind has 10 000 hosts with two paths each.
func BenchmarkFind(b *testing.B) {
	var rules []route.Rule
	name := func(i int) string {
		return string([]byte{byte('a' + i%26), byte('a' + i/26%26), byte('a' + i/676)}) + ".example"
	}
	for i := range 10000 {
		rules = append(rules, route.Rule{Host: name(i), Path: "/"}, route.Rule{Host: name(i), Path: "/api/v1"})
	}
	table, _ := route.Build(rules, nil)
	i := 0
	for b.Loop() {
		if table.Find(name(i%10000), "/api/v1/objects/of/a/kind") == nil {
			b.Fatal("none")
		}
		i++
	}
}
