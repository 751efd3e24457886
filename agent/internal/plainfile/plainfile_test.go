package plainfile

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestOpen(t *testing.T) {
	dir := t.TempDir()
	root := filepath.Join(dir, "root")
	for name, text := range map[string]string{"root/etc/passwd": "inside", "root/file": "inside", "passwd": "outside"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for name, target := range map[string]string{
		"absolute": "/etc/passwd", "up": "../passwd", "deep": "etc/../../../file", "loop": "loop",
		"magic": "/proc/self/root/etc/passwd", "relative": "etc/passwd",
	} {
		if err := os.Symlink(target, filepath.Join(root, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(filepath.Join(root, "fifo"), 0o644); err != nil {
		t.Fatal(err)
	}
	socket, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(socket)
	if err := unix.Bind(socket, &unix.SockaddrUnix{Name: filepath.Join(root, "socket")}); err != nil {
		t.Fatal(err)
	}
	escapes := errors.New("escapes")
	for _, tt := range []struct {
		name            string
		inRoot, beneath error // nil: it reads "inside"
	}{
		{name: "file"},
		{name: "etc/passwd"},
		{name: "relative"},
		{name: "/file", beneath: escapes},
		{name: "absolute", beneath: escapes},
		{name: "deep", beneath: escapes},
		{name: "up", inRoot: fs.ErrNotExist, beneath: escapes},
		{name: "../passwd", inRoot: fs.ErrNotExist, beneath: escapes},
		{name: "magic", inRoot: fs.ErrNotExist, beneath: escapes},
		{name: "none", inRoot: fs.ErrNotExist, beneath: fs.ErrNotExist},
		{name: "loop", inRoot: unix.ELOOP, beneath: unix.ELOOP},
		{name: "etc", inRoot: ErrNotRegular, beneath: ErrNotRegular},
		{name: "fifo", inRoot: ErrNotRegular, beneath: ErrNotRegular},
		{name: "socket", inRoot: ErrNotRegular, beneath: ErrNotRegular},
	} {
		for how, open := range map[string]func(string, string) (*os.File, error){"in root": OpenInRoot, "beneath": OpenBeneath} {
			want := tt.inRoot
			if how == "beneath" {
				want = tt.beneath
			}
			f, err := open(root, tt.name)
			if want != nil {
				if !errors.Is(err, want) && (!errors.Is(want, escapes) || err == nil || !strings.Contains(err.Error(), "escapes")) {
					t.Errorf("%s %s: %v, want %v", tt.name, how, err, want)
				}
				continue
			}
			if err != nil {
				t.Errorf("%s %s: %v", tt.name, how, err)
				continue
			}
			if b, err := Read(f, 6); err != nil || string(b) != "inside" {
				t.Errorf("%s %s: %q, %v", tt.name, how, b, err)
			}
		}
	}
}

// TestDevice: opening the device itself would do something, or wait.
func TestDevice(t *testing.T) {
	if f, err := OpenInRoot("/dev", "null"); !errors.Is(err, ErrNotRegular) {
		t.Errorf("%v %v", f, err)
	}
}

func TestReadBounded(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "f"), make([]byte, 2049), 0o644); err != nil {
		t.Fatal(err)
	}
	f, err := OpenBeneath(dir, "f")
	if err != nil {
		t.Fatal(err)
	}
	if b, err := Read(f, 2048); err == nil || err.Error() != "is larger than 2 KiB" || b != nil {
		t.Errorf("%d bytes, %v", len(b), err)
	}
}
