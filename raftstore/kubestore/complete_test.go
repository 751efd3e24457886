package kubestore

import (
	"go/ast"
	"go/build"
	"go/parser"
	"go/token"
	"strings"
	"testing"
)

// TestSuiteIsComplete keeps us honest: every Run… function that upstream
// exports for implementations is in the suite.
func TestSuiteIsComplete(t *testing.T) {
	pkg, err := build.Import("k8s.io/apiserver/pkg/storage/testing", ".", build.FindOnly)
	if err != nil {
		t.Skipf("upstream's sources cannot be found: %v", err)
	}
	ours := make(map[string]bool)
	for _, c := range suite {
		name, _, _ := strings.Cut(c.name, "/")
		ours[name] = true
	}
	parsed, err := parser.ParseDir(token.NewFileSet(), pkg.Dir, nil, 0)
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
		t.Errorf("found only %d functions in %s", found, pkg.Dir)
	}
	t.Logf("%d functions of upstream's suite", found)
}
