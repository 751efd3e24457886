package route

import (
	"cmp"
	"crypto/tls"
	"crypto/x509"
	"iter"
	"net/textproto"
	"net/url"
	"regexp"
	"slices"
	"strings"
)

// Place is where clients come to: a port of the Service in front of the proxies.
type Place struct {
	// Service is the name of the one that a Gateway has to itself; "" is the one
	// that Ingresses have, and Gateways that share it.
	Service string
	Port    uint16
}

// ofIngresses reports whether Ingresses are served there.
func (p Place) ofIngresses() bool { return p.Service == "" && (p.Port == 80 || p.Port == 443) }

// Listener is one of a Gateway's: a place, and the names that it is for. Rules
// are found by the listener with the nearest name alone.
type Listener struct {
	Place
	// Host is a name in lower case, "*." before a name for any number of further
	// labels, or "" for every host.
	Host string
	TLS  bool
	// Certificates are shown to clients that ask for the listener's names: the
	// first that a client can read.
	Certificates []*tls.Certificate
	// Clients are those that the whole place is for; nil: all.
	Clients *Clients
	Rules   []GatewayRule
}

// Clients are those with a certificate that one of Roots has signed.
type Clients struct {
	Roots *x509.CertPool
	// Any takes all others, too.
	Any bool
}

// GatewayRule is a rule of a route that is attached to a listener.
type GatewayRule struct {
	Hosts []string // as Listener.Host
	// When are the conditions of which one has to hold.
	When []Condition
	Rule *Rule
}

// Condition is what a request is compared with: all of it has to hold.
type Condition struct {
	// Path is compared as Match says; "" is "/". With a Pattern, Match Exact and no
	// Path, it is the pattern alone that decides.
	Path    string
	Match   Match
	Pattern *regexp.Regexp // of the path, beside the above; nil: any
	Method  string         // "": any
	Headers []Value
	Query   []Value
}

// Value is what a header or a parameter of the query has to be.
type Value struct {
	Name, Exact string
	Pattern     *regexp.Regexp // in the place of Exact
}

// Request is what rules are found by.
type Request struct {
	Place
	Host   string // as Host returns it
	Path   string // decoded; begins with "/"
	Method string
	Header map[string][]string // by canonical names
	Query  string              // raw
	// ServerName is what the client asked for in its TLS handshake.
	ServerName string
	// Verified: its certificate was.
	Verified bool

	query url.Values
	long  bool
}

// Result is what was found for a request.
type Result struct {
	Rule *Rule // nil: there is none
	// Prefix is that part of the path which the rule was found by.
	Prefix string
	// Refused is set in the place of a rule.
	Refused Rejection
}

// Rejection is why a request is answered without looking further.
type Rejection int

// The refusals of requests.
const (
	None Rejection = iota
	// TooLong: a value is longer than a pattern is ever compared with.
	TooLong
	// Misdirected: the connection was opened for another listener's name, or before
	// clients' certificates were asked for.
	Misdirected
)

// longest is how many bytes a pattern is compared with.
const longest = 8 << 10

// maxName is how long a host's name may be (RFC 1035); longer ones have no rules
// of their own.
const maxName = 253

// names are things by the hosts that they are for; "*." stands for any number of
// labels.
type names[T any] struct {
	exact, wild map[string]*T
	any         *T
}

// at makes what is missing.
func (n *names[T]) at(host string) *T {
	in := &n.exact
	switch after, wild := strings.CutPrefix(host, "*."); {
	case host == "":
		if n.any == nil {
			n.any = new(T)
		}
		return n.any
	case wild:
		in, host = &n.wild, after
	}
	if *in == nil {
		*in = map[string]*T{}
	}
	if (*in)[host] == nil {
		(*in)[host] = new(T)
	}
	return (*in)[host]
}

// near yields what is for a host, the nearest name first.
func (n *names[T]) near(host string) iter.Seq2[specificity, *T] {
	return func(yield func(specificity, *T) bool) {
		if len(host) <= maxName {
			if t := n.exact[host]; t != nil && !yield(byName, t) {
				return
			}
			for rest := host; len(n.wild) > 0; {
				_, parent, ok := strings.Cut(rest, ".")
				if !ok {
					break
				}
				if t := n.wild[parent]; t != nil && !yield(byParent, t) {
					return
				}
				rest = parent
			}
		}
		if n.any != nil {
			yield(byNone, n.any)
		}
	}
}

// specificity is how near a name is.
type specificity int

const (
	byNone specificity = iota
	byParent
	byName
)

// port is what Gateways have on one.
type port struct {
	listeners names[listener]
	clients   *Clients
}

type listener struct {
	certificates []*tls.Certificate
	hosts        names[ruleset]
}

// ruleset are the rules of one host at one listener.
type ruleset struct {
	exact, prefix map[string][]entry
	patterns      []entry
	longest       int // bytes of the longest key of prefix
}

type entry struct {
	*Condition
	rule  *Rule
	order int // among all of the table
}

// Bind is where the proxy takes the connections of clients that come to a place.
type Bind struct {
	Place
	Local uint16
	TLS   bool
}

// Merge returns a table that has the Gateways' listeners beside t's rules. binds
// are their places but those of Ingresses.
func Merge(t *Table, listeners []Listener, binds []Bind) *Table {
	out := *t
	out.gateways, out.binds = map[Place]*port{}, binds
	order := 0
	sets := map[*ruleset]bool{}
	for i := range listeners {
		l := &listeners[i]
		if out.gateways[l.Place] == nil {
			out.gateways[l.Place] = &port{}
		}
		if l.Clients != nil {
			out.gateways[l.Place].clients = l.Clients
		}
		at := out.gateways[l.Place].listeners.at(l.Host)
		at.certificates = append(at.certificates, l.Certificates...)
		for j := range l.Rules {
			r := &l.Rules[j]
			out.count++
			for _, host := range r.Hosts {
				set := at.hosts.at(host)
				sets[set] = true
				for k := range r.When {
					set.add(entry{&r.When[k], r.Rule, order})
					order++
				}
			}
		}
	}
	for s := range sets {
		s.sort()
	}
	return &out
}

func (s *ruleset) add(e entry) {
	if s.exact == nil {
		s.exact, s.prefix = map[string][]entry{}, map[string][]entry{}
	}
	switch key := strings.TrimRight(e.Path, "/"); {
	case e.Match == Prefix:
		s.prefix[key] = append(s.prefix[key], e)
		s.longest = max(s.longest, len(key))
	case e.Pattern != nil && e.Path == "":
		s.patterns = append(s.patterns, e)
	default:
		key = cmp.Or(e.Path, "/")
		s.exact[key] = append(s.exact[key], e)
	}
}

// sort puts entries of the same path into the order in which they are asked.
func (s *ruleset) sort() {
	for _, m := range []map[string][]entry{s.exact, s.prefix} {
		for _, list := range m {
			slices.SortFunc(list, compare)
		}
	}
	slices.SortFunc(s.patterns, func(a, b entry) int {
		return cmp.Or(cmp.Compare(len(b.Pattern.String()), len(a.Pattern.String())), compare(a, b))
	})
}

func compare(a, b entry) int {
	method := func(e entry) int {
		if e.Method != "" {
			return 0
		}
		return 1
	}
	return cmp.Or(
		cmp.Compare(method(a), method(b)),
		cmp.Compare(len(b.Headers), len(a.Headers)),
		cmp.Compare(len(b.Query), len(a.Query)),
		a.rule.Since.Compare(b.rule.Since),
		cmp.Compare(a.rule.Owner.Namespace, b.rule.Owner.Namespace),
		cmp.Compare(a.rule.Owner.Name, b.rule.Owner.Name),
		cmp.Compare(a.order, b.order),
	)
}

func first(list []entry, r *Request) *Rule {
	for i := range list {
		if list[i].holds(r) {
			return list[i].rule
		}
	}
	return nil
}

// find returns the rule of a request: of an exact path, else of a pattern, else
// of the longest prefix.
func (s *ruleset) find(r *Request) (*Rule, string) {
	if rule := first(s.exact[r.Path], r); rule != nil {
		return rule, r.Path
	}
	if rule := first(s.patterns, r); rule != nil {
		return rule, r.Path
	}
	path := r.Path
	if len(path) > s.longest+1 { // so much of it cannot be a key
		path = path[:max(strings.LastIndexByte(path[:s.longest+1], '/'), 0)]
	}
	for {
		if rule := first(s.prefix[path], r); rule != nil {
			return rule, path
		}
		cut := strings.LastIndexByte(path, '/')
		if cut < 0 {
			return nil, ""
		}
		path = path[:cut]
	}
}

func (c *Condition) holds(r *Request) bool {
	if c.Method != "" && c.Method != r.Method || c.Pattern != nil && !r.matches(c.Pattern, r.Path) {
		return false
	}
	for i := range c.Headers {
		h := &c.Headers[i]
		values, ok := r.Header[textproto.CanonicalMIMEHeaderKey(h.Name)]
		if strings.EqualFold(h.Name, "host") {
			values, ok = []string{r.Host}, true
		}
		if !ok || !h.is(r, strings.Join(values, ",")) {
			return false
		}
	}
	if len(c.Query) == 0 {
		return true
	}
	if r.query == nil {
		r.query, _ = url.ParseQuery(r.Query) // what can be read of it counts
	}
	for i := range c.Query {
		q := &c.Query[i]
		if values := r.query[q.Name]; len(values) == 0 || !q.is(r, values[0]) {
			return false
		}
	}
	return true
}

func (v *Value) is(r *Request, s string) bool {
	if v.Pattern != nil {
		return r.matches(v.Pattern, s)
	}
	return s == v.Exact
}

// matches notes what is too long to be compared: the request is refused then,
// since it may be one that a rule is meant to catch.
func (r *Request) matches(p *regexp.Regexp, s string) bool {
	if len(s) > longest {
		r.long = true
		return false
	}
	return p.MatchString(s)
}

// gateway finds the rule of a Gateway's route.
func (t *Table) gateway(r *Request) Result {
	p := t.gateways[r.Place]
	if p == nil {
		return Result{}
	}
	if p.clients != nil && !p.clients.Any && !r.Verified {
		return Result{Refused: Misdirected}
	}
	var at *listener
	for _, l := range p.listeners.near(r.Host) {
		at = l
		break
	}
	if at == nil {
		return Result{}
	}
	if r.ServerName != "" { // whether there is a rule does not matter: another connection may have one
		for _, l := range p.listeners.near(r.ServerName) {
			if l != at {
				return Result{Refused: Misdirected}
			}
			break
		}
	}
	for _, s := range at.hosts.near(r.Host) {
		rule, prefix := s.find(r)
		if r.long {
			return Result{Refused: TooLong}
		}
		if rule != nil {
			return Result{Rule: rule, Prefix: prefix}
		}
	}
	return Result{}
}

// Lookup returns what is for a request. Where Ingresses are served, their
// rules for named hosts and those of Gateways are one: of both kinds the older
// object has the request. Ingresses' rules for every host come last.
func (t *Table) Lookup(r *Request) Result {
	hit := t.gateway(r)
	if !r.ofIngresses() {
		return hit
	}
	none := hit.Rule == nil && hit.Refused == None
	if rule := t.rules.named(r.Host, r.Path); rule != nil && (none || hit.Rule != nil && !hit.Rule.Since.Before(rule.Since)) {
		return Result{Rule: rule}
	}
	if !none {
		return hit
	}
	return Result{Rule: t.Find(r.Host, r.Path)}
}

// PlaceOfPort is the place that clients came to whose connection was taken at a port of
// the proxy's.
func (t *Table) PlaceOfPort(local uint16, secure bool) Place {
	for _, b := range t.binds {
		if b.Local == local {
			return b.Place
		}
	}
	if secure {
		return Place{Port: 443}
	}
	return Place{Port: 80}
}

// Listeners are those beside the Ingresses' ports.
func (t *Table) Listeners() []Bind { return t.binds }

// Gateway reports whether a Gateway has a listener at a place.
func (t *Table) Gateway(at Place) bool { return t.gateways[at] != nil }

// Clients are those that a place is for; nil: all.
func (t *Table) Clients(at Place) *Clients {
	if p := t.gateways[at]; p != nil {
		return p.clients
	}
	return nil
}

// Certificates returns those for a name that a client asks for at a place; the
// nearest name counts, and of equally near ones the Gateway's.
func (t *Table) Certificates(at Place, host string) []*tls.Certificate {
	if p := t.gateways[at]; p != nil {
		for near, l := range p.listeners.near(host) {
			if len(l.certificates) > 0 && (!at.ofIngresses() || near >= t.nearest(host)) {
				return l.certificates
			}
			break
		}
	}
	if c := t.Certificate(host); at.ofIngresses() && c != nil {
		return []*tls.Certificate{c}
	}
	return nil
}

// nearest is how near the Ingresses' certificate for a host is.
func (t *Table) nearest(host string) specificity {
	if t.certificates[host] != nil && host != "" {
		return byName
	}
	if _, parent, ok := strings.Cut(host, "."); ok && t.certificates["*."+parent] != nil {
		return byParent
	}
	return byNone
}
