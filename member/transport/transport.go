// Package transport is the node's one port. Every connection is TLS; what it
// is for is agreed in the handshake (ALPN): the API, raft, gossip's streams,
// node calls, agents' tunnels, members' questions, or joining. Protocols between nodes are
// handed on only when the peer proved with its key that it is a node of this
// cluster, of a role that may use them.
package transport

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/clusterd/clusterd/loglimit"
	"github.com/clusterd/clusterd/member/pki"
)

// Protocols beside HTTP. A number changes when a protocol is no longer
// understood by older nodes.
const (
	Raft   = "clusterd-raft/1"
	Gossip = "clusterd-gossip/1"
	Node   = "clusterd-node/2"   // HTTP/1.1 to a node's agent, from servers alone, see Announce
	Member = "clusterd-member/1" // HTTP/1.1, what any node may ask a server
	Join   = "clusterd-join/1"   // HTTP/1.1, the one protocol for strangers
	Tunnel = "clusterd-tunnel/2" // yamux, by which servers call the agent that dialled
)

// former are protocols by the names of those that take their place: the same but for
// who a call is for, which older nodes do not say and do not understand.
var former = map[string]string{Node: "clusterd-node/1", Tunnel: "clusterd-tunnel/1"}

// protocols are the roles that may dial and answer each.
var protocols = map[string]struct{ dials, answers []pki.Role }{
	Raft:   {dials: servers, answers: servers},
	Gossip: {dials: servers, answers: servers},
	Node:   {dials: servers, answers: all},
	Member: {dials: all, answers: servers},
	Join:   {dials: all, answers: servers}, // and strangers dial
	Tunnel: {dials: agents, answers: servers},
}

var (
	servers = []pki.Role{pki.Server}
	agents  = []pki.Role{pki.Agent}
	all     = []pki.Role{pki.Server, pki.Agent}
)

// handshakeTimeout bounds what a silent or slow stranger can hold.
const handshakeTimeout = 10 * time.Second

// Identity is what a node shows and trusts. Certificate is asked at each
// handshake, so that a renewed certificate needs no restart.
type Identity struct {
	Certificate func() *tls.Certificate // leaf, then the authority
	// Shown is what clients of the API and joiners are shown, of the authority with
	// that id if there is one; nil: Certificate.
	Shown func(authority string) *tls.Certificate
	// Roots are the authorities that may have signed a certificate which says this of
	// itself (pki.Trust.Roots).
	Roots func(*x509.Certificate) *x509.CertPool
	// Revoked reports whether the key with that id may no longer take part;
	// nil: none is.
	Revoked func(id string) bool
	// Sessions are resumed by Dial; nil: each connection takes a full handshake.
	Sessions *Sessions
	// Now is the time by which certificates are judged; nil: time.Now.
	Now func() time.Time
}

func (id Identity) now() time.Time {
	if id.Now != nil {
		return id.Now()
	}
	return time.Now()
}

// Port listens on one address and splits what arrives by protocol.
type Port struct {
	ln    net.Listener
	id    Identity
	log   *slog.Logger
	lines *loglimit.Logger // what strangers cause
	http  *queue
	split map[string]*queue
	live  live
	// strangers are the connections of those who have proved nothing.
	strangers unauthenticatedConns
}

// Listen opens the port. It accepts nothing before Run.
func Listen(addr netip.AddrPort, id Identity, log *slog.Logger) (*Port, error) {
	ln, err := net.Listen("tcp", addr.String())
	if err != nil {
		return nil, fmt.Errorf("listen for cluster traffic: %w", err)
	}
	p := &Port{ln: ln, id: id, log: log, lines: loglimit.New(log, linesEvery), http: newQueue(ln.Addr()), split: map[string]*queue{}}
	for proto := range protocols {
		p.split[proto] = newQueue(ln.Addr())
		if old, had := former[proto]; had {
			p.split[old] = p.split[proto]
		}
	}
	return p, nil
}

// ListenNode opens an agent's port: node calls and nothing else.
func ListenNode(addr netip.AddrPort, id Identity, log *slog.Logger) (*Port, error) {
	p, err := Listen(addr, id, log)
	if err != nil {
		return nil, err
	}
	for proto := range p.split {
		if proto != Node && proto != former[Node] {
			delete(p.split, proto)
		}
	}
	p.http.Close()
	p.http = nil
	return p, nil
}

// HTTP returns the listener of the API's connections: *tls.Conn, handshake
// done, "h2" or HTTP/1.1. The peer's certificate is not verified here: the
// API server's authenticator does, and answers 401 rather than an alert.
func (p *Port) HTTP() net.Listener { return p.http }

// Protocol returns the listener of one of the protocols above. Peers of all
// but Join are verified nodes; PeerOf tells which.
func (p *Port) Protocol(name string) net.Listener {
	q, ok := p.split[name]
	if !ok {
		panic("transport: unknown protocol " + name)
	}
	return q
}

// HTTPOver is Protocol for the protocols that are HTTP/1.1 inside. Its
// connections do not show that they are TLS: net/http would look for a handler
// of the protocol's name, find none and hang up.
func (p *Port) HTTPOver(name string) net.Listener { return plainListener{p.Protocol(name)} }

type plainListener struct{ net.Listener }

func (l plainListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return plainConn{c}, nil
}

// plainConn shows nothing of TLS but to PeerOf.
type plainConn struct{ net.Conn }

// Over is a connection that runs inside another, whose peer is its peer, too.
func Over(c, below net.Conn) net.Conn { return overConn{c, below} }

type overConn struct {
	net.Conn
	below net.Conn
}

// Addr is where the port listens.
func (p *Port) Addr() netip.AddrPort { return p.ln.Addr().(*net.TCPAddr).AddrPort() }

// Run accepts connections until ctx ends, then closes every listener it gave
// out, and waits for handshakes under way.
func (p *Port) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	defer p.Close()
	stop := context.AfterFunc(ctx, func() { p.ln.Close() })
	defer stop()
	config := p.serverConfig()
	for {
		raw, err := p.ln.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			// Out of descriptors, most likely: do not spin.
			p.lines.Log(ctx, slog.LevelWarn, "accept", "a connection could not be accepted", "err", err)
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(100 * time.Millisecond):
			}
			continue
		}
		leave := p.strangers.enter(raw.RemoteAddr())
		if leave == nil {
			raw.Close()
			p.lines.Log(ctx, slog.LevelWarn, "strangers", "a connection was closed: too many unauthenticated connections, from one address or in all", "peer", raw.RemoteAddr())
			continue
		}
		wg.Go(func() {
			below := &liveConn{Conn: raw, all: &p.live, leave: leave}
			p.handshake(ctx, below, tls.Server(below, config))
		})
	}
}

// Close closes the port and all its listeners. Run does it too.
func (p *Port) Close() error {
	err := p.ln.Close()
	if p.http != nil {
		p.http.Close()
	}
	for _, q := range p.split {
		q.Close()
	}
	return err
}

func (p *Port) serverConfig() *tls.Config {
	// A later version of a protocol comes first: what is offered is taken in this order.
	protos := slices.Sorted(maps.Keys(p.split))
	slices.Reverse(protos)
	if p.http != nil {
		protos = append([]string{"h2", "http/1.1"}, protos...)
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS12,
		CipherSuites: authenticated,
		NextProtos:   protos,
		ClientAuth:   tls.RequestClientCert,
		GetCertificate: func(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
			if p.id.Shown != nil && p.forStrangers(hello.SupportedProtos) {
				authority, _ := strings.CutSuffix(hello.ServerName, authorityDomain)
				return p.id.Shown(authority), nil
			}
			return p.id.Certificate(), nil
		},
	}
}

// forStrangers reports whether a connection that offers these protocols is one to
// the API, or of a machine that joins.
func (p *Port) forStrangers(offered []string) bool {
	for _, proto := range offered {
		if _, ours := p.split[proto]; ours && proto != Join {
			return false
		}
	}
	return true
}

// authorityDomain ends the names by which joiners ask for a certificate of the
// authority that their token pins.
const authorityDomain = ".authority.clusterd"

// AuthorityName is the server name (SNI) to ask for a certificate of the authority
// with that id.
func AuthorityName(id string) string { return id + authorityDomain }

// authenticated are TLS 1.2's suites with forward secrecy and authenticated
// encryption, for clients of the API that lack 1.3. Nodes speak 1.3 alone.
var authenticated = []uint16{
	tls.TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
	tls.TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
	tls.TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
}

// handshake hands the connection on to those who speak its protocol.
func (p *Port) handshake(ctx context.Context, below *liveConn, c *tls.Conn) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	if err := c.HandshakeContext(ctx); err != nil {
		p.log.Debug("handshake", "peer", c.RemoteAddr(), "err", err)
		c.Close()
		return
	}
	state := c.ConnectionState()
	q, ours := p.split[state.NegotiatedProtocol]
	if !ours {
		if p.http == nil { // it named no protocol
			c.Close()
			return
		}
		// Whether the certificate is good is the authenticator's to say; cutting
		// off a user whose rights were revoked is done here.
		if len(state.PeerCertificates) > 0 {
			leaf := state.PeerCertificates[0]
			p.live.add(pki.Fingerprint(leaf.PublicKey), leaf, below)
		}
		below.leave() // the API server has bounds of its own
		p.http.put(c)
		return
	}
	if state.Version < tls.VersionTLS13 {
		p.log.Debug("a connection between nodes was refused", "peer", c.RemoteAddr(), "protocol", state.NegotiatedProtocol, "err", "TLS 1.3 is required")
		c.Close()
		return
	}
	if state.NegotiatedProtocol == Join { // it has proved nothing, and is counted until it is closed
		q.put(c)
		return
	}
	peer, err := p.id.verify(state.PeerCertificates, x509.ExtKeyUsageClientAuth, "", protocols[present(state.NegotiatedProtocol)].dials)
	if err != nil {
		p.lines.Log(ctx, slog.LevelWarn, refusalCause(c.RemoteAddr(), state.NegotiatedProtocol), "a connection between nodes was refused", "peer", c.RemoteAddr(), "protocol", state.NegotiatedProtocol, "err", err)
		c.Close()
		return
	}
	below.leave()
	p.live.add(peer.ID, peer.Cert, below)
	if p.id.Revoked != nil && p.id.Revoked(peer.ID) { // since it was verified
		c.Close()
		return
	}
	q.put(c)
}

// linesEvery is how often a line of one cause is written.
const linesEvery = time.Minute

// refusalCause is the host that is refused, and what it asked for: one that knocks
// without end has one line, and a node whose certificate is bad another.
func refusalCause(from net.Addr, protocol string) string {
	host, _, err := net.SplitHostPort(from.String())
	if err != nil {
		host = from.String()
	}
	return protocol + " from " + host
}

// CloseConns closes what the node with that id has open here, requests to the API
// included. It can connect again unless its key is revoked.
func (p *Port) CloseConns(id string) { p.live.cut(id) }

// CloseUntrusted closes what was opened with certificates that the authorities of
// now have not signed, but for those of the keys that keep vouches for.
func (p *Port) CloseUntrusted(keep func(id string) bool) {
	p.live.cutIf(func(id string, leaf *x509.Certificate) bool {
		_, err := leaf.Verify(x509.VerifyOptions{Roots: p.id.Roots(leaf), CurrentTime: p.id.now(), KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageAny}})
		var end x509.CertificateInvalidError
		if err == nil || errors.As(err, &end) && end.Reason == x509.Expired {
			return false
		}
		_, node := pki.NodeName(leaf)
		return !node || !keep(id)
	})
}

// CutCertificates closes what was opened with the certificates that gone says so
// of.
func (p *Port) CutCertificates(gone func(*x509.Certificate) bool) {
	p.live.cutIf(func(_ string, leaf *x509.Certificate) bool { return gone(leaf) })
}

// verify checks that a chain is a node's in one of the roles; of the node with
// that id, if any is given.
func (id Identity) verify(chain []*x509.Certificate, use x509.ExtKeyUsage, want string, roles []pki.Role) (pki.Peer, error) {
	return id.verifyAt(chain, use, want, roles, id.now())
}

func (id Identity) verifyAt(chain []*x509.Certificate, use x509.ExtKeyUsage, want string, roles []pki.Role, now time.Time) (pki.Peer, error) {
	peer, err := pki.VerifyPeer(chain, id.Roots, use, now)
	if err != nil {
		return pki.Peer{}, err
	}
	if peer.Name == "" {
		return pki.Peer{}, fmt.Errorf("%s is not a node", peer.Cert.Subject.CommonName)
	}
	if !slices.Contains(roles, peer.Role) {
		return pki.Peer{}, fmt.Errorf("node %s (%s) is an %s and may not", peer.Name, peer.ID, peer.Role)
	}
	if want != "" && peer.ID != want {
		return pki.Peer{}, fmt.Errorf("the peer is %s (%s), not %s", peer.ID, peer.Name, want)
	}
	if id.Revoked != nil && id.Revoked(peer.ID) {
		return pki.Peer{}, fmt.Errorf("node %s (%s) was removed from the cluster", peer.Name, peer.ID)
	}
	return peer, nil
}

// PeerOf says which node is at the other end of a connection that Protocol's or
// HTTPOver's listener or Dial returned.
func PeerOf(c net.Conn) (id, name string) {
	t := tlsOf(c)
	if t == nil {
		return "", ""
	}
	certs := t.ConnectionState().PeerCertificates
	if len(certs) == 0 {
		return "", ""
	}
	name, _ = pki.NodeName(certs[0])
	return pki.Fingerprint(certs[0].PublicKey), name
}

// present is the protocol whose former name it may be.
func present(protocol string) string {
	for now, old := range former {
		if protocol == old {
			return now
		}
	}
	return protocol
}

type withState interface{ ConnectionState() tls.ConnectionState }

// tlsOf is what a connection of this package's runs over; nil: it is none.
func tlsOf(c net.Conn) withState {
	if o, ok := c.(*callConn); ok {
		c = o.Conn
	}
	if o, inside := c.(overConn); inside {
		c = o.below
	}
	if p, hidden := c.(plainConn); hidden {
		c = p.Conn
	}
	t, ok := c.(withState)
	if !ok {
		return nil
	}
	return t
}

type peerKey struct{}

type peerOf struct{ id, name string }

// WithPeer notes in a request's context who sends it; it is http.Server's
// ConnContext for HTTPOver's listeners.
func WithPeer(ctx context.Context, c net.Conn) context.Context {
	id, name := PeerOf(c)
	if call, ok := c.(*callConn); ok {
		ctx = context.WithValue(ctx, callKey{}, call)
	}
	return context.WithValue(ctx, peerKey{}, peerOf{id, name})
}

// PeerFrom is what WithPeer noted.
func PeerFrom(ctx context.Context) (id, name string) {
	p, _ := ctx.Value(peerKey{}).(peerOf)
	return p.id, p.name
}

// Dial connects to the node at addr for one protocol. want is the id the peer
// must have; empty: any node of the cluster whose role answers it will do.
func (id Identity) Dial(ctx context.Context, addr netip.AddrPort, want, protocol string) (net.Conn, error) {
	c, err := id.DialHost(ctx, addr.String(), want, protocol)
	if err != nil {
		return nil, err // and no *tls.Conn that is nil
	}
	return c, nil
}

// DialHost is Dial to HOST:PORT.
func (id Identity) DialHost(ctx context.Context, addr, want, protocol string) (*tls.Conn, error) {
	offered := []string{protocol}
	if old, had := former[protocol]; had {
		offered = append(offered, old)
	}
	t, err := id.dial(ctx, addr, want, protocols[protocol].answers, nil, offered...)
	if err != nil {
		return nil, err
	}
	if got := t.ConnectionState().NegotiatedProtocol; present(got) != protocol {
		t.Close()
		return nil, fmt.Errorf("connect to %s: it does not speak %s", addr, protocol)
	}
	return t, nil
}

// DialAPI connects to the API of the server at addr. under, if it is given, returns what
// TLS runs over in the place of the connection.
func (id Identity) DialAPI(ctx context.Context, addr netip.AddrPort, want string, under func(net.Conn) net.Conn) (*tls.Conn, error) {
	return id.dial(ctx, addr.String(), want, servers, under, "h2", "http/1.1")
}

func (id Identity) dial(ctx context.Context, addr, want string, roles []pki.Role, under func(net.Conn) net.Conn, protocols ...string) (*tls.Conn, error) {
	for {
		config, resumed := id.dialConfig(addr, want, roles, protocols...)
		c, err := connect(ctx, addr, config, under)
		if err == nil {
			return c, nil
		}
		// crypto/tls has dropped the session that it failed with.
		if !resumed.tried() || ctx.Err() != nil {
			return nil, fmt.Errorf("connect to %s: %w", addr, err)
		}
	}
}

// connect dials, and returns when the handshake is done.
func connect(ctx context.Context, addr string, config *tls.Config, under func(net.Conn) net.Conn) (*tls.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	var d net.Dialer
	raw, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, err
	}
	if config.ServerName, _, err = net.SplitHostPort(addr); err != nil {
		raw.Close()
		return nil, err
	}
	if under != nil {
		raw = under(raw)
	}
	c := tls.Client(raw, config)
	if err := c.HandshakeContext(ctx); err != nil {
		raw.Close()
		return nil, err
	}
	return c, nil
}

// dialConfig is that of one connection, and what it has of Sessions.
func (id Identity) dialConfig(addr, want string, roles []pki.Role, protocols ...string) (*tls.Config, *dialed) {
	ours := id.Certificate()
	resumed := id.Sessions.of(sessionKey{addr, want, ours})
	config := &tls.Config{
		MinVersion:         tls.VersionTLS13,
		NextProtos:         protocols,
		InsecureSkipVerify: true, // by name; VerifyConnection checks the key
		VerifyConnection: func(s tls.ConnectionState) error {
			peer, err := id.verify(s.PeerCertificates, x509.ExtKeyUsageServerAuth, want, roles)
			if err == nil {
				resumed.verified(peer.Cert)
			}
			return err
		},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return ours, nil },
	}
	if resumed != nil {
		config.ClientSessionCache = resumed
	}
	return config, resumed
}
