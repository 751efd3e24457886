package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestNotRun: what one run skipped and another ran is not listed; what none ran
// is, under its reason.
func TestNotRun(t *testing.T) {
	write := func(name string, lines ...string) string {
		file := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(file, []byte(strings.Join(lines, "\n")), 0o600); err != nil {
			t.Fatal(err)
		}
		return file
	}
	unit := write("unit",
		`{"Action":"run","Package":"github.com/clusterd/clusterd/a","Test":"TestRootX"}`,
		`{"Action":"output","Package":"github.com/clusterd/clusterd/a","Test":"TestRootX","Output":"    x_test.go:7: needs root\n"}`,
		`{"Action":"output","Package":"github.com/clusterd/clusterd/a","Test":"TestRootX","Output":"--- SKIP: TestRootX (0.00s)\n"}`,
		`{"Action":"skip","Package":"github.com/clusterd/clusterd/a","Test":"TestRootX"}`,
		`{"Action":"output","Package":"github.com/clusterd/clusterd/a","Test":"TestChaos","Output":"    y_test.go:9: runs as make chaos\n"}`,
		`{"Action":"skip","Package":"github.com/clusterd/clusterd/a","Test":"TestChaos"}`,
		`{"Action":"skip","Package":"github.com/clusterd/clusterd/none"}`)
	root := write("root", `{"Action":"pass","Package":"github.com/clusterd/clusterd/a","Test":"TestRootX"}`)
	var out strings.Builder
	if err := run([]string{unit, root}, &out); err != nil {
		t.Fatal(err)
	}
	if want := "1 tests ran in no tier\n  runs as make chaos\n    a.TestChaos\n"; out.String() != want {
		t.Errorf("got\n%swant\n%s", out.String(), want)
	}
	if err := run([]string{write("bad", "{")}, &out); err == nil {
		t.Error("half a line was taken")
	}
}
