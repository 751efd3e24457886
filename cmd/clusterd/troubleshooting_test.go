package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// TestTroubleshooting: each text that docs/troubleshooting.md explains is one
// that the programs can say.
func TestTroubleshooting(t *testing.T) {
	page, err := os.ReadFile("../../docs/troubleshooting.md")
	if err != nil {
		t.Fatal(err)
	}
	wanted := map[string]bool{}
	for _, m := range regexp.MustCompile("(?m)^### `(.+)`$").FindAllStringSubmatch(string(page), -1) {
		wanted[m[1]] = true
	}
	if len(wanted) < 15 {
		t.Fatalf("only %d texts were found in the page", len(wanted))
	}
	err = filepath.WalkDir("../..", func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (d.Name() == "bin" || d.Name() == "e2e" || d.Name() == ".git" || d.Name() == "testdata"):
			return filepath.SkipDir
		case !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || strings.HasPrefix(d.Name(), "zz_"):
			return nil
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		for text := range wanted {
			if strings.Contains(string(b), text) {
				delete(wanted, text)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for text := range wanted {
		t.Errorf("nothing says %q any more: correct docs/troubleshooting.md", text)
	}
}
