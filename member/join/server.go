package join

import (
	"context"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
	"github.com/clusterd/clusterd/raftstore"
)

// Server answers joiners, and members' questions (see Questions).
type Server struct {
	Store Store
	Trust func() *pki.Trust // with keys
	// GossipKeys are the keys of gossip, the one that encrypts first. An error says
	// why this server cannot hand them out now.
	GossipKeys func(context.Context) (GossipKeys, error)
	// SealKeys are the keys of secrets at rest that follow from authorities of the
	// past, as a list; nil: none.
	SealKeys func() []byte
	// OwnSeals are the keys of secrets at rest that the cluster's administrators
	// have made, as a list; nil: none.
	OwnSeals func() ([]byte, error)
	// NoteTrust records that a member has a state of the authority, and asks may
	// before it writes; nil: not recorded.
	NoteTrust func(ctx context.Context, id string, number uint64, may func() bool) error
	// NoteSeparate records that a member knows of separate authorities, as NoteTrust does.
	NoteSeparate func(ctx context.Context, id string, may func() bool) error
	Epoch        raftstore.Epoch
	// HasLeader reports whether this server leads or follows a leader; nil: answers do not say.
	HasLeader func() bool
	Servers   func() []ServerAddr // those alive now, this one first
	// Removed are the ids of removed servers that agents must refuse; nil: none.
	Removed func() []string
	// ReleaseKeys are the keys that releases may be signed with; nil: none.
	ReleaseKeys func(context.Context) ([]string, error)
	// Now is the time by which tokens end and certificates are signed; nil: time.Now.
	Now func() time.Time
	// Leave takes a member out of the cluster that asks for it, or, if not really, says
	// whether it could; a *Refusal says why not. nil: none.
	Leave func(ctx context.Context, name string, really bool) error
	Log   *slog.Logger

	failures failureLimiter
	notes    notes
	asks     asks
}

const (
	requestLimit   = 64 << 10
	requestTimeout = 20 * time.Second
	// maxNameShown is how much of a stranger's words the log takes.
	maxNameShown = 64
)

func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	ctx, cancel := context.WithTimeout(r.Context(), requestTimeout)
	defer cancel()
	switch {
	case r.Method == http.MethodGet && r.URL.Path == MembershipStatusPath:
		s.serveMembershipStatus(w, r)
	case r.Method == http.MethodPost && r.URL.Path == Path:
		serveStranger(ctx, s, w, r, given, func(ctx context.Context, in Request, now time.Time) (*Response, error) {
			return s.admit(ctx, in, r.RemoteAddr, now)
		})
	case r.Method == http.MethodPost && r.URL.Path == RenewPath:
		serveStranger(ctx, s, w, r, given, s.renew)
	case r.Method == http.MethodPost && r.URL.Path == AskPath:
		s.failures.add(s.askerOf(ctx, r), time.Now()) // each request costs an administrator's time
		serveStranger(ctx, s, w, r, "", func(_ context.Context, in Ask, now time.Time) (*Asked, error) {
			return s.ask(in, r.RemoteAddr, now)
		})
	case r.Method == http.MethodPost && r.URL.Path == RevealPath:
		serveStranger(ctx, s, w, r, "a machine asks to join", func(ctx context.Context, in Reveal, now time.Time) (*AskState, error) {
			return s.reveal(ctx, in, r.RemoteAddr, now)
		})
	case r.Method == http.MethodPost && r.URL.Path == AskStatePath:
		serveStranger(ctx, s, w, r, "", s.askState)
	default:
		http.NotFound(w, r)
	}
}

// askerOf is who makes a request over the join protocol. A key that the connection
// has proved and that has a record here is a member's, whatever its certificate is
// worth by now. It does not ask another member.
func (s *Server) askerOf(ctx context.Context, r *http.Request) asker {
	if id, _ := transport.PeerFrom(ctx); id != "" {
		if _, err := Member(ctx, s.Store, id); err == nil {
			return asker{member: id}
		}
	}
	return strangerAt(r.RemoteAddr)
}

// given is what the log says of a certificate that was signed.
const given = "a machine was given a certificate"

// serveStranger answers one request of a client that may be anybody; done,
// unless it is empty, is what the log says of an answer. Too many wrong ones from one
// member, from one address, or from all strangers, are refused before they cost the
// store anything.
func serveStranger[In interface{ who() string }, Out any](ctx context.Context, s *Server, w http.ResponseWriter, r *http.Request, done string, do func(context.Context, In, time.Time) (Out, error)) {
	now, asks := time.Now(), s.askerOf(ctx, r)
	signs := now
	if s.Now != nil {
		signs = s.Now()
	}
	if !s.failures.allow(asks, now) {
		w.Header().Set("Retry-After", "1")
		refuse(w, http.StatusTooManyRequests, &Refusal{CodeBusy, "too many wrong requests have come from this address or from others: try again in some seconds"})
		return
	}
	var req In
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, requestLimit)).Decode(&req); err != nil {
		s.failures.add(asks, now)
		refuse(w, http.StatusBadRequest, &Refusal{CodeRequest, "the request cannot be read: " + err.Error()})
		return
	}
	name := cut(req.who())
	out, err := do(ctx, req, signs)
	var no *Refusal
	switch {
	case errors.As(err, &no):
		s.failures.add(asks, now)
		s.Log.Warn("a machine was refused", "node", name, "peer", r.RemoteAddr, "err", err)
		status := http.StatusForbidden
		if no.Code != CodeToken && no.Code != CodeMember {
			status = http.StatusBadRequest
		}
		refuse(w, status, no)
	case err != nil:
		s.Log.Warn("a machine could not be answered now", "node", name, "peer", r.RemoteAddr, "err", err)
		refuse(w, http.StatusServiceUnavailable, &Refusal{CodeBusy, "the cluster cannot answer right now: " + err.Error()})
	default:
		if done != "" {
			s.Log.Info(done, "node", name, "peer", r.RemoteAddr)
		}
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(out)
	}
}

func (r Request) who() string { return r.Name }
func (Renewal) who() string   { return "" }

// admit checks everything before it records anything, and records before it
// hands out a certificate.
func (s *Server) admit(ctx context.Context, req Request, peer string, now time.Time) (*Response, error) {
	if err := checkJoiner(req.Name, req.Addr); err != nil {
		return nil, err
	}
	csr, err := parseCSR(req.CSR)
	if err != nil {
		return nil, err
	}
	key := pki.Fingerprint(csr.PublicKey)
	for {
		token, err := checkToken(ctx, s.Store, req.TokenID, req.TokenSecret, now)
		if err != nil {
			return nil, err
		}
		if err := token.fits(key, req.Name, peer); err != nil {
			return nil, err
		}
		cluster, err := GetCluster(ctx, s.Store)
		if err != nil {
			return nil, err
		}
		if err := cluster.reached(req.Addr.Addr(), s.Servers()); err != nil {
			return nil, err
		}
		trust := s.Trust()
		if trust.Separated() && !req.Separate {
			return nil, &Refusal{CodeRequest, fmt.Sprintf("this cluster has an authority for each purpose, which clusterd %s does not know: install the version that the cluster has", cut(req.Version))}
		}
		cert, err := issue(trust, csr, req.Name, token.Role, req.Addr.Addr(), now)
		if err != nil {
			return nil, err
		}
		err = addMember(ctx, s.Store, Record{
			ID: key, Name: req.Name, Role: token.Role, Addr: req.Addr, Joined: now.UTC(), Token: token.ID,
		}, token)
		var taken *NameTakenError
		switch {
		case errors.Is(err, errChanged):
			continue // until the request's time is over
		case errors.As(err, &taken):
			return nil, &Refusal{CodeName, taken.Error()}
		case err != nil:
			return nil, err
		}
		return &Response{
			Role:     token.Role,
			Cluster:  cluster,
			CACert:   trust.Bundle(),
			Trust:    trust.Number,
			Own:      trust.OwnBundles(),
			NodeCert: pki.EncodeCert(cert),
			Epoch:    s.Epoch,
			Servers:  s.Servers(),
		}, nil
	}
}

// renew signs a member's next certificate, of the role that its record has. The
// request proves the key, and the key has a record: an old certificate is not
// needed.
func (s *Server) renew(ctx context.Context, req Renewal, now time.Time) (*Certificate, error) {
	csr, err := parseCSR(req.CSR)
	if err != nil {
		return nil, err
	}
	rec, err := MemberNow(ctx, s.Store, pki.Fingerprint(csr.PublicKey))
	if errors.Is(err, ErrNotMember) {
		return nil, &Refusal{CodeMember, "no member of the cluster has this key"}
	}
	if err != nil {
		return nil, err
	}
	trust := s.Trust()
	cert, err := issue(trust, csr, rec.Name, rec.Role, rec.Addr.Addr(), now)
	if err != nil {
		return nil, err
	}
	return &Certificate{NodeCert: pki.EncodeCert(cert), Epoch: s.Epoch, Servers: s.Servers(), Trust: trustBundle(trust, req.Separate)}, nil
}

// checkJoiner says what is wrong with a machine's name or address.
func checkJoiner(name string, addr netip.AddrPort) error {
	if errs := validation.IsDNS1123Subdomain(name); len(errs) > 0 {
		return &Refusal{CodeName, fmt.Sprintf("the node name %q cannot be used: %s; choose another with --name", cut(name), errs[0])}
	}
	if !addr.IsValid() || addr.Addr().IsUnspecified() {
		return &Refusal{CodeRequest, fmt.Sprintf("the address %q: an address that other nodes can reach is required; set --advertise", addr)}
	}
	return nil
}

// cut bounds the length of what an unauthenticated client sent, at a character's end.
func cut(text string) string {
	if len(text) > maxNameShown {
		return strings.ToValidUTF8(text[:maxNameShown], "") + "…"
	}
	return text
}

func parseCSR(der []byte) (*x509.CertificateRequest, error) {
	csr, err := x509.ParseCertificateRequest(der)
	if err == nil {
		err = csr.CheckSignature()
	}
	if err != nil {
		return nil, &Refusal{CodeRequest, "the certificate request: " + err.Error()}
	}
	return csr, nil
}

func issue(trust *pki.Trust, csr *x509.CertificateRequest, name string, role pki.Role, addr netip.Addr, now time.Time) (*x509.Certificate, error) {
	if role != pki.Agent { // records that are older than roles are servers'
		return trust.Signer().IssueServer(csr.PublicKey, name, []netip.Addr{addr}, now)
	}
	return trust.For(pki.ForNodes).Signer().IssueAgent(csr.PublicKey, name, now)
}

func refuse(w http.ResponseWriter, status int, r *Refusal) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(r)
}
