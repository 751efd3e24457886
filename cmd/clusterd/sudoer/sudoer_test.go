package sudoer

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

func TestPerson(t *testing.T) {
	for _, tt := range []struct {
		uid, gid string
		want     int
		ok       bool
	}{
		{"1000", "1001", 1000, true},
		{"0", "0", 0, false}, // root's own sudo
		{"", "", 0, false},
		{"1000", "", 0, false},
		{"-1", "1000", 0, false},
		{"4294967295", "1000", 0, false}, // -1 as an id: chown would keep the owner
	} {
		uid, gid, ok := person(func(name string) string {
			return map[string]string{"SUDO_UID": tt.uid, "SUDO_GID": tt.gid}[name]
		})
		if uid != tt.want || ok != tt.ok || ok && gid != 1001 {
			t.Errorf("SUDO_UID=%s SUDO_GID=%s: %d, %d, %v", tt.uid, tt.gid, uid, gid, ok)
		}
	}
}

// A file that lies where the copy goes is neither followed nor written into.
func TestLeave(t *testing.T) {
	dir := t.TempDir()
	from, to, other := filepath.Join(dir, "from"), filepath.Join(dir, "to"), filepath.Join(dir, "other")
	for path, content := range map[string]string{from: "secret", other: "other"} {
		if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(other, to); err != nil {
		t.Fatal(err)
	}
	uid, gid := os.Getuid(), os.Getgid()
	if uid == 0 {
		uid, gid = 4711, 4712
	}
	for range 2 { // the second time there is a copy
		if err := Leave(from, to, uid, gid); err != nil {
			t.Fatal(err)
		}
	}
	st, err := os.Lstat(to)
	if err != nil {
		t.Fatal(err)
	}
	owner := st.Sys().(*syscall.Stat_t)
	if st.Mode() != 0o600 || int(owner.Uid) != uid || int(owner.Gid) != gid {
		t.Errorf("mode %s of %d:%d, want -rw------- of %d:%d", st.Mode(), owner.Uid, owner.Gid, uid, gid)
	}
	for path, want := range map[string]string{to: "secret", other: "other"} {
		if b, err := os.ReadFile(path); err != nil || string(b) != want {
			t.Errorf("%s: %q, %v; want %q", path, b, err, want)
		}
	}
	left, err := filepath.Glob(filepath.Join(dir, ".to.*"))
	if err != nil || len(left) > 0 {
		t.Errorf("temporary files are left: %v, %v", left, err)
	}
}
