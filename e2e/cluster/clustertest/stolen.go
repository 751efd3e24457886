package clustertest

import (
	"crypto/tls"
	"os"
	"path/filepath"

	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
)

// Stolen is the identity that lies in a node's data folder: whoever has read its disk
// can show it.
func Stolen(n cluster.Node) (transport.Identity, error) {
	var files [3][]byte
	for i, name := range []string{"ca.crt", "node.crt", "node.key"} {
		b, err := os.ReadFile(filepath.Join(n.Data, "pki", name))
		if err != nil {
			return transport.Identity{}, err
		}
		files[i] = b
	}
	ca, err := pki.KnowCA(files[0])
	if err != nil {
		return transport.Identity{}, err
	}
	cert, err := pki.ParseCert(files[1])
	if err != nil {
		return transport.Identity{}, err
	}
	key, err := pki.ParseKey(files[2])
	if err != nil {
		return transport.Identity{}, err
	}
	pair := &tls.Certificate{Certificate: [][]byte{cert.Raw, ca.Cert.Raw}, PrivateKey: key, Leaf: cert}
	return transport.Identity{Certificate: func() *tls.Certificate { return pair }, Roots: ca.Roots}, nil
}
