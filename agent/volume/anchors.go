package volume

import (
	"bytes"
	"crypto/sha256"
	"encoding/pem"

	certificatesv1 "k8s.io/api/certificates/v1"
)

// mergeAnchors are the certificates of several bundles in PEM, each once, in the
// order in which they come, without headers and without what is between them.
func mergeAnchors(bundles []*certificatesv1.ClusterTrustBundle) []byte {
	var out bytes.Buffer
	seen := map[[sha256.Size]byte]bool{}
	for _, b := range bundles {
		for block, rest := pem.Decode([]byte(b.Spec.TrustBundle)); block != nil; block, rest = pem.Decode(rest) {
			if sum := sha256.Sum256(block.Bytes); block.Type == "CERTIFICATE" && !seen[sum] { // the API takes no others
				seen[sum] = true
				out.Write(pem.EncodeToMemory(&pem.Block{Type: block.Type, Bytes: block.Bytes}))
			}
		}
	}
	return out.Bytes()
}
