// Package features lets a test name the rows of docs/FEATURES.md and
// docs/CONFORMANCE.md that it shows. `make features` and `make conformance` run
// those tests and list the rows that none has shown.
//
// A row counts only when every test that names it has passed, and at least one
// of them on the real program. A row of CONFORMANCE is another project's test
// described in one line: shown means that the same is seen here, not that their test
// was run.
package features

import (
	"fmt"
	"os"
	"testing"
)

// Variables that name the file that rows of a list are appended to, one line
// each: the row's number, the test's name and its state, separated by tabs.
// Unset: nothing is recorded.
const (
	FileEnv        = "CLUSTERD_FEATURES"    // docs/FEATURES.md
	ConformanceEnv = "CLUSTERD_CONFORMANCE" // docs/CONFORMANCE.md
)

// States of a test that names a row. Began is recorded at once, so that a test
// whose process died is distinguished from one that never ran.
const (
	Began   = "began"
	Passed  = "passed"
	Doubles = "passed with doubles" // what it ran against was not the real program
	Failed  = "failed"
	Skipped = "skipped"
)

// Shows says that the rows of docs/FEATURES.md are shown if the test passes.
// Call it where the test has checked them or is about to.
func Shows(t testing.TB, rows ...int) {
	t.Helper()
	note(t, FileEnv, Passed, rows)
}

// ShowsWithDoubles is Shows for a test that runs against doubles of the
// container runtime or of the API. Its rows do not count, and are listed apart.
func ShowsWithDoubles(t testing.TB, rows ...int) {
	t.Helper()
	note(t, FileEnv, Doubles, rows)
}

// Conforms is Shows for rows of docs/CONFORMANCE.md.
func Conforms(t testing.TB, rows ...int) {
	t.Helper()
	note(t, ConformanceEnv, Passed, rows)
}

// ConformsWithDoubles is ShowsWithDoubles for rows of docs/CONFORMANCE.md.
func ConformsWithDoubles(t testing.TB, rows ...int) {
	t.Helper()
	note(t, ConformanceEnv, Doubles, rows)
}

func note(t testing.TB, env, passed string, rows []int) {
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
	write := func(state string) {
		if err := record(file, t.Name(), state, rows); err != nil {
			t.Errorf("record the rows shown: %v", err)
		}
	}
	write(Began)
	t.Cleanup(func() {
		switch {
		case t.Failed():
			write(Failed)
		case t.Skipped():
			write(Skipped)
		default:
			write(passed)
		}
	})
}

// record appends in one write, so that tests of several processes do not mix
// their lines.
func record(file, test, state string, rows []int) error {
	var lines []byte
	for _, r := range rows {
		lines = fmt.Appendf(lines, "%d\t%s\t%s\n", r, test, state)
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
