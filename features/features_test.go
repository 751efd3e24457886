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

func TestRecord(t *testing.T) {
	shown, conform := filepath.Join(t.TempDir(), "rows"), filepath.Join(t.TempDir(), "rows")
	t.Setenv(FileEnv, shown)
	t.Setenv(ConformanceEnv, conform)
	for _, s := range []*stub{{}, {failed: true}, {skipped: true}} {
		Shows(s, 3, 304)
		ConformsWithDoubles(s, 340)
		for _, f := range s.cleanups {
			f()
		}
	}
	for file, want := range map[string]string{
		shown: "3\tTestX\tbegan\n304\tTestX\tbegan\n3\tTestX\tpassed\n304\tTestX\tpassed\n" +
			"3\tTestX\tbegan\n304\tTestX\tbegan\n3\tTestX\tfailed\n304\tTestX\tfailed\n" +
			"3\tTestX\tbegan\n304\tTestX\tbegan\n3\tTestX\tskipped\n304\tTestX\tskipped\n",
		conform: "340\tTestX\tbegan\n340\tTestX\tpassed with doubles\n340\tTestX\tbegan\n340\tTestX\tfailed\n340\tTestX\tbegan\n340\tTestX\tskipped\n",
	} {
		got, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if string(got) != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestUnsetRecordsNothing(t *testing.T) {
	t.Setenv(FileEnv, "")
	t.Setenv(ConformanceEnv, "")
	s := &stub{}
	Shows(s, 1)
	Conforms(s, 1)
	if len(s.cleanups) != 0 {
		t.Fatal("something is to be recorded")
	}
}
