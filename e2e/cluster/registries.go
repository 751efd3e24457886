package cluster

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/clusterd/clusterd/durable"
)

// AllowPlainHTTP makes the node speak to the registry at that host without TLS, beside
// those named before. The node need not be restarted.
func (n Node) AllowPlainHTTP(host string) error {
	path := filepath.Join(n.Data, "registries.yaml")
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		text, err = []byte("registries:\n"), nil
	}
	if err != nil {
		return err
	}
	return durable.ReplaceFile(path, fmt.Appendf(text, "  %q: {plainHTTP: true}\n", host), 0o600)
}
