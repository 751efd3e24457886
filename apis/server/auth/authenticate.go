package auth

import (
	"crypto/sha256"
	"crypto/x509"
	"fmt"
	"net/http"
	"sync"
	"time"

	"k8s.io/apiserver/pkg/apis/apiserver"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/group"
	"k8s.io/apiserver/pkg/authentication/request/anonymous"
	"k8s.io/apiserver/pkg/authentication/request/union"
	x509request "k8s.io/apiserver/pkg/authentication/request/x509"
)

// PublicPaths answer without credentials: probes and version, nothing that
// says what the cluster holds.
var PublicPaths = []string{"/healthz", "/livez", "/readyz", "/version"}

// verifiedFor is how long a verified certificate is cached before its chain
// is checked again; expiry of the certificate itself is checked on every request.
const verifiedFor = time.Minute

// maxVerified bounds the memory of the verified certificates.
const maxVerified = 4096

// Chain asks the authenticators in order and takes the first identity. Every
// identity gets the group system:authenticated; a request without any is
// refused, but for PublicPaths, and one whose credentials are wrong everywhere.
func Chain(authenticators ...authenticator.Request) authenticator.Request {
	known := group.NewAuthenticatedGroupAdder(union.New(authenticators...))
	conditions := make([]apiserver.AnonymousAuthCondition, len(PublicPaths))
	for i, path := range PublicPaths {
		conditions[i].Path = path
	}
	return union.NewFailOnError(known, anonymous.NewAuthenticator(conditions))
}

// ClientCert recognises the holder of a client certificate that chains to what
// pool gives for it: common name is the user, organizations are the groups. pool is asked
// at each request; with another one for a certificate it counts no more that it was verified before.
func ClientCert(pool func(*x509.Certificate) *x509.CertPool) authenticator.Request {
	return ClientCertAt(pool, time.Now)
}

// ClientCertAt is ClientCert by another clock than this machine's.
func ClientCertAt(pool func(*x509.Certificate) *x509.CertPool, now func() time.Time) authenticator.Request {
	return &clientCert{pool: pool, verified: map[[sha256.Size]byte]verified{}, now: now}
}

type clientCert struct {
	pool func(*x509.Certificate) *x509.CertPool
	now  func() time.Time

	mu sync.Mutex
	// verified holds which leaves' chains need not be checked again.
	// Verifying costs more than a small read, and clients keep their
	// certificate for thousands of requests.
	verified map[[sha256.Size]byte]verified
}

// verified is by what a leaf was verified, until when that counts, and whose it is;
// nil: nobody's.
type verified struct {
	by    *x509.CertPool
	until time.Time
	who   *authenticator.Response
}

func (c *clientCert) AuthenticateRequest(req *http.Request) (*authenticator.Response, bool, error) {
	if req.TLS == nil || len(req.TLS.PeerCertificates) == 0 {
		return nil, false, nil
	}
	leaf := req.TLS.PeerCertificates[0]
	who, err := c.verify(leaf, req.TLS.PeerCertificates[1:])
	if err != nil {
		return nil, false, fmt.Errorf("client certificate of %q: %w", leaf.Subject.CommonName, err)
	}
	if who == nil {
		return nil, false, nil
	}
	response := *who
	return &response, true, nil
}

// holder is who a verified certificate is for: common name, organizations, UID,
// as upstream reads them.
func holder(leaf *x509.Certificate) (*authenticator.Response, bool, error) {
	return x509request.CommonNameUserConversion.User([]*x509.Certificate{leaf})
}

func (c *clientCert) verify(leaf *x509.Certificate, rest []*x509.Certificate) (*authenticator.Response, error) {
	now := c.now()
	key := sha256.Sum256(leaf.Raw)
	pool := c.pool(leaf)
	c.mu.Lock()
	was := c.verified[key]
	c.mu.Unlock()
	if was.by == pool && now.Before(was.until) {
		return was.who, nil
	}
	intermediates := x509.NewCertPool()
	for _, cert := range rest {
		intermediates.AddCert(cert)
	}
	if _, err := leaf.Verify(x509.VerifyOptions{
		Roots:         pool,
		Intermediates: intermediates,
		CurrentTime:   now,
		KeyUsages:     []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}); err != nil {
		return nil, fmt.Errorf("verify: %w", err)
	}
	who, _, err := holder(leaf)
	if err != nil {
		return nil, err
	}
	until := now.Add(verifiedFor)
	if leaf.NotAfter.Before(until) {
		until = leaf.NotAfter
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.verified) >= maxVerified {
		clear(c.verified)
	}
	c.verified[key] = verified{pool, until, who}
	return who, nil
}
