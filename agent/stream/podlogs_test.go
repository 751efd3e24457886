package stream

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
	"k8s.io/utils/ptr"
)

const stamp = "2026-01-02T03:04:05.000000000Z"

func line(stream, tag, text string) string {
	return stamp + " " + stream + " " + tag + " " + text + "\n"
}

func write(t testing.TB, path string, parts ...string) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err == nil {
		_, err = f.WriteString(strings.Join(parts, ""))
	}
	if err == nil {
		err = f.Close()
	}
	if err != nil {
		t.Fatal(err)
	}
}

func read(t testing.TB, path string, o LogOptions) string {
	t.Helper()
	var out bytes.Buffer
	if err := ReadLog(t.Context(), path, o, nil, &out); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestReadLog(t *testing.T) {
	path := filepath.Join(t.TempDir(), "0.log")
	write(t, path+".2", line("stdout", "F", "one"))
	write(t, path+".1", line("stdout", "F", "two"), line("stderr", "F", "err"))
	write(t, path, line("stdout", "P", "thr"), line("stdout", "P", "e"), line("stdout", "F", "e"),
		"garbage\n", "2026-01-02T04:00:00Z stdout F late\n", line("stdout", "F", "")[:len(stamp)+5])
	tail := func(n int64) LogOptions { return LogOptions{Tail: &n} }
	for _, tt := range []struct {
		name string
		o    LogOptions
		want string
	}{
		{"all, rotated files first", LogOptions{}, "one\ntwo\nerr\nthree\nlate\n"},
		{"tail 0", tail(0), ""},
		{"tail 1", tail(1), "late\n"},
		{"tail 3: a split line counts once", tail(3), "three\nlate\n"}, // garbage is a line, too
		{"tail over files", tail(5), "two\nerr\nthree\nlate\n"},
		{"tail of more than there is", tail(99), "one\ntwo\nerr\nthree\nlate\n"},
		{"timestamps", LogOptions{Timestamps: true, Tail: ptr.To(int64(3))}, stamp + " three\n2026-01-02T04:00:00Z late\n"},
		{"since", LogOptions{Since: time.Date(2026, 1, 2, 3, 30, 0, 0, time.UTC)}, "late\n"},
		{"stderr", LogOptions{Stream: "stderr"}, "err\n"},
		{"limit", LogOptions{LimitBytes: ptr.To(int64(6))}, "one\ntw"},
		{"limit 0", LogOptions{LimitBytes: ptr.To(int64(0))}, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			if got := read(t, path, tt.o); got != tt.want {
				t.Errorf("%q, want %q", got, tt.want)
			}
		})
	}
	if got := read(t, filepath.Join(t.TempDir(), "none.log"), LogOptions{}); got != "" {
		t.Errorf("no log: %q", got)
	}
}

// TestTailAgrees: any tail is the end of the whole, at every block boundary.
func TestTailAgrees(t *testing.T) {
	path := filepath.Join(t.TempDir(), "0.log")
	var all []string
	for i := range 2000 {
		s := strings.Repeat("x", i%97) + fmt.Sprint(i)
		write(t, path, line("stdout", "F", s))
		all = append(all, s+"\n")
	}
	for _, n := range []int64{1, 2, 10, 333, 999, 1999, 2000, 2001} {
		want := strings.Join(all[max(0, len(all)-int(n)):], "")
		if got := read(t, path, LogOptions{Tail: &n}); got != want {
			t.Errorf("tail %d: %d bytes, want %d", n, len(got), len(want))
		}
	}
}

// watcher is a writer whose content can be waited for.
type watcher struct {
	mu   sync.Mutex
	cond *sync.Cond
	buf  bytes.Buffer
}

func newWatcher() *watcher { w := &watcher{}; w.cond = sync.NewCond(&w.mu); return w }

func (w *watcher) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cond.Broadcast()
	return w.buf.Write(p)
}

// wait returns when the content is want; the test's deadline ends it.
func (w *watcher) wait(t *testing.T, want string) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	stop := time.AfterFunc(61*time.Second, w.cond.Broadcast)
	defer stop.Stop()
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.buf.String() != want {
		if time.Now().After(deadline) {
			t.Fatalf("%q, want %q", w.buf.String(), want)
		}
		w.cond.Wait()
	}
}

func TestFollow(t *testing.T) { follow(t, fsnotify.NewWatcher) }

// TestFollowWithoutInotify: pods have taken all of this user's inotify instances.
func TestFollowWithoutInotify(t *testing.T) {
	follow(t, func() (*fsnotify.Watcher, error) { return nil, unix.EMFILE })
}

func follow(t *testing.T, watcher func() (*fsnotify.Watcher, error)) {
	path := filepath.Join(t.TempDir(), "0.log")
	write(t, path, line("stdout", "F", "old"), line("stdout", "F", "one"))
	done := make(chan struct{})
	out := newWatcher()
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := readLog(t.Context(), path, LogOptions{Follow: true, Tail: ptr.To(int64(1))}, done, out, watcher); err != nil {
			t.Error(err)
		}
	})
	out.wait(t, "one\n")
	write(t, path, line("stdout", "F", "two"))
	out.wait(t, "one\ntwo\n")
	write(t, path, stamp+" stdout F thr") // half a line
	write(t, path, "ee\n")
	out.wait(t, "one\ntwo\nthree\n")
	// Rotation: nothing is lost, nothing comes twice.
	write(t, path, line("stdout", "F", "before"))
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	write(t, path, line("stdout", "F", "after"))
	out.wait(t, "one\ntwo\nthree\nbefore\nafter\n")
	write(t, path, line("stdout", "F", "last"))
	close(done) // what was written before the end is still read
	wg.Wait()
	out.wait(t, "one\ntwo\nthree\nbefore\nafter\nlast\n")
}

// TestFollowBeforeTheFile: following begins before the first line was written.
func TestFollowBeforeTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "0.log")
	ctx, cancel := context.WithCancel(t.Context())
	out := newWatcher()
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := ReadLog(ctx, path, LogOptions{Follow: true}, nil, out); err != nil {
			t.Error(err)
		}
	})
	write(t, path, line("stdout", "F", "one"))
	out.wait(t, "one\n")
	cancel()
	wg.Wait()
}

func FuzzReadLog(f *testing.F) {
	f.Add([]byte(line("stdout", "F", "x")+line("stderr", "P", "y")), int64(1), int64(5))
	f.Add([]byte("\n\n \n  F\n"), int64(0), int64(-1))
	f.Fuzz(func(t *testing.T, log []byte, tail, limit int64) {
		path := filepath.Join(t.TempDir(), "0.log")
		if err := os.WriteFile(path, log, 0o644); err != nil {
			t.Fatal(err)
		}
		whole := read(t, path, LogOptions{})
		if tail >= 0 {
			if got := read(t, path, LogOptions{Tail: &tail}); !strings.HasSuffix(whole, got) {
				t.Errorf("tail %d is %q, not an end of %q", tail, got, whole)
			}
		}
		if limit >= 0 {
			if got := read(t, path, LogOptions{LimitBytes: &limit}); int64(len(got)) > limit || !strings.HasPrefix(whole, got) {
				t.Errorf("limit %d gives %q of %q", limit, got, whole)
			}
		}
	})
}

// TestReadLogInRotation: while a rotation goes on one number is free, and what
// was moved past it is read all the same.
func TestReadLogInRotation(t *testing.T) {
	for _, free := range []string{"", ".1", ".2", ".3"} {
		path := filepath.Join(t.TempDir(), "0.log")
		want := ""
		for _, part := range []string{".4", ".3", ".2", ".1", ""} {
			if part != free {
				write(t, path+part, line("stdout", "F", "part"+part))
				want += "part" + part + "\n"
			}
		}
		if got := read(t, path, LogOptions{}); got != want {
			t.Errorf("with %q free: %q, want %q", free, got, want)
		}
	}
}
