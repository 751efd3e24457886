package kubestore

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os/exec"
	"strings"
	"testing"
)

// TestSuiteIsComplete keeps us honest: every Run… function that upstream
// exports for implementations is in the suite.
func TestSuiteIsComplete(t *testing.T) {
	// Not by go/build: a test built with -trimpath knows no GOROOT to look from.
	out, err := exec.CommandContext(t.Context(), "go", "list", "-f", "{{.Dir}}", "k8s.io/apiserver/pkg/storage/testing").Output()
	if err != nil {
		t.Fatalf("upstream's sources: go list: %v", err)
	}
	dir := strings.TrimSpace(string(out))
	ours := make(map[string]bool)
	for _, c := range suite {
		name, _, _ := strings.Cut(c.name, "/")
		ours[name] = true
	}
	parsed, err := parser.ParseDir(token.NewFileSet(), dir, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	found := 0
	for _, p := range parsed {
		for _, file := range p.Files {
			for _, decl := range file.Decls {
				fn, ok := decl.(*ast.FuncDecl)
				if !ok || fn.Recv != nil || !strings.HasPrefix(fn.Name.Name, "Run") || strings.HasPrefix(fn.Name.Name, "RunBenchmark") {
					continue
				}
				found++
				if !ours[fn.Name.Name] {
					t.Errorf("upstream's %s is not in the suite", fn.Name.Name)
				}
			}
		}
	}
	if found < 50 {
		t.Errorf("found only %d functions in %s", found, dir)
	}
	t.Logf("%d functions of upstream's suite", found)
}
