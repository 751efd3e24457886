package nodelog

import (
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

func put(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// machine is a directory of logs with what somebody hostile might have left in it.
func machine(t *testing.T) string {
	t.Helper()
	top := t.TempDir()
	dir := filepath.Join(top, "log")
	put(t, filepath.Join(top, "secret"), "secret\n")
	put(t, filepath.Join(dir, "syslog"), "one\ntwo\nthree\n")
	put(t, filepath.Join(dir, "app", "app.log"), "of the app\n")
	put(t, filepath.Join(dir, "<b>"), "page\n")
	for name, to := range map[string]string{"out": "../secret", "abs": filepath.Join(top, "secret"), "in": "syslog", "updir": ".."} {
		if err := os.Symlink(to, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := syscall.Mkfifo(filepath.Join(dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	return dir
}

func get(h http.Handler, path string) (int, string) {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	return w.Code, w.Body.String()
}

func TestFiles(t *testing.T) {
	h := New(Config{Dir: machine(t)})
	for _, c := range []struct {
		path string
		code int
		text string
	}{
		{"/logs/", 200, `<a href="./syslog">syslog</a>`},
		{"/logs/", 200, `<a href="./app/">app/</a>`},
		{"/logs/", 200, `&lt;b&gt;`},
		{"/logs/syslog", 200, "one\ntwo\nthree\n"},
		{"/logs/in", 200, "one\n"},
		{"/logs/app/app.log", 200, "of the app\n"},
		{"/logs/app", 301, ""},
		{"/logs/app/", 200, "app.log"},
		{"/logs/missing", 404, "missing"},
		{"/logs/out", 403, "leads out"},
		{"/logs/abs", 403, "leads out"},
		{"/logs/updir/secret", 403, "leads out"},
		{"/logs/fifo", 403, "not a plain file"},
		{"/logs/../secret", 400, "no path"},
		{"/logs/%2e%2e/secret", 400, "no path"},
		{"/logs/app/..%2f..%2fsecret", 400, "no path"},
		{"/logs/a%00b", 400, "no path"},
		{"/logs//etc/passwd", 404, "no log"},
	} {
		code, text := get(h, c.path)
		if code != c.code || !strings.Contains(text, c.text) || strings.Contains(text, "secret\n") {
			t.Errorf("%s: %d %s, want %d %s", c.path, code, text, c.code, c.text)
		}
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodDelete, "/logs/syslog", nil))
	if w.Code != http.StatusMethodNotAllowed {
		t.Errorf("DELETE: %d", w.Code)
	}
}

func TestQuestions(t *testing.T) {
	for text, want := range map[string]string{
		"":                              "query",
		"query=":                        "query",
		"query=-rf":                     "no service's name",
		"query=a b":                     "no service's name",
		"query=a;id":                    "no service's name",
		"query=$(id)":                   "no service's name",
		"query=*":                       "no service's name",
		"query=..":                      "no service's name",
		"query=../secret":               "without . and ..",
		"query=/../secret":              "without . and ..",
		"query=/":                       "without . and ..",
		"query=//etc/passwd":            "without . and ..",
		"query=/syslog&query=ssh":       "one file",
		"query=ssh&boot=1":              "boot",
		"query=/syslog&boot=0":          "boot",
		"query=ssh&tailLines=-1":        "tailLines",
		"query=ssh&tailLines=many":      "tailLines",
		"query=ssh&sinceTime=yesterday": "sinceTime",
		"query=ssh&pattern=(":           "pattern",
		"query=ssh&follow=1":            "follow",
		"query=ssh&boot=0&boot=0":       "2 times",
		"query=ssh&sinceTime=2026-01-02T00:00:00Z&untilTime=2026-01-01T00:00:00Z": "before",
		"query=" + strings.Repeat("a", 300):                                       "query",
	} {
		values, err := url.ParseQuery(strings.ReplaceAll(text, ";", "%3B"))
		if err != nil {
			t.Fatal(err)
		}
		if q, err := ask(values); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %+v, %v", text, q, err)
		}
	}
	values, _ := url.ParseQuery("query=ssh&query=cron.service&sinceTime=2026-01-02T03:04:05%2B01:00&tailLines=3&boot=-1&pattern=a.b")
	q, err := ask(values)
	if err != nil {
		t.Fatal(err)
	}
	want := "--quiet --utc --no-pager --output=short-precise --unit=ssh --unit=cron.service --since=2026-01-02 02:04:05 --lines=3 --boot=-1 --grep=a.b"
	if got := strings.Join(q.arguments(), " "); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
}

// journalctl is a program in the place of systemd's.
func journalctl(t *testing.T, script string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "journalctl")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestQueries(t *testing.T) {
	dir := machine(t)
	own := filepath.Join(t.TempDir(), "clusterd.log")
	put(t, strings.TrimSuffix(own, ".log")+"-2026-01-01T00-00-00.000.log", "time=2026-01-01T00:00:00.000Z level=INFO msg=old\n")
	put(t, own, "time=2026-01-02T00:00:00.000Z level=INFO msg=new\n{\"time\":\"2026-01-03T00:00:00Z\",\"msg\":\"newer\"}\n")
	echo := journalctl(t, `for a; do echo "$a"; done`)
	none := journalctl(t, `echo "No journal files were found." >&2`)
	empty := journalctl(t, `exit 1`)
	for _, c := range []struct {
		name, journalctl, query string
		code                    int
		text                    string
	}{
		{"a service", echo, "query=ssh&tailLines=2", 200, "--unit=ssh\n--lines=2\n"},
		{"this program, in the journal", echo, "query=kubelet", 200, "--unit=clusterd\n"},
		{"no journal, a file", none, "query=app", 200, "of the app\n"},
		{"no entries, a file", empty, "query=syslog&tailLines=2", 200, "two\nthree\n"},
		{"no journal, no file", none, "query=ssh", 404, "No journal files were found."},
		{"no entries, no file", empty, "query=ssh", 404, "no lines of ssh"},
		{"no journalctl", filepath.Join(dir, "none"), "query=ssh", 404, "no such file"},
		{"a link in the place of a service", none, "query=out", 403, "leads out"},
		{"a file", echo, "query=/syslog&pattern=t.o", 200, "two\n"},
		{"the last lines of a file", echo, "query=/syslog&tailLines=1", 200, "three\n"},
		{"no lines", echo, "query=/syslog&tailLines=0", 200, ""},
		{"a folder", echo, "query=/app", 404, "folder"},
		{"a link", echo, "query=/out", 403, "leads out"},
		{"a file's time", echo, "query=/syslog&sinceTime=2026-01-01T00:00:00Z", 400, "leave them out"},
	} {
		t.Run(c.name, func(t *testing.T) {
			code, text := get(New(Config{Dir: dir, Journalctl: c.journalctl}), "/logs/?"+c.query)
			if code != c.code || !strings.HasSuffix(text, c.text) && !strings.Contains(text, c.text) || strings.Contains(text, "secret\n") {
				t.Errorf("%d %s, want %d %s", code, text, c.code, c.text)
			}
		})
	}
	h := New(Config{Dir: dir, Own: own, Journalctl: none})
	for query, want := range map[string]string{
		"query=clusterd":                                "old new newer",
		"query=kubelet&tailLines=2":                     "new newer",
		"query=clusterd&sinceTime=2026-01-02T00:00:00Z": "new newer",
		"query=clusterd&untilTime=2026-01-02T00:00:00Z": "old new",
		"query=clusterd&pattern=msg..?.?newer":          "newer",
	} {
		code, text := get(h, "/logs/?"+query)
		var got []string
		for line := range strings.Lines(text) {
			for _, word := range []string{"newer", "new", "old"} {
				if strings.Contains(line, word) {
					got = append(got, word)
					break
				}
			}
		}
		if code != 200 || strings.Join(got, " ") != want {
			t.Errorf("%s: %d %s, want %s", query, code, text, want)
		}
	}
	if code, text := get(h, "/logs/syslog?query=clusterd"); code != 400 {
		t.Errorf("%d %s", code, text)
	}
}

func TestOwnLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log", "clusterd.log")
	f := OwnLog(path)
	defer f.Close()
	line := []byte(strings.Repeat("x", 1<<20-1) + "\n")
	for range 3*ownMegabytes + 2 {
		if _, err := f.Write(line); err != nil {
			t.Fatal(err)
		}
	}
	st, err := os.Stat(path)
	if err != nil || st.Size() > ownMegabytes<<20 || st.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", st, err)
	}
	if older := OlderLogs(path); len(older) == 0 {
		t.Error("no older file")
	}
	put(t, filepath.Join(filepath.Dir(path), "clusterd-late.txt"), "not one of them")
	if older := OlderLogs(path); len(older) > 0 && strings.HasSuffix(older[len(older)-1], ".txt") {
		t.Error(older)
	}
}
