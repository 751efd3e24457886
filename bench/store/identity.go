package main

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"time"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
)

// Members of both sides speak TLS with each other, each with a certificate of
// one authority, as clusterd's servers do: ours over clusterd's own port, etcd
// over its own.
const caFile = "ca.crt"

func certFile(member string) string { return member + ".crt" }
func keyFile(member string) string  { return member + ".key" }

// makeIdentities writes an authority and the members' certificates and keys, good
// for the addresses. It returns the IDs that clusterd knows them by.
func makeIdentities(dir string, addrs []netip.Addr) (ids [nodes]string, err error) {
	now := time.Now()
	ca, err := pki.NewCA("bench", now)
	if err != nil {
		return ids, err
	}
	write := func(name string, b []byte) {
		err = errors.Join(err, os.WriteFile(filepath.Join(dir, name), b, 0o600))
	}
	write(caFile, pki.EncodeCert(ca.Cert))
	for i := range nodes {
		name := memberName(i)
		key, err := pki.NewKey()
		if err != nil {
			return ids, err
		}
		cert, err := ca.IssueServer(key.Public(), name, addrs, now)
		if err != nil {
			return ids, err
		}
		encoded, err := pki.EncodeKey(key)
		if err != nil {
			return ids, err
		}
		write(certFile(name), pki.EncodeCert(cert))
		write(keyFile(name), encoded)
		ids[i] = pki.Fingerprint(key.Public())
	}
	return ids, err
}

// identity is what makeIdentities wrote for a member.
func identity(dir, member string) (id transport.Identity, fingerprint string, err error) {
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, certFile(member)), filepath.Join(dir, keyFile(member)))
	if err != nil {
		return id, "", err
	}
	root, err := os.ReadFile(filepath.Join(dir, caFile))
	if err != nil {
		return id, "", err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(root) {
		return id, "", fmt.Errorf("%s holds no certificate", caFile)
	}
	return transport.Identity{Certificate: func() *tls.Certificate { return &pair }, Roots: func(*x509.Certificate) *x509.CertPool { return roots }}, pki.Fingerprint(pair.Leaf.PublicKey), nil
}
