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
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/clusterd/clusterd/member/pki"
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
	// Believes notes that a member has a state of the authority; nil: nobody does.
	Believes func(ctx context.Context, id string, number uint64) error
	Epoch    raftstore.Epoch
	Servers  func() []ServerAddr // those alive now, this one first
	// Removed are the ids of removed servers that agents must refuse; nil: none.
	Removed func() []string
	Log     *slog.Logger

	strikes strikes
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
	case r.Method == http.MethodGet && r.URL.Path == StandingPath:
		s.serveStanding(w, r)
	case r.Method == http.MethodPost && r.URL.Path == Path:
		serveStranger(ctx, s, w, r, s.admit)
	case r.Method == http.MethodPost && r.URL.Path == RenewPath:
		serveStranger(ctx, s, w, r, s.renew)
	default:
		http.NotFound(w, r)
	}
}

// serveStranger answers one request of somebody who has proved nothing yet.
// Too many wrong ones from one address, or from all, are refused before they
// cost the store anything.
func serveStranger[In interface{ who() string }, Out any](ctx context.Context, s *Server, w http.ResponseWriter, r *http.Request, do func(context.Context, In, time.Time) (Out, error)) {
	now := time.Now()
	if !s.strikes.allow(r.RemoteAddr, now) {
		w.Header().Set("Retry-After", "1")
		refuse(w, http.StatusTooManyRequests, &Refusal{CodeBusy, "too many wrong requests have come from this address or from others: try again in some seconds"})
		return
	}
	var req In
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, requestLimit)).Decode(&req); err != nil {
		s.strikes.add(r.RemoteAddr, now)
		refuse(w, http.StatusBadRequest, &Refusal{CodeRequest, "the request cannot be read: " + err.Error()})
		return
	}
	name := req.who()
	if len(name) > maxNameShown {
		name = name[:maxNameShown] + "…"
	}
	out, err := do(ctx, req, now)
	var no *Refusal
	switch {
	case errors.As(err, &no):
		s.strikes.add(r.RemoteAddr, now)
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
		s.Log.Info("a machine was given a certificate", "node", name, "peer", r.RemoteAddr)
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(out)
	}
}

func (r Request) who() string { return r.Name }
func (Renewal) who() string   { return "" }

// admit checks everything before it records anything, and records before it
// hands out a certificate.
func (s *Server) admit(ctx context.Context, req Request, now time.Time) (*Response, error) {
	if errs := validation.IsDNS1123Subdomain(req.Name); len(errs) > 0 {
		if len(req.Name) > maxNameShown {
			req.Name = req.Name[:maxNameShown] + "…"
		}
		return nil, &Refusal{CodeName, fmt.Sprintf("the node name %q cannot be used: %s; choose another with --name", req.Name, errs[0])}
	}
	csr, err := parseCSR(req.CSR)
	if err != nil {
		return nil, err
	}
	if !req.Addr.IsValid() || req.Addr.Addr().IsUnspecified() {
		return nil, &Refusal{CodeRequest, fmt.Sprintf("the address %q: an address that other nodes can reach is required; set --advertise", req.Addr)}
	}
	for {
		token, err := checkToken(ctx, s.Store, req.TokenID, req.TokenSecret, now)
		if err != nil {
			return nil, err
		}
		cluster, err := GetCluster(ctx, s.Store)
		if err != nil {
			return nil, err
		}
		trust := s.Trust()
		cert, err := issue(trust, csr, req.Name, token.Role, req.Addr.Addr(), now)
		if err != nil {
			return nil, err
		}
		err = addMember(ctx, s.Store, Record{
			ID: pki.Fingerprint(csr.PublicKey), Name: req.Name, Role: token.Role, Addr: req.Addr, Joined: now.UTC(), Token: token.ID,
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
	return &Certificate{NodeCert: pki.EncodeCert(cert), Epoch: s.Epoch, Servers: s.Servers(), Trust: trustWord(trust)}, nil
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
	return trust.Signer().IssueAgent(csr.PublicKey, name, now)
}

func refuse(w http.ResponseWriter, status int, r *Refusal) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(r)
}
