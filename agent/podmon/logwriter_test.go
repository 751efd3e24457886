package podmon

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func testLog(t *testing.T, maxBytes int64, maxFiles int) *logFile {
	t.Helper()
	l, err := openLog(filepath.Join(t.TempDir(), "pod", "c.log"), maxBytes, maxFiles, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	l.now = func() time.Time { return time.Unix(0, 0) }
	t.Cleanup(l.close)
	return l
}

const stamp = "1970-01-01T00:00:00Z "

func TestLogLines(t *testing.T) {
	x := func(n int) string { return strings.Repeat("x", n) }
	for name, tc := range map[string]struct {
		writes []string
		want   []string // lines without their time
	}{
		"one line":              {[]string{"a\n"}, []string{"F a"}},
		"empty line":            {[]string{"\n\n"}, []string{"F ", "F "}},
		"two in one":            {[]string{"a\nb\n"}, []string{"F a", "F b"}},
		"one in three":          {[]string{"a", "b", "c\n"}, []string{"F abc"}},
		"never finished":        {[]string{"a\nb"}, []string{"F a", "P b"}},
		"carriage return stays": {[]string{"a\r\n"}, []string{"F a\r"}},
		"just a part":           {[]string{x(maxLine) + "\n"}, []string{"F " + x(maxLine)}},
		"one over":              {[]string{x(maxLine+1) + "\n"}, []string{"P " + x(maxLine), "F x"}},
		"over in pieces":        {[]string{x(maxLine - 1), "yz", "\n"}, []string{"P " + x(maxLine-1) + "y", "F z"}},
		"exactly, then newline": {[]string{x(maxLine), "\n"}, []string{"P " + x(maxLine), "F "}},
		"nothing":               {nil, nil},
	} {
		t.Run(name, func(t *testing.T) {
			l := testLog(t, 0, 0)
			s := l.stream("stdout")
			for _, w := range tc.writes {
				s.write([]byte(w))
			}
			s.end()
			b, err := os.ReadFile(l.path)
			if err != nil {
				t.Fatal(err)
			}
			want := ""
			for _, w := range tc.want {
				want += stamp + "stdout " + w + "\n"
			}
			if string(b) != want {
				t.Errorf("got %q\nwant %q", b, want)
			}
		})
	}
}

func TestLogRotation(t *testing.T) {
	l := testLog(t, 200, 3)
	s := l.stream("stdout")
	for i := range 40 {
		fmt.Fprintf(writerFunc(s.write), "line %02d\n", i)
	}
	var all string
	for _, suffix := range []string{".2", ".1", ""} {
		b, err := os.ReadFile(l.path + suffix)
		if err != nil {
			t.Fatal(err)
		}
		if len(b) == 0 || len(b) > 200 {
			t.Errorf("file %q has %d bytes", suffix, len(b))
		}
		all += string(b)
	}
	if !strings.HasSuffix(all, "line 38\n"+stamp+"stdout F line 39\n") {
		t.Errorf("end of the log: %q", all)
	}
	if n := strings.Count(all, "\n"); n < 10 {
		t.Errorf("%d lines kept", n)
	}
	if _, err := os.Stat(l.path + ".3"); err == nil {
		t.Error("a fourth file was kept")
	}
}

// TestLogThatCannotBeRotated: while no file can be opened the log grows on, no file is
// moved and no line is lost; then it is rotated as always.
func TestLogThatCannotBeRotated(t *testing.T) {
	l := testLog(t, 200, 3)
	now := time.Unix(0, 0)
	l.now = func() time.Time { return now }
	s := l.stream("stdout")
	write := func(from, to int) {
		for i := from; i < to; i++ {
			fmt.Fprintf(writerFunc(s.write), "line %02d\n", i)
		}
	}
	write(0, 13) // two whole files, and the third begun
	obstacle := filepath.Join(l.path+freshSuffix, "full")
	if err := os.MkdirAll(obstacle, 0o700); err != nil {
		t.Fatal(err)
	}
	write(13, 30)
	lines := func() (n int) {
		t.Helper()
		for _, suffix := range []string{".2", ".1", ""} {
			b, err := os.ReadFile(l.path + suffix)
			if err != nil && !os.IsNotExist(err) {
				t.Fatal(err)
			}
			n += strings.Count(string(b), "\n")
		}
		return n
	}
	if n := lines(); n != 30 {
		t.Errorf("%d lines are kept of 30", n)
	}
	if b, err := os.ReadFile(l.path); err != nil || !strings.HasSuffix(string(b), "line 29\n") {
		t.Errorf("the newest lines are not in the file of that name: %v", err)
	}
	write(30, 31)
	if n := lines(); n != 31 {
		t.Errorf("%d lines are kept of 31", n)
	}
	if err := os.RemoveAll(l.path + freshSuffix); err != nil {
		t.Fatal(err)
	}
	now = now.Add(rotateAgain)
	write(31, 32)
	if b, err := os.ReadFile(l.path); err != nil || string(b) != "1970-01-01T00:00:10Z stdout F line 31\n" {
		t.Errorf("after the rotation: %q, %v", b, err)
	}
	if n := lines(); n != 32-5 {
		t.Errorf("%d lines are kept, want all but the oldest file's", n)
	}
	if _, err := os.Stat(l.path + freshSuffix); err == nil {
		t.Error("a file was left over")
	}
	// What a podmon left that was killed meanwhile goes with the next one.
	if err := os.WriteFile(l.path+freshSuffix, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	again, err := openLog(l.path, 200, 3, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer again.close()
	if _, err := os.Stat(l.path + freshSuffix); err == nil {
		t.Error("what a killed process left is there still")
	}
}

type writerFunc func([]byte)

func (f writerFunc) Write(p []byte) (int, error) { f(p); return len(p), nil }

// TestLogThatCannotBeWritten: what is lost is said, once it can be.
func TestLogThatCannotBeWritten(t *testing.T) {
	if _, err := os.Stat("/dev/full"); err != nil {
		t.Skip("no /dev/full")
	}
	l := testLog(t, -1, 0)
	s := l.stream("stdout")
	s.write([]byte("before\n"))
	good := l.f
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	l.f = full
	s.write([]byte("lost\n"))
	s.write([]byte("lost too\n"))
	l.f = good
	s.write([]byte("after\n"))
	b, err := os.ReadFile(l.path)
	if err != nil {
		t.Fatal(err)
	}
	lost := len(stamp+"stdout F lost\n") + len(stamp+"stdout F lost too\n")
	want := stamp + "stdout F before\n" +
		fmt.Sprintf("%sstderr F podmon: %d bytes of log are lost: it could not be written\n", stamp, lost) +
		stamp + "stdout F after\n"
	if string(b) != want {
		t.Errorf("got %q\nwant %q", b, want)
	}
}

// TestNoLog: a container without a log writes nowhere and fails nowhere.
func TestNoLog(t *testing.T) {
	none, err := openLog("", 0, 0, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	none.stream("stdout").write([]byte("x\n"))
}
