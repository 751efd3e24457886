// Command gatewaycrds packs the CRDs of the kinds of Gateways that are served, as
// the module sigs.k8s.io/gateway-api has them, for clusterd to carry.
package main

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/clusterd/clusterd/apis/gateway"
)

func main() {
	out := flag.String("o", "sched/gateway/crds/crds.json.gz", "where to write them")
	flag.Parse()
	if err := run(*out); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(out string) error {
	dir, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "sigs.k8s.io/gateway-api").Output()
	if err != nil {
		return fmt.Errorf("find the module sigs.k8s.io/gateway-api: %w", err)
	}
	var all []json.RawMessage
	for _, r := range gateway.Resources {
		text, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(dir)), "config/crd/standard", gateway.Group+"_"+r+".yaml"))
		if err != nil {
			return err
		}
		one, err := yaml.YAMLToJSON(text)
		if err != nil {
			return fmt.Errorf("%s: %w", r, err)
		}
		all = append(all, one)
	}
	text, err := json.Marshal(all)
	if err != nil {
		return err
	}
	var packed bytes.Buffer
	w, err := gzip.NewWriterLevel(&packed, gzip.BestCompression)
	if err != nil {
		return err
	}
	if _, err := w.Write(text); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	return os.WriteFile(out, packed.Bytes(), 0o644) //nolint:gosec // it is a part of the sources
}
