package main

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestRegistriesConfig: a wrong file keeps the node from starting, and says why; the
// one in the data directory need not be there.
func TestRegistriesConfig(t *testing.T) {
	cfg := defaultConfig()
	cfg.RegistriesConfig = "registries.yaml"
	if err := cfg.ImageConfig.check(); err == nil || !strings.Contains(err.Error(), `--registries-config "registries.yaml"`) {
		t.Errorf("a relative path: %v", err)
	}
	for _, named := range []bool{true, false} {
		cfg := defaultConfig()
		cfg.Data = t.TempDir()
		file := filepath.Join(cfg.Data, "registries.yaml")
		if named {
			file = filepath.Join(t.TempDir(), "other.yaml")
			cfg.RegistriesConfig = file
		}
		if images, err := openImages(cfg, slog.New(slog.DiscardHandler)); (err != nil) != named {
			t.Fatalf("named %t, without a file: %v", named, err)
		} else if err == nil {
			_ = images.Close()
		}
		if err := os.WriteFile(file, []byte("registries: {x.io: {mirror: []}}"), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := openImages(cfg, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), "--registries-config: "+file) || !strings.Contains(err.Error(), `"mirror"`) {
			t.Errorf("named %t: %v", named, err)
		}
	}
}
