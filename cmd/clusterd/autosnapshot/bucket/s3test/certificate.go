package s3test

import (
	"os"
	"path/filepath"
	"testing"

	certutil "k8s.io/client-go/util/cert"
)

// Certificate writes a certificate for an address, with its own CA, and its key.
func Certificate(t testing.TB, addr string) (cert, key string) {
	c, k, err := certutil.GenerateSelfSignedCertKey(addr, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	for path, b := range map[string][]byte{cert: c, key: k} {
		if err := os.WriteFile(path, b, 0o600); err != nil { //nolint:forbidigo // of a test
			t.Fatal(err)
		}
	}
	return cert, key
}
