package sealkey

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func newFile(t *testing.T, dir, name string, contents ...[]byte) string {
	t.Helper()
	file := filepath.Join(dir, name)
	if err := os.WriteFile(file, bytes.Join(contents, nil), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

func newKey(t *testing.T) []byte {
	t.Helper()
	b, err := New()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestSealAndOpen(t *testing.T) {
	dir, data := t.TempDir(), t.TempDir()
	first, second := newKey(t), newKey(t)
	k, err := Read(newFile(t, dir, "k", first), data)
	if err != nil {
		t.Fatal(err)
	}
	secret := []byte("the authority's key")
	sealed, err := k.Seal(secret)
	if err != nil || bytes.Contains(sealed, secret) || !Sealed(sealed) {
		t.Fatalf("sealed: %q, %v", sealed, err)
	}
	if got, err := k.Open(sealed); err != nil || !bytes.Equal(got, secret) {
		t.Errorf("opened: %q, %v", got, err)
	}
	if got, err := k.Open(secret); err != nil || !bytes.Equal(got, secret) {
		t.Errorf("what is in clear: %q, %v", got, err)
	}
	if !k.Current(sealed) || k.Current(secret) {
		t.Error("what it sealed is current, and what is in clear is not")
	}

	// No key at all.
	var none *Key
	if b, err := none.Seal(secret); err != nil || !bytes.Equal(b, secret) {
		t.Errorf("without a key: %q, %v", b, err)
	}
	if _, err := none.Open(sealed); !errors.Is(err, ErrSealed) {
		t.Errorf("without a key: %v", err)
	}
	if none.Current(sealed) || !none.Current(secret) {
		t.Error("without a key what is in clear is current, and what is sealed is not")
	}

	// Another key, then both: the new one seals, the old one opens.
	other, err := Read(newFile(t, dir, "other", second), data)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.Open(sealed); !errors.Is(err, ErrWrongKey) {
		t.Errorf("with another key: %v", err)
	}
	both, err := Read(newFile(t, dir, "both", second, first), data)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := both.With(sealed); err != nil || n != 2 || both.Current(sealed) {
		t.Errorf("sealed with key %d, %v; current: %v", n, err, both.Current(sealed))
	}
	again, err := both.Seal(secret)
	if err != nil || !both.Current(again) || !other.Current(again) || k.Current(again) {
		t.Errorf("sealed anew: %v", err)
	}

	// A change anywhere, and each length: an error, and never a part.
	for i := range sealed {
		bad := bytes.Clone(sealed)
		bad[i] ^= 1
		if got, err := k.Open(bad); err == nil && (i >= len(magic) || !bytes.Equal(got, bad)) {
			t.Fatalf("byte %d changed: opened as %q", i, got)
		}
		if got, err := k.Open(sealed[:i]); err == nil && i > len(magic) {
			t.Fatalf("cut to %d bytes: opened as %q", i, got)
		}
	}
}

func TestReadRefuses(t *testing.T) {
	dir, data := t.TempDir(), t.TempDir()
	key := newKey(t)
	open := newFile(t, dir, "open", key)
	if err := os.Chmod(open, 0o640); err != nil {
		t.Fatal(err)
	}
	inside := newFile(t, data, "k", key)
	link := filepath.Join(dir, "link")
	if err := os.Symlink(inside, link); err != nil {
		t.Fatal(err)
	}
	linked := filepath.Join(dir, "data")
	if err := os.Symlink(data, linked); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct{ name, file, outside, want string }{
		{"none", filepath.Join(dir, "none"), data, "no such file"},
		{"others may read it", open, data, "chmod 0600 " + open},
		{"in the folder", inside, data, "on another disk"},
		{"in the folder, by a link", link, data, "on another disk"},
		{"in the folder, which is named by a link", inside, linked, "on another disk"},
		{"a folder", dir, data, "no regular file"},
		{"empty", newFile(t, dir, "empty", []byte("# nothing\n\n")), data, "clusterd keys new"},
		{"public key", newFile(t, dir, "public", []byte("age1qqqq\n")), data, "line 1 is no secret key"},
		{"cut short", newFile(t, dir, "cut", key[:len(key)-3]), data, "line 2 is no secret key"},
		{"plugin", newFile(t, dir, "plugin", []byte("AGE-PLUGIN-TPM-1QQQQ\n")), data, "plugin"},
		{"large", newFile(t, dir, "large", bytes.Repeat([]byte("#\n"), maxKeyFile)), data, "more than"},
	} {
		_, err := Read(c.file, c.outside)
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v, want %q", c.name, err, c.want)
		}
		if err != nil && strings.Contains(err.Error(), string(key[len(key)-20:len(key)-4])) {
			t.Errorf("%s: the error repeats the key: %v", c.name, err)
		}
	}
	if _, err := Read(newFile(t, dir, data[len(filepath.Dir(data))+1:]+"-beside", key), data); err != nil {
		t.Errorf("a file beside the folder whose name begins alike: %v", err)
	}
}

// TestOwner: the key of a process is root's or its own user's.
func TestOwner(t *testing.T) {
	for _, c := range []struct {
		owner   uint32
		process int
		want    bool
	}{{0, 0, true}, {0, 1000, true}, {1000, 1000, true}, {1000, 0, false}, {1001, 1000, false}} {
		if got := trusted(c.owner, c.process); got != c.want {
			t.Errorf("a file of %d, read by %d: %t", c.owner, c.process, got)
		}
	}
	if os.Geteuid() != 0 {
		t.Skip("the rest gives a file away, which only root can")
	}
	dir := t.TempDir()
	file := newFile(t, dir, "k", newKey(t))
	if err := os.Chown(file, 65534, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := Read(file, t.TempDir()); err == nil || !strings.Contains(err.Error(), "chown root "+file) {
		t.Errorf("a file of another user: %v", err)
	}
}
