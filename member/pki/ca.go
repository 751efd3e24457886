// Package pki makes and checks the cluster's identities: certificate
// authorities, one for each purpose, a key pair per node whose fingerprint is the node's
// id, client certificates for people, and the join token that pins the
// authority. It keeps no state and opens no connection.
package pki

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base32"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Lifetimes of certificates. A node's is renewed by itself long before it
// ends (see NeedsRenewal).
const (
	CALifetime = 10 * 365 * 24 * time.Hour
	// A server signs its own. Its key may be stolen without the authority's, and clients of the
	// API know no removals: to them it passes for the API until its certificate ends.
	ServerLifetime = 24 * time.Hour
	// MaxServerLifetime is that of earlier versions.
	MaxServerLifetime = 90 * 24 * time.Hour
	// An agent asks a server for its next certificate.
	AgentLifetime = 24 * time.Hour
	// The administrator's kubeconfig is written again on its server; copies of it end.
	AdminLifetime = 30 * 24 * time.Hour
	// MaxClientLifetime is more than any person's or program's certificate lives, and
	// than the administrator's of earlier versions do.
	MaxClientLifetime = 366 * 24 * time.Hour
	// backdate forgives clocks that differ a little.
	backdate = 5 * time.Minute
	// caBackdate is for authorities: a cluster that was made while a machine's clock was days ahead is
	// good when that has been set.
	caBackdate = 7 * 24 * time.Hour
	// backdateShare is the part of a short life that backdate is at most.
	backdateShare = 10
)

// Names in certificates, as Kubernetes uses them.
const (
	NodeUserPrefix = "system:node:"
	NodesGroup     = "system:nodes"
	AdminsGroup    = "system:masters"
	// ServersGroup is in the certificates of nodes that are servers beside
	// NodesGroup. Only they speak for the cluster to other nodes.
	ServersGroup = "clusterd:servers"
)

// Role is what a node does in the cluster.
type Role string

const (
	// Server keeps the store, serves the API and holds the authority's key,
	// and runs pods, too.
	Server Role = "server"
	// Agent runs pods and nothing else.
	Agent Role = "agent"
)

// CA signs the cluster's certificates. Without a key, as agents have it, it
// only verifies certificates. It is immutable and may be used concurrently.
type CA struct {
	Cert    *x509.Certificate
	key     crypto.Signer
	shorter time.Duration // than this no node's certificate lives longer; 0: as by its role
}

// Shorter is the same authority, whose nodes' certificates live no longer than
// that; 0: as by the node's role.
func (ca *CA) Shorter(life time.Duration) *CA { return &CA{Cert: ca.Cert, key: ca.key, shorter: life} }

func (ca *CA) life(byRole time.Duration) time.Duration {
	if ca.shorter > 0 {
		return min(byRole, ca.shorter)
	}
	return byRole
}

// NewCA makes an authority of its own for the cluster of that name.
func NewCA(cluster string, now time.Time) (*CA, error) {
	return newAuthority("clusterd "+cluster, 1, now)
}

func authorityTemplate(subject pkix.Name, now time.Time) *x509.Certificate {
	return &x509.Certificate{
		SerialNumber:          serial(),
		Subject:               subject,
		NotBefore:             now.Add(-caBackdate),
		NotAfter:              now.Add(CALifetime),
		IsCA:                  true,
		BasicConstraintsValid: true,
		MaxPathLenZero:        true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
}

// LoadCA reads an authority from its PEM files' contents and checks that they
// belong together.
func LoadCA(certPEM, keyPEM []byte) (*CA, error) {
	cert, err := ParseCert(certPEM)
	if err != nil {
		return nil, fmt.Errorf("authority's certificate: %w", err)
	}
	key, err := ParseKey(keyPEM)
	if err != nil {
		return nil, fmt.Errorf("authority's key: %w", err)
	}
	if !cert.IsCA {
		return nil, errors.New("the certificate is not an authority's")
	}
	if Fingerprint(cert.PublicKey) != Fingerprint(key.Public()) {
		return nil, errors.New("the authority's certificate and key do not belong together")
	}
	return &CA{Cert: cert, key: key}, nil
}

// KnowCA reads an authority of which only the certificate is known.
func KnowCA(certPEM []byte) (*CA, error) {
	cert, err := ParseCert(certPEM)
	if err != nil {
		return nil, fmt.Errorf("authority's certificate: %w", err)
	}
	if !cert.IsCA {
		return nil, errors.New("the certificate is not an authority's")
	}
	return &CA{Cert: cert}, nil
}

// errNoKey is returned when one that only knows the authority is to sign.
var errNoKey = errors.New("this node does not hold the authority's key: only servers sign")

// Pool returns the authority as the roots to verify with.
func (ca *CA) Pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(ca.Cert)
	return pool
}

// IssueServer signs the certificate a server serves and dials with. It names
// the node as Kubernetes does, and every address and name the API may be
// called by; further ones are of the server's own configuration, never of a request.
func (ca *CA) IssueServer(pub crypto.PublicKey, name string, ips []netip.Addr, now time.Time, further ...string) (*x509.Certificate, error) {
	t := nodeTemplate(name, now.Add(ca.life(ServerLifetime)))
	t.Subject.Organization = append(t.Subject.Organization, ServersGroup)
	t.DNSNames = serverNames(name, further)
	for _, ip := range unique(ips) {
		t.IPAddresses = append(t.IPAddresses, net.IP(ip.AsSlice()))
	}
	return ca.sign(t, pub, now)
}

func serverNames(name string, further []string) []string {
	return unique(append([]string{name, "localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"}, further...))
}

func unique[T comparable](list []T) (out []T) {
	for _, v := range list {
		if !slices.Contains(out, v) {
			out = append(out, v)
		}
	}
	return out
}

// NamesServer reports whether a certificate names exactly what IssueServer would put
// into it: neither less nor more.
func NamesServer(cert *x509.Certificate, name string, ips []netip.Addr, further ...string) bool {
	var has []netip.Addr
	for _, ip := range cert.IPAddresses {
		a, _ := netip.AddrFromSlice(ip)
		has = append(has, a.Unmap())
	}
	want := make([]netip.Addr, len(ips))
	for i, ip := range ips {
		want[i] = ip.Unmap()
	}
	return sameSet(cert.DNSNames, serverNames(name, further)) && sameSet(has, want)
}

func sameSet[T comparable](a, b []T) bool {
	a, b = unique(a), unique(b)
	return len(a) == len(b) && !slices.ContainsFunc(a, func(v T) bool { return !slices.Contains(b, v) })
}

// IssueAgent signs an agent's certificate. It vouches for no address and no
// host name: servers know agents by their keys, and to everybody else it must
// not pass for the API.
func (ca *CA) IssueAgent(pub crypto.PublicKey, name string, now time.Time) (*x509.Certificate, error) {
	return ca.sign(nodeTemplate(name, now.Add(ca.life(AgentLifetime))), pub, now)
}

func nodeTemplate(name string, end time.Time) *x509.Certificate {
	return &x509.Certificate{
		Subject:     pkix.Name{CommonName: NodeUserPrefix + name, Organization: []string{NodesGroup}},
		NotAfter:    end,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
}

// IssueClient signs a person's or program's client certificate.
func (ca *CA) IssueClient(pub crypto.PublicKey, user string, groups []string, lifetime time.Duration, now time.Time) (*x509.Certificate, error) {
	return ca.sign(&x509.Certificate{
		Subject:     pkix.Name{CommonName: user, Organization: groups},
		NotAfter:    now.Add(lifetime),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth},
	}, pub, now)
}

func (ca *CA) sign(t *x509.Certificate, pub crypto.PublicKey, now time.Time) (*x509.Certificate, error) {
	if ca.key == nil {
		return nil, errNoKey
	}
	t.SerialNumber = serial()
	if t.NotAfter.After(ca.Cert.NotAfter) {
		t.NotAfter = ca.Cert.NotAfter
	}
	// One that lives shortly is not to be born old. SignedAt knows this.
	t.NotBefore = now.Add(-min(backdate, t.NotAfter.Sub(now)/backdateShare))
	t.KeyUsage = x509.KeyUsageDigitalSignature
	t.BasicConstraintsValid = true
	der, err := x509.CreateCertificate(rand.Reader, t, ca.Cert, pub, ca.key)
	if err != nil {
		return nil, fmt.Errorf("sign a certificate for %s: %w", t.Subject.CommonName, err)
	}
	return x509.ParseCertificate(der)
}

// RenewalCheckInterval is how long after a look at NeedsRenewal the next one is due.
func RenewalCheckInterval(cert *x509.Certificate) time.Duration {
	return max(cert.NotAfter.Sub(cert.NotBefore)/50, 100*time.Millisecond)
}

// SignedAt is when an authority of this package signed, to within a second: from
// its beginning to its end a certificate lives as long as from then on, and by a
// share of that longer, or by backdate.
func SignedAt(cert *x509.Certificate) time.Time {
	whole := cert.NotAfter.Sub(cert.NotBefore)
	return cert.NotBefore.Add(min(backdate, whole/(backdateShare+1)))
}

// NeedsRenewal reports whether a certificate has used about two thirds of its
// life: of each another share, from 60 to 73 %, that its serial number gives. A
// thousand agents that joined at once then do not all come back at the same time again and again.
// One that begins in the future was signed by a clock that was ahead: others refuse it.
func NeedsRenewal(cert *x509.Certificate, now time.Time) bool {
	life := cert.NotAfter.Sub(cert.NotBefore)
	var share big.Int
	share.Mod(cert.SerialNumber, big.NewInt(renewalSpread))
	return now.Before(cert.NotBefore) || now.After(cert.NotBefore.Add(life/1000*time.Duration(renewalBegin+share.Int64())))
}

// The shares of a certificate's life at which it is renewed, in thousandths.
const (
	renewalBegin  = 600
	renewalSpread = 131 // prime
)

// LivesLonger reports whether a certificate lives longer than those of that life do now: it is
// of an earlier version.
func LivesLonger(cert *x509.Certificate, life time.Duration) bool {
	return cert.NotAfter.Sub(cert.NotBefore) > life+2*backdate
}

// ServerDue reports whether a server needs another certificate of this CA: its own nears its end, is
// of an earlier version or another role or CA, or does not name what the API is called by
// today, no less and no more.
func (ca *CA) ServerDue(cert *x509.Certificate, now time.Time, name string, ips []netip.Addr, further ...string) bool {
	return NeedsRenewal(cert, now) || LivesLonger(cert, ServerLifetime) || NodeRole(cert) != Server ||
		!NamesServer(cert, name, ips, further...) || !ca.Signed(cert)
}

// NodeName returns the node name in a node's certificate, and false for any
// other certificate.
func NodeName(cert *x509.Certificate) (string, bool) {
	name, ok := strings.CutPrefix(cert.Subject.CommonName, NodeUserPrefix)
	if !ok || name == "" || !slices.Contains(cert.Subject.Organization, NodesGroup) {
		return "", false
	}
	return name, true
}

// NodeRole returns the role in a node's certificate.
func NodeRole(cert *x509.Certificate) Role {
	if slices.Contains(cert.Subject.Organization, ServersGroup) {
		return Server
	}
	return Agent
}

// Fingerprint is the id of a key: 26 letters and digits of the SHA-256 of its
// public part, 130 bits. It panics on a key type x509 does not know.
func Fingerprint(pub crypto.PublicKey) string {
	der, err := x509.MarshalPKIXPublicKey(pub)
	if err != nil {
		panic(fmt.Sprintf("pki: fingerprint of a %T: %v", pub, err))
	}
	sum := sha256.Sum256(der)
	return encode(sum[:])[:26]
}

// IsFingerprint reports whether id has the form of one.
func IsFingerprint(id string) bool {
	return len(id) == 26 && strings.Trim(id, alphabet32) == ""
}

// NewKey makes an ECDSA P-256 key.
func NewKey() (crypto.Signer, error) { return ecdsa.GenerateKey(elliptic.P256(), rand.Reader) }

// EncodeCert and EncodeKey give the PEM forms.
func EncodeCert(cert *x509.Certificate) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw})
}

// EncodeKey gives the PKCS #8 PEM form of a key.
func EncodeKey(key crypto.Signer) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

// EncodeCAKey gives the PEM form of the authority's key. Its holder can
// impersonate any member and user: servers only, mode 0600.
func (ca *CA) EncodeCAKey() ([]byte, error) {
	if ca.key == nil {
		return nil, errNoKey
	}
	return EncodeKey(ca.key)
}

// ParseCert reads the first certificate of a PEM text.
func ParseCert(b []byte) (*x509.Certificate, error) {
	block, _ := pem.Decode(b)
	if block == nil || block.Type != "CERTIFICATE" {
		return nil, errors.New("not a PEM certificate")
	}
	return x509.ParseCertificate(block.Bytes)
}

// ParseKey reads a PKCS #8 key from its PEM form.
func ParseKey(b []byte) (crypto.Signer, error) {
	block, _ := pem.Decode(b)
	if block == nil || block.Type != "PRIVATE KEY" {
		return nil, errors.New("not a PEM private key")
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, err
	}
	signer, ok := key.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("a %T cannot sign", key)
	}
	return signer, nil
}

func serial() *big.Int {
	n, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127))
	if err != nil { // crypto/rand does not fail on Linux
		panic(err)
	}
	return n
}

const alphabet32 = "abcdefghijklmnopqrstuvwxyz234567"

var lower32 = base32.NewEncoding(alphabet32).WithPadding(base32.NoPadding)

func encode(b []byte) string { return lower32.EncodeToString(b) }
