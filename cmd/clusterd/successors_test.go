package main

import (
	"os"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/pki"
)

// TestSuccessorsThatNoStateNames: the keys of authorities that were made and never named
// do not stay on the disk; those that a state may still name do.
func TestSuccessorsThatNoStateNames(t *testing.T) {
	now := time.Now()
	dir := keyDir{dataDir: dataDir(t.TempDir())}
	ca, err := pki.NewCA("test", now)
	if err != nil {
		t.Fatal(err)
	}
	ids := map[string]string{}
	for _, name := range []string{"kept in pki", "named", "just made", "left over"} {
		made, err := ca.NewSuccessor(now)
		if err == nil {
			err = dir.writeSuccessor(made)
		}
		if err != nil {
			t.Fatal(err)
		}
		ids[name] = made.ID()
		if name != "just made" {
			long := now.Add(-2 * successorTimeout)
			if err := os.Chtimes(dir.successor(made.ID()), long, long); err != nil {
				t.Fatal(err)
			}
		}
	}
	here, named := map[string]bool{ids["kept in pki"]: true}, map[string]bool{ids["named"]: true}
	check := func(want ...string) {
		t.Helper()
		left, err := dir.successors()
		if err != nil || len(left) != len(want) {
			t.Errorf("%d files are left, %v; want %q", len(left), err, want)
		}
		for _, name := range want {
			if _, ok := left[ids[name]]; !ok {
				t.Errorf("the file that is %s has gone", name)
			}
		}
	}
	if err := dir.dropUnnamed(here, nil, now); err != nil { // the store does not answer
		t.Fatal(err)
	}
	check("named", "just made", "left over")
	if err := dir.dropUnnamed(here, named, now); err != nil {
		t.Fatal(err)
	}
	check("named", "just made")
}
