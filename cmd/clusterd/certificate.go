package main

import (
	"context"
	"crypto/tls"
	"time"

	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/member/pki"
)

// keepCert renews the node's certificate in time, and when the machine has slept or its clock was set.
func (m *Main) keepCert(ctx context.Context) error {
	now := m.renewNow.Next()
	for {
		select {
		case <-time.After(min(time.Hour, pki.RenewalCheckInterval(m.cert.Load().Leaf))):
		case <-now:
		case <-ctx.Done():
			return nil
		}
		now = m.renewNow.Next() // before renew: what is notified meanwhile counts
		m.renew(m.clock.Now())
	}
}

// renew makes the certificates again that near their end: each by itself.
func (m *Main) renew(now time.Time) {
	if !m.clock.Verdict().MaySign() {
		return
	}
	if err := m.renewFront(now); err != nil {
		m.log.Error("the certificate for aggregated APIs could not be renewed", "err", err)
	}
	if err := m.writeKubeconfig(); err != nil {
		m.log.Error("the administrator's kubeconfig could not be renewed", "path", m.dir.Kubeconfig(), "err", err)
	}
	if err := m.renewCert(now); err != nil {
		m.log.Error("the node's certificate could not be renewed", "expires", m.cert.Load().Leaf.NotAfter, "err", err)
	}
}

// renewCert loads the node's certificate, a new one if it nears its end or
// does not name what the API is called by today, no less and no more.
func (m *Main) renewCert(now time.Time) error {
	m.idMu.Lock()
	defer m.idMu.Unlock()
	signer := m.id.Trust.Signer()
	if m.clock.Verdict().MaySign() && signer.ServerDue(m.id.Cert, now, m.cfg.Name, certAddrs(m.cfg), certNames(m.cfg)...) {
		cert, err := signer.IssueServer(m.id.Key.Public(), m.cfg.Name, certAddrs(m.cfg), now, certNames(m.cfg)...)
		if err != nil {
			return err
		}
		if err := m.dir.WriteNodeCert(cert); err != nil {
			return err
		}
		m.id.Cert = cert
	}
	return m.useIdentity(now)
}

// showIdentity shows what lies on disk.
func (m *Main) showIdentity(now time.Time) error {
	m.idMu.Lock()
	defer m.idMu.Unlock()
	return m.useIdentity(now)
}

// useIdentity shows the certificate of m.id and trusts its authorities from now on. idMu is held.
func (m *Main) useIdentity(now time.Time) error {
	shown, err := m.shownNow(now)
	if err != nil {
		return err
	}
	m.cert.Store(m.id.TLSCertificate())
	m.shown.Store(shown)
	m.trust.Store(m.id.Trust)
	return nil
}

// shownCertificates are what clients of the API and joiners are shown, by the id
// of the authority that signed it.
type shownCertificates struct {
	of        map[string]*tls.Certificate
	otherwise *tls.Certificate
}

// shownNow makes them. The API's clients know the older authority and may not know
// the newer one yet. idMu is held.
func (m *Main) shownNow(now time.Time) (*shownCertificates, error) {
	own, signer := m.id.TLSCertificate(), m.id.Trust.Signer()
	shown := &shownCertificates{of: map[string]*tls.Certificate{signer.ID(): own}, otherwise: own}
	if elder := m.id.Trust.Elder(); elder != signer {
		cert, err := elder.IssueServer(m.id.Key.Public(), m.cfg.Name, certAddrs(m.cfg), now, certNames(m.cfg)...)
		if err != nil {
			return nil, err
		}
		shown.otherwise = nodedir.TLSCertificate(elder, cert, m.id.Key)
		shown.of[elder.ID()] = shown.otherwise
	}
	return shown, nil
}

// showCert is transport.Identity's Shown.
func (m *Main) showCert(authority string) *tls.Certificate {
	shown := m.shown.Load()
	if cert, ok := shown.of[authority]; ok {
		return cert
	}
	return shown.otherwise
}
