// Package sudoer leaves a file to the person who typed sudo: what a command makes as
// root in directories of root alone is of no use in that person's shell. It reads the
// variables that sudo sets and decides nothing by them but the owner of a file.
package sudoer

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"

	"github.com/clusterd/clusterd/durable"
)

// Person is the user, and their group, by whom sudo started this program; false
// where it was started otherwise, or by root.
func Person() (uid, gid int, ok bool) {
	if os.Geteuid() != 0 {
		return 0, 0, false
	}
	return person(os.Getenv)
}

func person(env func(string) string) (uid, gid int, ok bool) {
	u, uerr := strconv.ParseUint(env("SUDO_UID"), 10, 31)
	g, gerr := strconv.ParseUint(env("SUDO_GID"), 10, 31)
	if uerr != nil || gerr != nil || u == 0 {
		return 0, 0, false
	}
	return int(u), int(g), true
}

// Leave writes a copy of the file from to the file to, which that user alone reads.
// What bore the name before is replaced, never written into.
func Leave(from, to string, uid, gid int) error {
	b, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(to), "."+filepath.Base(to)+".*") // 0600
	if err != nil {
		return err
	}
	if _, err = f.Write(b); err == nil {
		err = f.Chown(uid, gid)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", to, errors.Join(err, f.Close(), os.Remove(f.Name())))
	}
	return durable.Commit(f, to)
}
