// Package features lets a test name the rows of docs/FEATURES.md that it
// shows. `make features` runs those tests and lists the rows that none has
// shown.
//
// A row counts only when a passing test really checks what the row says.
package features

import (
	"fmt"
	"os"
	"testing"
)

// FileEnv names the file that rows are appended to, one line each: the row's
// number, a tab, the test's name. Unset: nothing is recorded.
const FileEnv = "CLUSTERD_FEATURES"

// Shows says that the rows are shown if the test passes. Call it where the
// test has checked them or is about to: a row is recorded at the test's end,
// and only if nothing failed and nothing was skipped.
func Shows(t testing.TB, rows ...int) {
	t.Helper()
	for _, r := range rows {
		if r < 1 {
			t.Fatalf("features.Shows: there is no row %d", r)
		}
	}
	file := os.Getenv(FileEnv)
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
