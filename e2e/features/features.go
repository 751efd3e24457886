// Package features lets a test name the rows of docs/FEATURES.md and
// docs/CONFORMANCE.md that it shows. `make features` and `make conformance` run
// those tests and list the rows that none has shown.
//
// A row counts only when a passing test really checks what the row says. A row
// of CONFORMANCE is another project's test told in one line: shown means that
// the same is seen here, not that their test was run.
package features

import (
	"fmt"
	"os"
	"testing"
)

// Variables that name the file that rows of a list are appended to, one line
// each: the row's number, a tab, the test's name. Unset: nothing is recorded.
const (
	FileEnv        = "CLUSTERD_FEATURES"    // docs/FEATURES.md
	ConformanceEnv = "CLUSTERD_CONFORMANCE" // docs/CONFORMANCE.md
)

// Shows says that the rows of docs/FEATURES.md are shown if the test passes.
// Call it where the test has checked them or is about to: a row is recorded at
// the test's end, and only if nothing failed and nothing was skipped.
func Shows(t testing.TB, rows ...int) {
	t.Helper()
	note(t, FileEnv, rows)
}

// Conforms is Shows for rows of docs/CONFORMANCE.md.
func Conforms(t testing.TB, rows ...int) {
	t.Helper()
	note(t, ConformanceEnv, rows)
}

func note(t testing.TB, env string, rows []int) {
	t.Helper()
	for _, r := range rows {
		if r < 1 {
			t.Fatalf("features: there is no row %d", r)
		}
	}
	file := os.Getenv(env)
	if file == "" {
		return
	}
	t.Cleanup(func() {
		if t.Failed() || t.Skipped() {
			return
		}
		if err := record(file, t.Name(), rows); err != nil {
			t.Errorf("record the rows shown: %v", err)
		}
	})
}

// record appends in one write, so that tests of several processes do not mix
// their lines.
func record(file, test string, rows []int) error {
	var lines []byte
	for _, r := range rows {
		lines = fmt.Appendf(lines, "%d\t%s\n", r, test)
	}
	f, err := os.OpenFile(file, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(lines)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}
