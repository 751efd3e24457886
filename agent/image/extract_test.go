package image

import (
	"archive/tar"
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// roomy is a budget with the default limits.
func roomy(dir string) *budget { return &budget{Limits: Limits{}.withDefaults(), dir: dir} }

// unpackInto extracts layers on top of each other, as a store would, and
// returns their directories, the lowest first.
func unpackInto(t *testing.T, layers ...[]byte) ([]string, error) {
	t.Helper()
	var dirs []string
	var lowers lowerDir
	base := t.TempDir()
	for i, b := range layers {
		dir := filepath.Join(base, string(rune('a'+i)))
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if _, err := extract(t.Context(), bytes.NewReader(b), dir, lowers, roomy(dir)); err != nil {
			return dirs, err
		}
		dirs = append(dirs, dir)
		lowers = append(lowerDir{dir}, lowers...)
	}
	return dirs, nil
}

// tree lists a directory as text, without times.
func tree(t *testing.T, root string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(root, func(path string, d os.DirEntry, err error) error {
		if err != nil || path == root {
			return err
		}
		fi, err := os.Lstat(path)
		if err != nil {
			return err
		}
		rel, _ := filepath.Rel(root, path)
		line := fi.Mode().String() + " " + rel
		switch {
		case fi.Mode().IsRegular():
			line += " " + read(t, path)
		case fi.Mode()&os.ModeSymlink != 0:
			target, err := os.Readlink(path)
			if err != nil {
				return err
			}
			line += " -> " + target
		}
		out = append(out, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func TestExtract(t *testing.T) {
	for _, tt := range []struct {
		name   string
		layers [][]entry
		want   []string // of the last layer
	}{
		{"kinds of files", [][]entry{{
			{name: "./", mode: 0o755},
			{name: "bin/"},
			{name: "bin/su", body: "x", mode: 0o4755},
			{name: "bin/link", typ: tar.TypeLink, body: "/bin/su"},
			{name: "bin/sh", typ: tar.TypeSymlink, body: "su"},
			{name: "tmp/", mode: 0o1777},
			{name: "pipe", typ: tar.TypeFifo},
		}}, []string{
			"drwxr-xr-x bin", "urwxr-xr-x bin/link x", "Lrwxrwxrwx bin/sh -> su", "urwxr-xr-x bin/su x", "prw-r--r-- pipe", "dtrwxrwxrwx tmp",
		}},
		{"missing folders are made", [][]entry{{{name: "a/b/c", body: "x"}}}, []string{
			"drwxr-xr-x a", "drwxr-xr-x a/b", "-rw-r--r-- a/b/c x",
		}},
		{"folders from below keep their mode", [][]entry{
			{{name: "secret/", mode: 0o700}, {name: "secret/deep/", mode: 0o750}},
			{{name: "secret/deep/f", body: "x"}},
		}, []string{"drwx------ secret", "drwxr-x--- secret/deep", "-rw-r--r-- secret/deep/f x"}},
		{"a later entry wins", [][]entry{{
			{name: "f", body: "1"}, {name: "f", body: "2"},
			{name: "d/x", body: "1"}, {name: "d", body: "file"},
			{name: "e", body: "file"}, {name: "e/y", body: "1"},
		}}, nil}, // the last one goes through a file: an error, see below
		{"a path through a link of this layer", [][]entry{{
			{name: "run/"}, {name: "var/run", typ: tar.TypeSymlink, body: "/run"}, {name: "var/run/pid", body: "1"},
		}}, []string{"drwxr-xr-x run", "-rw-r--r-- run/pid 1", "drwxr-xr-x var", "Lrwxrwxrwx var/run -> /run"}},
		{"a path through a link of a layer below", [][]entry{
			{{name: "usr/lib/"}, {name: "lib", typ: tar.TypeSymlink, body: "usr/lib"}},
			{{name: "lib/x.so", body: "1"}},
		}, []string{"drwxr-xr-x usr", "drwxr-xr-x usr/lib", "-rw-r--r-- usr/lib/x.so 1"}},
		{"a link that climbs stays inside", [][]entry{{
			{name: "a/up", typ: tar.TypeSymlink, body: "../../../../etc"}, {name: "a/up/passwd", body: "x"},
		}}, []string{"drwxr-xr-x a", "Lrwxrwxrwx a/up -> ../../../../etc", "drwxr-xr-x etc", "-rw-r--r-- etc/passwd x"}},
		{"dots within the root", [][]entry{{{name: "/a/./b/../c", body: "x"}}}, []string{"drwxr-xr-x a", "-rw-r--r-- a/c x"}},
		{"a folder takes a link's place", [][]entry{
			{{name: "etc/"}, {name: "d", typ: tar.TypeSymlink, body: "etc"}},
			{{name: "d/"}, {name: "d/f", body: "x"}},
		}, []string{"drwxr-xr-x d", "-rw-r--r-- d/f x"}},
		{"hard link to a file below is copied", [][]entry{
			{{name: "f", body: "below", mode: 0o600}},
			{{name: "g", typ: tar.TypeLink, body: "f"}},
		}, []string{"-rw------- g below"}},
		{"hard link to itself", [][]entry{{{name: "f", body: "x"}, {name: "f", typ: tar.TypeLink, body: "./f"}}}, []string{"-rw-r--r-- f x"}},
		{"whiteout of nothing", [][]entry{{{name: ".wh.gone"}, {name: "d/.wh..wh..opq"}, {name: ".wh..wh.plnk/"}}}, []string{"drwxr-xr-x d"}},
		{"a whiteout spares its own layer", [][]entry{
			{{name: "f", body: "old"}},
			{{name: "f", body: "new"}, {name: ".wh.f"}},
		}, []string{"-rw-r--r-- f new"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var layers [][]byte
			for _, l := range tt.layers {
				layers = append(layers, archive(t, l...))
			}
			dirs, err := unpackInto(t, layers...)
			if tt.want == nil {
				if !isBadLayer(err) {
					t.Fatalf("got %v, want a bad layer", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(tt.want, tree(t, dirs[len(dirs)-1])); d != "" {
				t.Fatal(d)
			}
		})
	}
}

func TestExtractRefuses(t *testing.T) {
	loop := []entry{{name: "a", typ: tar.TypeSymlink, body: "b"}, {name: "b", typ: tar.TypeSymlink, body: "a"}, {name: "a/x", body: "1"}}
	for _, tt := range []struct {
		name    string
		entries []entry
		want    error
	}{
		{"climbing out", []entry{{name: "../evil", body: "x"}}, ErrUnsafeLayer},
		{"climbing out late", []entry{{name: "a/../../evil", body: "x"}}, ErrUnsafeLayer},
		{"hard link out", []entry{{name: "l", typ: tar.TypeLink, body: "../../etc/passwd"}}, ErrUnsafeLayer},
		{"hard link to nothing", []entry{{name: "l", typ: tar.TypeLink, body: "nothing"}}, nil},
		{"hard link to a folder", []entry{{name: "d/"}, {name: "l", typ: tar.TypeLink, body: "d"}}, nil},
		{"whiteout of ..", []entry{{name: "d/.wh..."}}, ErrUnsafeLayer},
		{"whiteout without a name", []entry{{name: "d/.wh."}}, ErrUnsafeLayer},
		{"whiteout of .", []entry{{name: "d/.wh.."}}, ErrUnsafeLayer},
		{"links in a circle", loop, nil},
		{"a file as root", []entry{{name: ".", body: "x", typ: tar.TypeReg}}, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := unpackInto(t, archive(t, tt.entries...))
			if !isBadLayer(err) || tt.want != nil && !errors.Is(err, tt.want) {
				t.Fatalf("got %v", err)
			}
		})
	}
	// An archive that ends in the middle.
	b := archive(t, entry{name: "f", body: strings.Repeat("x", 4096)})
	if _, err := unpackInto(t, b[:1024]); !isBadLayer(err) {
		t.Errorf("cut archive: %v", err)
	}
	if _, err := unpackInto(t, []byte(strings.Repeat("no archive ", 100))); !isBadLayer(err) {
		t.Errorf("no archive: %v", err)
	}
}

func TestExtractTimes(t *testing.T) {
	dirs, err := unpackInto(t, archive(t, entry{name: "d/"}, entry{name: "d/f", body: "x"}, entry{name: "l", typ: tar.TypeSymlink, body: "f"}))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"d", "d/f", "l"} {
		fi, err := os.Lstat(filepath.Join(dirs[0], name))
		if err != nil {
			t.Fatal(err)
		}
		if !fi.ModTime().Equal(modTime) {
			t.Errorf("%s: time %v", name, fi.ModTime())
		}
	}
}

// FuzzLayerPaths unpacks layers of hostile paths, links and whiteouts and
// looks for anything written outside.
func FuzzLayerPaths(f *testing.F) {
	f.Add("a/b", "../../x", "a/b/c", byte(1))
	f.Add("l", "/", "l/../../x", byte(1))
	f.Add("l", "..", "l/x", byte(1))
	f.Add(".wh.x", "x", "x", byte(0))
	f.Add("d/.wh..wh..opq", "", "d/f", byte(0))
	f.Add("x", "/etc/passwd", "y", byte(2))
	f.Add("a", "a", "a/a", byte(1))
	f.Fuzz(func(t *testing.T, first, link, second string, kind byte) {
		typ := []byte{tar.TypeReg, tar.TypeSymlink, tar.TypeLink, tar.TypeDir, tar.TypeFifo}[int(kind)%5]
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		for _, h := range []*tar.Header{
			{Name: first, Linkname: link, Typeflag: typ, Mode: 0o644, Uid: os.Getuid(), Gid: os.Getgid()},
			{Name: second, Linkname: first, Typeflag: tar.TypeReg, Mode: 0o644, Uid: os.Getuid(), Gid: os.Getgid()},
			{Name: second + "/.wh." + first, Typeflag: tar.TypeReg, Mode: 0o644, Uid: os.Getuid(), Gid: os.Getgid()},
			{Name: link, Linkname: second, Typeflag: tar.TypeLink, Mode: 0o644, Uid: os.Getuid(), Gid: os.Getgid()},
		} {
			if w.WriteHeader(h) != nil {
				return // not a name an archive can hold
			}
		}
		if w.Close() != nil {
			return
		}
		outer := t.TempDir()
		below, root := filepath.Join(outer, "below"), filepath.Join(outer, "root")
		for _, d := range []string{below, root} {
			if err := os.Mkdir(d, 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := extract(t.Context(), bytes.NewReader(b.Bytes()), below, nil, roomy(below)); err != nil && !isBadLayer(err) && !isRootError(err) {
			t.Fatalf("lower: %v", err)
		}
		before := tree(t, below)
		if _, err := extract(t.Context(), bytes.NewReader(b.Bytes()), root, lowerDir{below}, roomy(root)); err != nil && !isBadLayer(err) && !isRootError(err) {
			t.Fatalf("upper: %v", err)
		}
		if d := cmp.Diff(before, tree(t, below)); d != "" {
			t.Fatalf("the layer below changed:\n%s", d)
		}
		entries, err := os.ReadDir(outer)
		if err != nil || len(entries) != 2 {
			t.Fatalf("written outside: %v %v", entries, err)
		}
	})
}

// isRootError says whether overlayfs's marks were refused for want of root.
func isRootError(err error) bool {
	return errors.Is(err, unix.EPERM)
}
