package main

import (
	"errors"
	"fmt"
	"time"

	"github.com/clusterd/clusterd/apis/certificates"
	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/member/pki"
)

// frontLifetime is how long the certificate is good by which aggregated APIs
// know this server.
const frontLifetime = pki.ServerLifetime

// front is how this server proves to aggregated APIs who it is.
func (m *Main) front() server.Front {
	return server.Front{
		CertFile: m.dir.FrontCert(), KeyFile: m.dir.FrontKey(),
		Name:        certificates.FrontName,
		Authorities: func() []byte { return m.trust.Load().For(pki.ForFront).Bundle() },
		Clients:     func() []byte { return m.trust.Load().For(pki.ForClients).Bundle() },
	}
}

// renewFront makes that certificate, and its key, unless there is one that is
// good for a while. The API server reads the files again when they change.
func (m *Main) renewFront(now time.Time) error {
	// Aggregated APIs learn a new authority late: they may know the old one
	// alone until the rotation ends.
	elder := m.trust.Load().For(pki.ForFront).Elder()
	cert, err := m.dir.ReadFrontCert()
	if err != nil {
		return fmt.Errorf("certificate for aggregated APIs: %w", err)
	}
	if cert != nil && !m.clock.Verdict().MaySign() {
		return nil
	}
	if cert != nil && elder.Signed(cert) && !pki.NeedsRenewal(cert, now) && !pki.LivesLonger(cert, frontLifetime) {
		return nil
	}
	key, err := pki.NewKey()
	if err != nil {
		return err
	}
	if cert, err = elder.IssueClient(key.Public(), certificates.FrontName, nil, frontLifetime, now); err != nil {
		return err
	}
	b, err := pki.EncodeKey(key)
	if err != nil {
		return err
	}
	// The certificate last: it says that the pair is whole.
	return errors.Join(nodedir.WriteFile(m.dir.FrontKey(), b, 0o600), nodedir.WriteFile(m.dir.FrontCert(), pki.EncodeCert(cert), 0o600))
}
