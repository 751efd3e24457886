package transport

import (
	"crypto/tls"
	"crypto/x509"
	"sync"
	"time"
)

// Sessions are the TLS sessions that a node can resume with others: a connection to
// a port that it has been connected to before takes no signature of either side. It
// may be used concurrently.
//
// Nothing is decided by a session. Both sides judge the certificates that it was made
// with at each connection, as those of a full handshake: at the moment's record of
// members, authorities and clock. (The port does so after the handshake, the dialer in
// VerifyConnection, which is called for resumed sessions, too, as VerifyPeerCertificate
// is not.) A port's tickets are sealed with keys that crypto/tls makes, replaces each
// day and forgets after a week, or with the process.
type Sessions struct {
	mu  sync.Mutex
	all map[sessionKey]session
}

// sessionKey is with whom and as whom. A session goes on with the certificates of
// both: with another one of this node's another session is begun.
type sessionKey struct {
	addr, want string
	ours       *tls.Certificate
}

type session struct {
	state *tls.ClientSessionState
	until time.Time // the peer's certificate has run out then
}

// maxSessions bounds them; a node speaks with the servers, a server with all nodes.
const maxSessions = 2048

// NewSessions returns Sessions that hold none.
func NewSessions() *Sessions { return &Sessions{all: map[sessionKey]session{}} }

// dialed is a tls.ClientSessionCache for one connection.
type dialed struct {
	sessions *Sessions
	key      sessionKey
	// until is set by VerifyConnection, before a session can come.
	mu      sync.Mutex
	until   time.Time
	offered bool // a session was there
}

// of is the cache for one connection; nil, if there are no Sessions.
func (s *Sessions) of(key sessionKey) *dialed {
	if s == nil {
		return nil
	}
	return &dialed{sessions: s, key: key}
}

// verified notes whom the connection has reached.
func (d *dialed) verified(leaf *x509.Certificate) {
	if d == nil {
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.until = leaf.NotAfter
}

// Get implements tls.ClientSessionCache. The name under which crypto/tls asks is not
// that of who is to be reached.
func (d *dialed) Get(string) (*tls.ClientSessionState, bool) {
	d.sessions.mu.Lock()
	defer d.sessions.mu.Unlock()
	s, ok := d.sessions.all[d.key]
	if ok && time.Now().After(s.until) {
		delete(d.sessions.all, d.key)
		return nil, false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.offered = ok
	return s.state, ok
}

// tried reports whether the connection was to go on with a session. One that is
// refused then may be taken without: the other end's certificate in the session is that
// of when it was made, of an authority that may have been replaced since.
func (d *dialed) tried() bool {
	if d == nil {
		return false
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.offered
}

// Put implements tls.ClientSessionCache. It comes with a connection's first bytes, and
// without a session when one could not be resumed.
func (d *dialed) Put(_ string, state *tls.ClientSessionState) {
	d.mu.Lock()
	until := d.until
	d.mu.Unlock()
	s := d.sessions
	s.mu.Lock()
	defer s.mu.Unlock()
	if state == nil || until.IsZero() {
		delete(s.all, d.key)
		return
	}
	if _, had := s.all[d.key]; !had && len(s.all) >= maxSessions {
		s.forget(d.key)
	}
	s.all[d.key] = session{state, until}
}

// forget drops what is of certificates before the ones of now, or else any one. mu is
// held.
func (s *Sessions) forget(now sessionKey) {
	for key := range s.all {
		if key.ours != now.ours {
			delete(s.all, key)
		}
	}
	for key := range s.all {
		if len(s.all) < maxSessions {
			return
		}
		delete(s.all, key)
	}
}
