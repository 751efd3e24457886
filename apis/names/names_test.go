package names

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/util/validation"
)

const root = "../.."

func TestNames(t *testing.T) {
	seen := map[string]bool{}
	for _, n := range All {
		if !strings.HasPrefix(n.Name, Prefix) || len(validation.IsQualifiedName(n.Name)) > 0 {
			t.Errorf("%q is no qualified name with the prefix %s", n.Name, Prefix)
		}
		if seen[n.Name] {
			t.Errorf("%s is there twice", n.Name)
		}
		seen[n.Name] = true
		if n.Kind == "" || n.On == "" || n.By == "" || n.For == "" {
			t.Errorf("%+v does not say all", n)
		}
	}
	for name, value := range constants(t) {
		if name != "Prefix" && !seen[Prefix+value] {
			t.Errorf("%s, %q, is not in All", name, value)
		}
	}
	if len(seen) != len(constants(t))-1 {
		t.Errorf("All has %d names, there are %d constants", len(seen), len(constants(t))-1)
	}
}

// constants are the package's, by name, with the text that stands in them.
func constants(t *testing.T) map[string]string {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), "names.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	ast.Inspect(f, func(n ast.Node) bool {
		if d, ok := n.(*ast.GenDecl); ok && d.Tok != token.CONST {
			return false
		}
		if v, ok := n.(*ast.ValueSpec); ok {
			ast.Inspect(v.Values[0], func(n ast.Node) bool {
				if l, ok := n.(*ast.BasicLit); ok {
					all[v.Names[0].Name], _ = strconv.Unquote(l.Value)
				}
				return true
			})
		}
		return true
	})
	return all
}

func TestDocs(t *testing.T) {
	page, err := os.ReadFile(filepath.Join(root, "docs", "names.md"))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(page), Table()) {
		t.Errorf("docs/names.md has another table; it is now:\n%s", Table())
	}
}

// image tells references of images and the API group of an example: of the same
// domain, but no names in objects' metadata.
func image(s string) bool {
	return strings.Contains(s, ":") || strings.HasPrefix(s, "example.")
}

// TestOnlyHere finds names of our own, or what looks like one, anywhere else in
// the programs.
func TestOnlyHere(t *testing.T) {
	for _, room := range []string{"agent", "apis", "cmd", "ingress", "member", "sched"} {
		err := filepath.WalkDir(filepath.Join(root, room), func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go") || strings.HasPrefix(path, filepath.Join(root, "apis", "names")) {
				return err
			}
			f, err := parser.ParseFile(token.NewFileSet(), path, nil, 0)
			if err != nil {
				return err
			}
			ast.Inspect(f, func(n ast.Node) bool {
				l, ok := n.(*ast.BasicLit)
				if !ok || l.Kind != token.STRING {
					return true
				}
				s, err := strconv.Unquote(l.Value)
				domain, _, ok := strings.Cut(s, "/")
				if err == nil && ok && !image(s) && (strings.Contains(domain, "clusterd.") || strings.HasSuffix(domain, ".clusterd")) {
					t.Errorf("%s: %q: names of our own have their place in apis/names", path, s)
				}
				return true
			})
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
}
