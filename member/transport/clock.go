package transport

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/netip"

	"github.com/clusterd/clusterd/member/pki"
)

// DialForTime connects to a server for the join protocol, to ask what time it has: as Dial does,
// but its certificate need not be good now, by this machine's clock. want is
// the id that it must have; empty: any server's.
func (id Identity) DialForTime(ctx context.Context, addr netip.AddrPort, want string) (net.Conn, error) {
	ours := id.Certificate()
	c, err := connect(ctx, addr.String(), &tls.Config{
		MinVersion:         tls.VersionTLS13,
		NextProtos:         []string{Join},
		InsecureSkipVerify: true, // by name and time; VerifyConnection checks the key
		VerifyConnection: func(s tls.ConnectionState) error {
			at := id.now()
			if len(s.PeerCertificates) > 0 {
				leaf := s.PeerCertificates[0]
				if at.After(leaf.NotAfter) {
					at = leaf.NotAfter
				}
				if at.Before(leaf.NotBefore) {
					at = leaf.NotBefore
				}
			}
			_, err := id.verifyAt(s.PeerCertificates, x509.ExtKeyUsageServerAuth, want, []pki.Role{pki.Server}, at)
			return err
		},
		GetClientCertificate: func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return ours, nil },
	}, nil)
	if err != nil {
		return nil, err
	}
	return c, nil
}
