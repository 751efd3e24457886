// Package route decides which backend a request goes to: rules are compiled
// into a Table, which is never altered afterwards, so that any number of
// goroutines may ask it while the next one is made. It knows neither HTTP
// connections nor objects of the API.
package route

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Protocol is what is spoken to a backend.
type Protocol string

// The protocols of backends.
const (
	HTTP  Protocol = "http"
	HTTPS Protocol = "https" // the backend's certificate is not verified
	H2C   Protocol = "h2c"   // HTTP/2 without TLS and without an upgrade, as gRPC is spoken
)

// Backend is where requests may be sent.
type Backend struct {
	Name      string // "shop/web:http", for people
	Protocol  Protocol
	Endpoints []netip.AddrPort
	// TLS is how the backend's certificate is verified, with HTTPS; nil: it is not.
	TLS *TLS
	// Sticky sends all requests of a client's address to one endpoint.
	Sticky bool
	// Fault says in a sentence why there can be no endpoints; "": there are none
	// at the moment.
	Fault string
}

// TLS says which certificate a backend has to have.
type TLS struct {
	Key        string // of equal ones the same, of others another
	ServerName string // that is asked for
	Roots      *x509.CertPool
	// Hosts and URIs are names of which the certificate has to have one; of none,
	// ServerName.
	Hosts, URIs []string
	// Certificate is shown to a backend that asks for one; nil: none is.
	Certificate *tls.Certificate
}

// Match is how a rule's path is compared.
type Match int

const (
	// Prefix matches element by element: "/a" matches "/a", "/a/" and "/a/b",
	// not "/ab".
	Prefix Match = iota
	// Exact matches the path as it is.
	Exact
)

// Owner names the object that a rule is from.
type Owner struct{ Namespace, Name string }

// String is NAMESPACE/NAME.
func (o Owner) String() string { return o.Namespace + "/" + o.Name }

// Rule sends the requests of one host and path to a backend.
type Rule struct {
	// Host is a name in lower case, "*." before a name for one more label, or ""
	// for every host.
	Host    string
	Path    string // "" is "/"
	Match   Match
	Backend *Backend
	// Default rules are asked after all others, of any host.
	Default bool
	// Redirect answers plain requests with the same address under https.
	Redirect bool
	Owner    Owner
	// Kind is that of the owner; "" is Ingress.
	Kind string
	// Do is what a Gateway's route asks for; nil for Ingresses. Its rules have no
	// Host, Path and Backend.
	Do *Action
	// Since decides between rules of the same host and path: the oldest owner's
	// has them, and of equally old ones the first by name.
	Since time.Time
}

// Certificate is what is shown to clients that ask for a host.
type Certificate struct {
	Host string // as Rule.Host; "" for clients that ask for a host which no other certificate is for
	Pair *tls.Certificate
}

// Table holds compiled rules. It is immutable; the zero value has none.
type Table struct {
	rules, defaults hosts
	certificates    map[string]*tls.Certificate
	count           int
	gateways        map[Place]*port
	binds           []Bind
}

// hosts are rules by the kind of host they name. Wildcards are kept under the
// name after "*.".
type hosts struct {
	exact, wild map[string]*paths
	any         paths
}

// paths are the rules of one host.
type paths struct {
	exact map[string]*Rule
	// prefix has no slash at the end of its keys: "/" is "".
	prefix  map[string]*Rule
	longest int // bytes of the longest key of prefix
}

// Build compiles rules. It also returns those that can never match, because an
// older rule has their host and path.
func Build(rules []Rule, certificates []Certificate) (t *Table, hidden []Rule) {
	t = &Table{rules: newHosts(), defaults: newHosts(), certificates: map[string]*tls.Certificate{}}
	rules = slices.Clone(rules)
	slices.SortStableFunc(rules, func(a, b Rule) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.Owner.Namespace, b.Owner.Namespace), cmp.Compare(a.Owner.Name, b.Owner.Name))
	})
	for i := range rules {
		r := &rules[i]
		in := &t.rules
		if r.Default {
			in = &t.defaults
		}
		if !in.of(r.Host).add(r) {
			hidden = append(hidden, *r)
			continue
		}
		t.count++
	}
	for _, c := range certificates {
		if t.certificates[c.Host] == nil {
			t.certificates[c.Host] = c.Pair
		}
	}
	return t, hidden
}

func newHosts() hosts { return hosts{exact: map[string]*paths{}, wild: map[string]*paths{}} }

func (h *hosts) of(host string) *paths {
	names := h.exact
	switch after, wild := strings.CutPrefix(host, "*."); {
	case host == "":
		return &h.any
	case wild:
		names, host = h.wild, after
	}
	if names[host] == nil {
		names[host] = &paths{}
	}
	return names[host]
}

func (p *paths) add(r *Rule) bool {
	if p.exact == nil {
		p.exact, p.prefix = map[string]*Rule{}, map[string]*Rule{}
	}
	in, key := p.exact, cmp.Or(r.Path, "/")
	if r.Match == Prefix {
		in, key = p.prefix, strings.TrimRight(key, "/")
		p.longest = max(p.longest, len(key))
	}
	if in[key] != nil {
		return false
	}
	in[key] = r
	return true
}

// find returns the rule of the path: an exact one, else that of the longest
// prefix. What it costs depends on the rules' lengths, not on the path's.
func (p *paths) find(path string) *Rule {
	if p == nil {
		return nil
	}
	if r := p.exact[path]; r != nil {
		return r
	}
	if len(path) > p.longest+1 { // so much of it cannot be a key
		path = path[:max(strings.LastIndexByte(path[:p.longest+1], '/'), 0)]
	}
	for {
		if r := p.prefix[path]; r != nil {
			return r
		}
		cut := strings.LastIndexByte(path, '/')
		if cut < 0 {
			return nil
		}
		path = path[:cut]
	}
}

func (h *hosts) find(host, path string) *Rule {
	if r := h.named(host, path); r != nil {
		return r
	}
	return h.any.find(path)
}

// named is find without the rules for every host.
func (h *hosts) named(host, path string) *Rule {
	if r := h.exact[host].find(path); r != nil {
		return r
	}
	if _, parent, ok := strings.Cut(host, "."); ok {
		return h.wild[parent].find(path)
	}
	return nil
}

// Find returns the rule for a request; nil: there is none. host is as Host
// returns it; path begins with "/" and is decoded. The host's own rules come
// before those of a wildcard, these before those of every host, and default
// rules last in the same order.
func (t *Table) Find(host, path string) *Rule {
	if r := t.rules.find(host, path); r != nil {
		return r
	}
	return t.defaults.find(host, path)
}

// Certificate returns the one for a host that a client asks for; nil: there is
// none.
func (t *Table) Certificate(host string) *tls.Certificate {
	if c := t.certificates[host]; c != nil {
		return c
	}
	if _, parent, ok := strings.Cut(host, "."); ok {
		if c := t.certificates["*."+parent]; c != nil {
			return c
		}
	}
	return t.certificates[""]
}

// Len is how many rules there are.
func (t *Table) Len() int { return t.count }

// Host brings a request's host into the form of rules: lower case, without a
// port and without the root's dot.
func Host(s string) string {
	if bracket := strings.IndexByte(s, ']'); strings.HasPrefix(s, "[") && bracket > 0 {
		return strings.ToLower(s[1:bracket])
	}
	if colon := strings.LastIndexByte(s, ':'); colon >= 0 {
		s = s[:colon]
	}
	return strings.ToLower(strings.TrimSuffix(s, "."))
}
