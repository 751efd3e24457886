package clustertest

import (
	"crypto/tls"
	"os"
	"path/filepath"
	"strings"

	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
)

// Trust is the authorities that a node trusts, as they lie in its data directory.
func Trust(n cluster.Node) (*pki.Trust, error) {
	b, err := os.ReadFile(filepath.Join(n.Data, "pki", "ca.crt"))
	if err != nil {
		return nil, err
	}
	trust, err := pki.ParseTrust(0, b, nil)
	if err != nil {
		return nil, err
	}
	files, err := filepath.Glob(filepath.Join(n.Data, "pki", "ca-*.crt"))
	if err != nil {
		return nil, err
	}
	own := map[pki.Purpose][]byte{}
	for _, file := range files {
		p := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(file), "ca-"), ".crt")
		if own[pki.Purpose(p)], err = os.ReadFile(file); err != nil {
			return nil, err
		}
	}
	return trust.WithOwn(own, nil)
}

// Stolen is the identity that lies in a node's data directory: whoever has read its disk
// can show it.
func Stolen(n cluster.Node) (transport.Identity, error) {
	trust, err := Trust(n)
	if err != nil {
		return transport.Identity{}, err
	}
	var files [2][]byte
	for i, name := range []string{"node.crt", "node.key"} {
		b, err := os.ReadFile(filepath.Join(n.Data, "pki", name))
		if err != nil {
			return transport.Identity{}, err
		}
		files[i] = b
	}
	cert, err := pki.ParseCert(files[0])
	if err != nil {
		return transport.Identity{}, err
	}
	key, err := pki.ParseKey(files[1])
	if err != nil {
		return transport.Identity{}, err
	}
	pair := &tls.Certificate{Certificate: [][]byte{cert.Raw, trust.Signer().Cert.Raw}, PrivateKey: key, Leaf: cert}
	return transport.Identity{Certificate: func() *tls.Certificate { return pair }, Roots: trust.Roots}, nil
}
