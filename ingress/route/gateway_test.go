package route

import (
	"crypto/tls"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"
)

// one makes a rule that is known by its name.
func one(name string, since int, hosts []string, when ...Condition) GatewayRule {
	return GatewayRule{Hosts: hosts, When: when, Rule: &Rule{Kind: "HTTPRoute", Owner: Owner{"shop", name}, Since: time.Unix(int64(since), 0), Do: &Action{}}}
}

func name(h Result) string {
	switch {
	case h.Refused == TooLong:
		return "too long"
	case h.Refused == Misdirected:
		return "misdirected"
	case h.Rule == nil:
		return ""
	}
	return h.Rule.Owner.Name
}

// TestPrecedence is the order that the API gives matches: exact path, pattern,
// longest prefix; then method, headers, parameters; then age, name, place.
func TestPrecedence(t *testing.T) {
	every := []string{""}
	header := Value{Name: "x-a", Exact: "1"}
	table := Merge(new(Table), []Listener{{Place: Place{Port: 80}, Rules: []GatewayRule{
		one("root", 9, every, Condition{}),
		one("prefix", 9, every, Condition{Path: "/a"}),
		one("longer", 9, every, Condition{Path: "/a/b/"}),
		one("exact", 9, every, Condition{Path: "/a", Match: Exact}),
		one("pattern", 9, every, Condition{Match: Exact, Pattern: regexp.MustCompile("^(?:/r/[0-9]+)$")}),
		one("longer pattern", 9, every, Condition{Match: Exact, Pattern: regexp.MustCompile("^(?:/r/[0-9][0-9]+)$")}),
		one("post", 9, every, Condition{Path: "/a", Method: "POST"}),
		one("header", 1, every, Condition{Path: "/a", Headers: []Value{header}}),
		one("two headers", 9, every, Condition{Path: "/a", Headers: []Value{header, {Name: "X-B", Pattern: regexp.MustCompile("^(?:[a-c])$")}}}),
		one("query", 1, every, Condition{Path: "/a", Query: []Value{{Name: "q", Exact: "1"}}}),
		one("header and query", 9, every, Condition{Path: "/a", Headers: []Value{header}, Query: []Value{{Name: "q", Exact: "1"}}}),
		one("two", 2, every, Condition{Path: "/age"}),
		one("one", 1, every, Condition{Path: "/age"}),
		one("b", 1, every, Condition{Path: "/name"}),
		one("a", 1, every, Condition{Path: "/name"}),
		one("same", 1, every, Condition{Path: "/place"}), one("same", 1, every, Condition{Path: "/place", Pattern: regexp.MustCompile(".*")}),
	}}}, nil)
	for _, tt := range []struct{ request, headers, want string }{
		{"GET /", "", "root"},
		{"GET /a", "", "exact"},
		{"POST /a", "", "exact"},
		{"GET /a/", "", "prefix"},
		{"GET /ab", "", "root"},
		{"GET /a/b", "", "longer"},
		{"GET /a/bc", "", "prefix"},
		{"POST /a/c", "X-A=1", "post"},
		{"GET /a/c", "X-A=1", "header"},
		{"GET /a/c", "X-A=2", "prefix"},
		{"GET /a/c", "X-A=1&X-B=b", "two headers"},
		{"GET /a/c", "X-A=1&X-B=d", "header"},
		{"GET /a/c?q=1", "", "query"},
		{"GET /a/c?q=1&q=2", "", "query"},
		{"GET /a/c?q=2&q=1", "", "prefix"},
		{"GET /a/c?q=1", "X-A=1", "header and query"},
		{"GET /a/c?q=1&%zz", "", "query"},
		{"GET /r/1", "", "pattern"},
		{"GET /r/12", "", "longer pattern"},
		{"GET /r/x", "", "root"},
		{"GET /r/1/2", "", "root"},
		{"GET /age", "", "one"},
		{"GET /name", "", "a"},
		{"GET /" + strings.Repeat("x", longest), "", "too long"}, // a pattern may be meant to catch it
	} {
		method, target, _ := strings.Cut(tt.request, " ")
		path, query, _ := strings.Cut(target, "?")
		h := http.Header{}
		for _, f := range strings.Split(tt.headers, "&") {
			if k, v, ok := strings.Cut(f, "="); ok {
				h.Add(k, v)
			}
		}
		if got := name(table.Lookup(&Request{Place: Place{Port: 80}, Host: "a.example", Method: method, Path: path, Query: query, Header: h})); got != tt.want {
			t.Errorf("%.40s %s: %q, want %q", tt.request, tt.headers, got, tt.want)
		}
	}
	if h := table.Lookup(&Request{Place: Place{Port: 80}, Path: "/a/b/c"}); h.Prefix != "/a/b" {
		t.Errorf("prefix %q", h.Prefix)
	}
}

// TestHosts: a listener's rules are found by its nearest name alone, and of its
// rules those of the nearest name come first.
func TestHosts(t *testing.T) {
	table := Merge(new(Table), []Listener{
		{Place: Place{Port: 80}, Rules: []GatewayRule{one("any", 1, []string{""}, Condition{}), one("any's x", 1, []string{"x.test"}, Condition{})}},
		{Place: Place{Port: 80}, Host: "*.example", Rules: []GatewayRule{
			one("wild", 1, []string{"*.example"}, Condition{}),
			one("longer", 1, []string{"*.b.example"}, Condition{Path: "/only"}),
			one("a", 1, []string{"a.example"}, Condition{Path: "/only"}),
		}},
		{Place: Place{Port: 80}, Host: "own.example", Rules: []GatewayRule{one("own", 1, []string{"own.example"}, Condition{Path: "/only"})}},
		{Place: Place{Port: 8081}, TLS: true, Rules: []GatewayRule{one("port", 1, []string{""}, Condition{})}},
	}, nil)
	for in, want := range map[string]string{
		"80 other.test /": "any", "80 x.test /": "any's x", "80 example /": "any", "80 z.example /": "wild", "80 y.z.example /": "wild",
		"80 c.b.example /only": "longer", "80 c.b.example /": "wild", "80 a.example /only": "a", "80 a.example /": "wild",
		"80 own.example /only": "own", "80 own.example /": "", "8081 a.example /": "port", "443 a.example /": "", "9 a.example /": "",
		"80 " + strings.Repeat("a.", 200) + "example /": "any",
	} {
		var r Request
		if _, err := fmt.Sscan(in, &r.Port, &r.Host, &r.Path); err != nil {
			t.Fatal(err)
		}
		if got := name(table.Lookup(&r)); got != want {
			t.Errorf("%.40s: %q, want %q", in, got, want)
		}
	}
}

// TestBesideIngresses: of an Ingress and a route for one host the older has it;
// Ingresses for every host come last.
func TestBesideIngresses(t *testing.T) {
	at := func(s int) time.Time { return time.Unix(int64(s), 0) }
	ingress := func(name, host, path string, since int) Rule {
		return Rule{Host: host, Path: path, Owner: Owner{"i", name}, Since: at(since)}
	}
	plain, _ := Build([]Rule{ingress("old", "a.example", "/", 1), ingress("new", "b.example", "/", 9), ingress("part", "c.example", "/i", 1), ingress("all", "", "/", 1)}, nil)
	table := Merge(plain, []Listener{{Place: Place{Port: 80}, Rules: []GatewayRule{one("route", 5, []string{"a.example", "b.example", "c.example"}, Condition{Path: "/"})}}}, nil)
	for host, want := range map[string]string{"a.example/": "old", "b.example/": "route", "c.example/": "route", "c.example/i": "part", "d.example/": "all"} {
		host, path, _ := strings.Cut(host, "/")
		if got := name(table.Lookup(&Request{Place: Place{Port: 80}, Host: host, Path: "/" + path})); got != want {
			t.Errorf("%s: %q, want %q", host, got, want)
		}
		if got, want := plain.Lookup(&Request{Place: Place{Port: 443}, Host: host, Path: "/" + path}).Rule, plain.Find(host, "/"+path); got != want {
			t.Errorf("%s without Gateways: %v, want %v", host, got, want)
		}
	}
	if plain.gateways != nil || table.Len() != plain.Len()+1 {
		t.Error("the table that was merged into changed")
	}
}

// TestCertificates: the nearest name's, the Gateway's before the Ingress's.
func TestCertificates(t *testing.T) {
	var c [6]*tls.Certificate
	for i := range c {
		c[i] = &tls.Certificate{}
	}
	table, _ := Build(nil, []Certificate{{"a.example", c[0]}, {"*.x.example", c[1]}, {"", c[2]}})
	table = Merge(table, []Listener{
		{Place: Place{Port: 443}, Host: "*.example", TLS: true, Certificates: []*tls.Certificate{c[3]}},
		{Place: Place{Port: 443}, Host: "b.example", TLS: true, Certificates: []*tls.Certificate{c[4]}},
		{Place: Place{Port: 8443}, TLS: true, Certificates: []*tls.Certificate{c[5]}},
	}, []Bind{{Local: 10000, Place: Place{Port: 8443}, TLS: true}})
	for in, want := range map[string]int{"443 a.example": 0, "443 y.x.example": 3, "443 b.example": 4, "443 c.example": 3, "443 d.test": 2, "8443 a.example": 5} {
		var port uint16
		var host string
		if _, err := fmt.Sscan(in, &port, &host); err != nil {
			t.Fatal(err)
		}
		if got := table.Certificates(Place{Port: port}, host); len(got) != 1 || got[0] != c[want] {
			t.Errorf("%s: not %d", in, want)
		}
	}
	if table.PlaceOfPort(10000, true).Port != 8443 || table.PlaceOfPort(8443, true).Port != 443 || table.PlaceOfPort(8080, false).Port != 80 {
		t.Error("the wrong port")
	}
}

// TestPlaces: a listener is found at its own Service's port alone, where Ingresses
// are not served.
func TestPlaces(t *testing.T) {
	shown := &tls.Certificate{}
	table, _ := Build([]Rule{{Host: "a.example", Backend: &Backend{}, Owner: Owner{Name: "ingress"}}}, []Certificate{{"", &tls.Certificate{}}})
	at := func(service string, port uint16, route string) Listener {
		return Listener{Place: Place{Service: service, Port: port}, Rules: []GatewayRule{one(route, 5, []string{"a.example"}, Condition{})}}
	}
	table = Merge(table, []Listener{at("x", 80, "x"), at("y", 80, "y")}, []Bind{{Local: 10000, Place: Place{Service: "x", Port: 80}}})
	for place, want := range map[Place]string{{"", 80}: "ingress", {"x", 80}: "x", {"y", 80}: "y", {"y", 443}: "", {"z", 80}: ""} {
		if got := name(table.Lookup(&Request{Place: place, Host: "a.example", Path: "/"})); got != want {
			t.Errorf("%v: %q, want %q", place, got, want)
		}
	}
	if got := table.PlaceOfPort(10000, false); got != (Place{"x", 80}) {
		t.Error(got)
	}
	if c := table.Certificates(Place{"x", 443}, "a.example"); len(c) != 0 {
		t.Error("an Ingress's certificate at a Gateway's own address")
	}
	table = Merge(table, []Listener{{Place: Place{"x", 443}, Certificates: []*tls.Certificate{shown}}}, nil)
	if c := table.Certificates(Place{"x", 443}, "a.example"); len(c) != 1 || c[0] != shown {
		t.Error("not the listener's own certificate")
	}
}

// TestMisdirected: a connection opened for another listener's name is not used,
// whether this one has a rule for the request or not.
func TestMisdirected(t *testing.T) {
	table := Merge(new(Table), []Listener{
		{Place: Place{Port: 443}, Host: "a.example", TLS: true, Rules: []GatewayRule{one("a", 1, []string{"a.example"}, Condition{})}},
		{Place: Place{Port: 443}, Host: "*.example", TLS: true, Rules: []GatewayRule{one("rest", 1, []string{"*.example"}, Condition{})}},
		{Place: Place{Port: 443}, TLS: true},
	}, nil)
	for in, want := range map[string]string{"a.example a.test": "misdirected", "b.test a.test": "", "b.test a.example": "misdirected", "a.example a.example": "a", "b.example a.example": "misdirected", "b.example c.example": "rest", " b.example": "rest"} {
		server, host, _ := strings.Cut(in, " ")
		if got := name(table.Lookup(&Request{Place: Place{Port: 443}, Host: host, Path: "/", ServerName: server})); got != want {
			t.Errorf("%s: %q, want %q", in, got, want)
		}
	}
}

// TestClients: of a place that is for some clients, no other is answered.
func TestClients(t *testing.T) {
	table := Merge(new(Table), []Listener{
		{Place: Place{"g", 443}, Host: "a.example", TLS: true, Clients: &Clients{}, Rules: []GatewayRule{one("a", 1, []string{"a.example"}, Condition{})}},
		{Place: Place{"g", 444}, TLS: true, Clients: &Clients{Any: true}, Rules: []GatewayRule{one("any", 1, []string{""}, Condition{})}},
		{Place: Place{"g", 445}, TLS: true, Rules: []GatewayRule{one("all", 1, []string{""}, Condition{})}},
	}, nil)
	for _, tt := range []struct {
		port     uint16
		host     string
		verified bool
		want     string
	}{
		{443, "a.example", true, "a"}, {443, "a.example", false, "misdirected"}, {443, "b.example", false, "misdirected"}, {443, "b.example", true, ""},
		{444, "a.example", false, "any"}, {445, "a.example", false, "all"},
	} {
		if got := name(table.Lookup(&Request{Place: Place{"g", tt.port}, Host: tt.host, Path: "/", Verified: tt.verified})); got != tt.want {
			t.Errorf("%+v: %q", tt, got)
		}
	}
	if table.Clients(Place{"g", 443}) == nil || table.Clients(Place{"g", 445}) != nil || table.Clients(Place{"", 443}) != nil {
		t.Error("the wrong places have clients")
	}
}

func TestDraw(t *testing.T) {
	a := Action{Shares: []Share{{Weight: 1, Broken: "a"}, {Weight: 0, Broken: "none"}, {Weight: 3, Broken: "b"}}}
	got := ""
	for i := range a.Total() {
		got += a.Draw(i).Broken
	}
	if got != "abbb" || new(Action).Draw(0) != nil {
		t.Error(got)
	}
}

func thousand() []Listener {
	l := Listener{Place: Place{Port: 80}}
	for i := range 1000 {
		l.Rules = append(l.Rules, one(fmt.Sprint(i), i, []string{fmt.Sprintf("h%d.example", i)}, Condition{Path: "/a"}, Condition{Path: "/b", Match: Exact}))
	}
	return []Listener{l}
}

// BenchmarkMerge has 1 000 routes with a host and two matches each.
func BenchmarkMerge(b *testing.B) {
	all := thousand()
	for b.Loop() {
		Merge(new(Table), all, nil)
	}
}

func BenchmarkAsk(b *testing.B) {
	table := Merge(new(Table), thousand(), nil)
	for b.Loop() {
		if table.Lookup(&Request{Place: Place{Port: 80}, Host: "h500.example", Path: "/a/b/c"}).Rule == nil {
			b.Fatal("none")
		}
	}
}

// FuzzAsk: no request ends in a panic or in a rule of another host.
func FuzzAsk(f *testing.F) {
	table := Merge(new(Table), []Listener{{Place: Place{Port: 80}, Rules: []GatewayRule{
		one("a", 1, []string{"a.example"}, Condition{Path: "/a/b", Query: []Value{{Name: "q", Exact: "1"}}}),
		one("wild", 1, []string{"*.example"}, Condition{Match: Exact, Pattern: regexp.MustCompile("^/[a-z]+$")}),
	}}}, nil)
	f.Add("A.example:80", "/a/b/c", "q=1")
	f.Add("b.example", "/x", "%")
	f.Add("", "", "")
	f.Fuzz(func(t *testing.T, host, path, query string) {
		h := Host(host)
		hit := table.Lookup(&Request{Place: Place{Port: 80}, Host: h, Path: path, Query: query})
		if name(hit) == "a" && (h != "a.example" || !strings.HasPrefix(path, "/a/b")) || name(hit) == "wild" && !strings.HasSuffix(h, ".example") {
			t.Errorf("%q %q: %+v", host, path, hit)
		}
	})
}
