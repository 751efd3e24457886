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

	"github.com/clusterd/clusterd/cmd/clusterd/pki"
	"github.com/clusterd/clusterd/raftstore"
)

// Server answers joiners.
type Server struct {
	Store     Store
	CA        *pki.CA
	GossipKey []byte
	Epoch     raftstore.Epoch
	Peers     func() []netip.AddrPort // addresses of members alive now
	Log       *slog.Logger
}

const (
	requestLimit   = 64 << 10
	requestTimeout = 20 * time.Second
)

func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodGet && r.URL.Path == StandingPath {
		s.serveStanding(w, r)
		return
	}
	if r.Method != http.MethodPost || r.URL.Path != Path {
		http.NotFound(w, r)
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), requestTimeout)
	defer cancel()
	var req Request
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, requestLimit)).Decode(&req); err != nil {
		refuse(w, http.StatusBadRequest, &Refusal{CodeRequest, "the join request cannot be read: " + err.Error()})
		return
	}
	res, err := s.admit(ctx, req, time.Now())
	var no *Refusal
	switch {
	case errors.As(err, &no):
		s.Log.Warn("a machine was refused", "node", req.Name, "peer", r.RemoteAddr, "err", err)
		status := http.StatusForbidden
		if no.Code != CodeToken {
			status = http.StatusBadRequest
		}
		refuse(w, status, no)
	case err != nil:
		s.Log.Warn("a machine could not be admitted now", "node", req.Name, "peer", r.RemoteAddr, "err", err)
		refuse(w, http.StatusServiceUnavailable, &Refusal{CodeBusy, "the cluster cannot admit members right now: " + err.Error()})
	default:
		s.Log.Info("a machine was admitted", "node", req.Name, "peer", r.RemoteAddr, "addr", req.Addr)
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(res)
	}
}

// admit checks everything before it records anything, and records before it
// hands out a certificate.
func (s *Server) admit(ctx context.Context, req Request, now time.Time) (*Response, error) {
	if err := checkToken(ctx, s.Store, req.TokenID, req.TokenSecret, now); err != nil {
		return nil, err
	}
	if errs := validation.IsDNS1123Subdomain(req.Name); len(errs) > 0 {
		return nil, &Refusal{CodeName, fmt.Sprintf("the node name %q cannot be used: %s; choose another with --name", req.Name, errs[0])}
	}
	csr, err := x509.ParseCertificateRequest(req.CSR)
	if err == nil {
		err = csr.CheckSignature()
	}
	if err != nil {
		return nil, &Refusal{CodeRequest, "the certificate request: " + err.Error()}
	}
	if !req.Addr.IsValid() || req.Addr.Addr().IsUnspecified() {
		return nil, &Refusal{CodeRequest, fmt.Sprintf("the address %q: an address that other nodes can reach is required; set --advertise", req.Addr)}
	}
	cluster, err := GetCluster(ctx, s.Store)
	if err != nil {
		return nil, err
	}
	cert, err := s.CA.IssueNode(csr.PublicKey, req.Name, []netip.Addr{req.Addr.Addr()}, nil, now)
	if err != nil {
		return nil, err
	}
	caKey, err := s.CA.EncodeCAKey()
	if err != nil {
		return nil, err
	}
	err = AddMember(ctx, s.Store, Record{ID: pki.Fingerprint(csr.PublicKey), Name: req.Name, Addr: req.Addr, Joined: now.UTC()})
	var taken *NameTakenError
	if errors.As(err, &taken) {
		return nil, &Refusal{CodeName, taken.Error()}
	}
	if err != nil {
		return nil, err
	}
	return &Response{
		Cluster:   cluster,
		CACert:    pki.EncodeCert(s.CA.Cert),
		CAKey:     caKey,
		NodeCert:  pki.EncodeCert(cert),
		GossipKey: s.GossipKey,
		Epoch:     s.Epoch,
		Peers:     s.Peers(),
	}, nil
}

func refuse(w http.ResponseWriter, status int, r *Refusal) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	json.NewEncoder(w).Encode(r)
}
