package podspec

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

func TestParseEnvFile(t *testing.T) {
	for text, want := range map[string]map[string]string{
		"":      {},
		"A='1'": {"A": "1"},
		"\n# no\n  # no\n \t\r\n  A='1' \t\r\nB=''\n": {"A": "1", "B": ""},
		"A='two\nlines # and \\n'\nB='$A \"x\" =='":   {"A": "two\nlines # and \\n", "B": `$A "x" ==`},
		"A='1'\nA='2'": {"A": "2"},
		"a.b-c='x'":    {"a.b-c": "x"},
	} {
		got, err := parseEnvFile(text)
		if d := cmp.Diff(want, got); err != nil || d != "" {
			t.Errorf("%q: %v %s", text, err, d)
		}
	}
	for text, want := range map[string]string{
		"A=1":              "line 1: want NAME='value'",
		`A="1"`:            "line 1: want NAME='value'",
		"A='1'\n\nB = '2'": "line 3: want NAME='value'",
		"A=\n='1'":         "line 1: want NAME='value'",
		"='1'":             `line 1: "" is not a name`,
		"A='1\n2' x":       `line 2: " x" follows the closing quote of A`,
		"A='1''2'":         `line 1: "'2'" follows`,
		"B='1'\nA='1\n":    "line 2: the value of A has no closing quote",
		"export A='1'":     `line 1: "export A" is not a name`,
	} {
		if got, err := parseEnvFile(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, %v; want %s", text, got, err, want)
		}
	}
}

func FuzzParseEnvFile(f *testing.F) {
	f.Add("A='1'\n# x\n  B='two\nlines'\n")
	f.Fuzz(func(t *testing.T, text string) {
		vars, err := parseEnvFile(text)
		for k, v := range vars {
			if err != nil || k == "" || strings.ContainsAny(k, "= ") || strings.Contains(v, "'") {
				t.Errorf("%q: %q=%q, %v", text, k, v, err)
			}
		}
	})
}

func TestFileValue(t *testing.T) {
	dir, outside := t.TempDir(), filepath.Join(t.TempDir(), "secret")
	for name, text := range map[string]string{
		filepath.Join(dir, "app.env"): "A='1'\n", outside: "A='stolen'\n", filepath.Join(dir, "bad"): "A=1",
		filepath.Join(dir, "large"): "A='" + strings.Repeat("x", maxEnvFile) + "'",
	} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(outside, filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(filepath.Join(dir, "pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	in := envInput{volumeDir: func(string) (string, error) { return dir, nil }}
	for _, tt := range []struct {
		path, key string
		optional  bool
		want      string
		ok        bool
		err       string
	}{
		{path: "app.env", key: "A", want: "1", ok: true},
		{path: "app.env", key: "B", optional: true},
		{path: "none", key: "A", optional: true},
		{path: "app.env", key: "B", err: `couldn't find key B in file "app.env" of volume "v"`},
		{path: "none", key: "A", err: "no such file"},
		{path: "link", key: "A", optional: true, err: "escapes"},
		{path: "../secret", key: "A", err: "escapes"},
		{path: "pipe", key: "A", optional: true, err: "is not a regular file"},
		{path: "bad", key: "A", optional: true, err: "line 1: want"},
		{path: "large", key: "A", err: "is larger than 64 KiB"},
	} {
		got, ok, err := fileValue(in, &v1.FileKeySelector{VolumeName: "v", Path: tt.path, Key: tt.key, Optional: ptr.To(tt.optional)})
		if tt.err != "" {
			if err == nil || !strings.Contains(err.Error(), tt.err) {
				t.Errorf("%s %s: %v, want %s", tt.path, tt.key, err, tt.err)
			}
			continue
		}
		if err != nil || got != tt.want || ok != tt.ok {
			t.Errorf("%s %s: %q %t %v", tt.path, tt.key, got, ok, err)
		}
	}
}
