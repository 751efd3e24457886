package route

import (
	"crypto/tls"
	"strings"
	"testing"
	"time"
)

func TestFind(t *testing.T) {
	at := func(s int) time.Time { return time.Unix(int64(s), 0) }
	backend := func(name string) *Backend { return &Backend{Name: name} }
	table, hidden := Build([]Rule{
		{Host: "a.example", Path: "/", Backend: backend("root")},
		{Host: "a.example", Path: "/shop", Backend: backend("shop")},
		{Host: "a.example", Path: "/shop/cart/", Backend: backend("cart")},
		{Host: "a.example", Path: "/shop", Match: Exact, Backend: backend("front")},
		{Host: "b.example", Path: "/only", Backend: backend("only")},
		{Host: "b.example", Default: true, Backend: backend("b's default")},
		{Host: "*.example", Path: "/wild", Backend: backend("wild")},
		{Path: "/everywhere", Backend: backend("everywhere")},
		{Default: true, Backend: backend("default")},
		{Host: "c.example", Path: "/", Backend: backend("younger"), Since: at(2), Owner: Owner{"a", "a"}},
		{Host: "c.example", Path: "/", Backend: backend("older"), Since: at(1), Owner: Owner{"z", "z"}},
		{Host: "c.example", Path: "/x", Backend: backend("second"), Since: at(1), Owner: Owner{"b", "b"}},
		{Host: "c.example", Path: "/x/", Backend: backend("first"), Since: at(1), Owner: Owner{"a", "b"}},
	}, nil)
	if len(hidden) != 2 || hidden[0].Backend.Name != "second" || hidden[1].Backend.Name != "younger" || table.Len() != 11 {
		t.Errorf("hidden: %v of %d", hidden, table.Len())
	}
	for _, tt := range []struct{ host, path, want string }{
		{"a.example", "/", "root"},
		{"a.example", "/shopping", "root"},
		{"a.example", "/shop", "front"},
		{"a.example", "/shop/", "shop"},
		{"a.example", "/shop/1", "shop"},
		{"a.example", "/shop/cart", "cart"},
		{"a.example", "/shop/cart/1", "cart"},
		{"a.example", "/shop/carts", "shop"},
		{"a.example", "/shop//cart", "shop"},
		{"a.example", "//shop", "root"},
		{"a.example", "/Shop", "root"},
		{"a.example", "/" + strings.Repeat("/x", 50000), "root"},
		{"a.example", "/shop/cart" + strings.Repeat("/", 50000), "cart"},
		{"b.example", "/only/this", "only"},
		{"b.example", "/", "b's default"},
		{"b.example", "/wild", "wild"}, // rules of other hosts come before defaults
		{"b.example", "/everywhere", "everywhere"},
		{"x.example", "/wild/1", "wild"},
		{"x.example", "/", "default"},
		{"y.x.example", "/wild", "default"}, // a wildcard is one label
		{"example", "/wild", "default"},
		{"", "/everywhere", "everywhere"},
		{"c.example", "/", "older"},
		{"c.example", "/x/y", "first"},
	} {
		r := table.Find(tt.host, tt.path)
		if r == nil || r.Backend.Name != tt.want {
			t.Errorf("%q %.40q: got %+v, want %s", tt.host, tt.path, r, tt.want)
		}
	}
	none, _ := Build([]Rule{{Host: "a.example", Path: "/a"}}, nil)
	for _, path := range []string{"/", "/b", "/aa", ""} {
		if r := none.Find("a.example", path); r != nil {
			t.Errorf("%q: %+v", path, r)
		}
	}
	if r := new(Table).Find("a", "/"); r != nil {
		t.Errorf("an empty table answers %+v", r)
	}
}

func TestCertificate(t *testing.T) {
	one, wild, rest := &tls.Certificate{}, &tls.Certificate{}, &tls.Certificate{}
	table, _ := Build(nil, []Certificate{{"a.example", one}, {"a.example", rest}, {"*.example", wild}})
	if table.Certificate("a.example") != one || table.Certificate("b.example") != wild || table.Certificate("c.b.example") != nil || table.Certificate("") != nil {
		t.Error("the wrong certificate")
	}
	table, _ = Build(nil, []Certificate{{"", rest}})
	if table.Certificate("a.example") != rest {
		t.Error("no certificate for the rest")
	}
}

func TestHost(t *testing.T) {
	for in, want := range map[string]string{
		"A.Example": "a.example", "a.example:8080": "a.example", "a.example.": "a.example", "a.example.:80": "a.example",
		"[FD00::1]:80": "fd00::1", "[fd00::1]": "fd00::1", "10.0.0.1:80": "10.0.0.1", "": "", ":80": "", "[": "[",
	} {
		if got := Host(in); got != want {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
}

// FuzzFind: no request ends in a panic or in a rule of another host.
func FuzzFind(f *testing.F) {
	table, _ := Build([]Rule{{Host: "a.example", Path: "/a/b"}, {Host: "*.example", Path: "/"}, {Path: "/x", Match: Exact}}, nil)
	f.Add("A.example:80", "/a/b/c")
	f.Add("[::1]:1", "//")
	f.Add("", "")
	f.Fuzz(func(t *testing.T, host, path string) {
		h := Host(host)
		r := table.Find(h, path)
		if r != nil && r.Host == "a.example" && (h != "a.example" || !strings.HasPrefix(path, "/a/b")) || r != nil && r.Match == Exact && path != "/x" {
			t.Errorf("%q %q: %+v", host, path, r)
		}
	})
}
