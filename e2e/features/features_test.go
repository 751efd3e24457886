package features

import (
	"os"
	"path/filepath"
	"testing"
)

// stub is a test whose end the test decides.
type stub struct {
	testing.TB
	failed, skipped bool
	cleanups        []func()
}

func (s *stub) Helper()               {}
func (s *stub) Name() string          { return "TestX" }
func (s *stub) Failed() bool          { return s.failed }
func (s *stub) Skipped() bool         { return s.skipped }
func (s *stub) Cleanup(f func())      { s.cleanups = append(s.cleanups, f) }
func (s *stub) Errorf(string, ...any) { s.failed = true }

func TestOnlyPassingTestsCount(t *testing.T) {
	file := filepath.Join(t.TempDir(), "rows")
	t.Setenv(FileEnv, file)
	for _, s := range []*stub{{}, {failed: true}, {skipped: true}} {
		Shows(s, 3, 304)
		for _, f := range s.cleanups {
			f()
		}
	}
	got, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if want := "3\tTestX\n304\tTestX\n"; string(got) != want {
		t.Fatalf("got %q, want %q", got, want)
	}
}

func TestUnsetRecordsNothing(t *testing.T) {
	t.Setenv(FileEnv, "")
	s := &stub{}
	Shows(s, 1)
	if len(s.cleanups) != 0 {
		t.Fatal("something is to be recorded")
	}
}
