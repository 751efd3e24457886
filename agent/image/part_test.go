package image

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/random"
)

// breaking serves one blob itself: it may break off, and answers ranges as rule says.
type breaking struct {
	hex  string
	body []byte

	mu     sync.Mutex // guards all below
	after  int        // bytes after which the next answer breaks off; 0: it does not
	rule   string     // "", "ignore", "other", "refuse", "forbid", "gone"
	asked  func()     // at each request
	ranges []string   // asked for
	sent   int
}

func (b *breaking) wrap(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet || !strings.HasSuffix(r.URL.Path, b.hex) {
			h.ServeHTTP(w, r)
			return
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		asked := r.Header.Get("Range")
		b.ranges = append(b.ranges, asked)
		if b.asked != nil {
			b.asked()
		}
		if b.rule == "gone" {
			http.NotFound(w, r)
			return
		}
		from, body := 0, b.body
		if asked != "" {
			n, err := strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(asked, "bytes="), "-"))
			if err != nil {
				http.Error(w, asked, http.StatusBadRequest)
				return
			}
			switch b.rule {
			case "refuse":
				w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
				return
			case "forbid":
				w.WriteHeader(http.StatusForbidden)
				return
			case "other":
				w.Header().Set("Content-Range", fmt.Sprintf("bytes 0-%d/%d", len(body)-1, len(body)))
				w.WriteHeader(http.StatusPartialContent)
				_, _ = w.Write(body)
				return
			case "ignore":
			default:
				from = n
			}
		}
		if from > 0 {
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, len(body)-1, len(body)))
		}
		w.Header().Set("Content-Length", strconv.Itoa(len(body)-from))
		if from > 0 {
			w.WriteHeader(http.StatusPartialContent)
		}
		rest := body[from:]
		if b.after > 0 {
			n, _ := w.Write(rest[:b.after])
			b.sent += n
			b.after = 0
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}
		n, _ := w.Write(rest)
		b.sent += n
	})
}

func (b *breaking) set(after int, rule string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.after, b.rule, b.ranges, b.sent = after, rule, nil, 0
}

func (b *breaking) seen() (ranges []string, sent int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.ranges, b.sent
}

// oneLayer is an image of one layer, and that as it is sent.
func oneLayer(t *testing.T) (v1.Image, v1.Hash, []byte) {
	t.Helper()
	img, err := random.Image(1<<20, 1)
	if err != nil {
		t.Fatal(err)
	}
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	digest, err := layers[0].Digest()
	if err != nil {
		t.Fatal(err)
	}
	rc, err := layers[0].Compressed()
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(rc)
	if err != nil {
		t.Fatal(err)
	}
	return img, digest, body
}

// TestResume: a download that broke off goes on where it ended, over a restart as well,
// and whatever the registry makes of it, what is kept has the digest.
func TestResume(t *testing.T) {
	img, digest, body := oneLayer(t)
	const first = 300_000
	for _, tt := range []struct {
		name    string
		rule    string
		restart bool
		damage  func(path string) error // of the part
		tries   int                     // until it is here
		ranges  int                     // requests with a range
		saved   bool                    // the first bytes were not sent again
	}{
		{name: "goes on", tries: 1, ranges: 1, saved: true},
		{name: "after a restart", restart: true, tries: 1, ranges: 1, saved: true},
		{name: "a registry without ranges", rule: "ignore", tries: 1, ranges: 1},
		{name: "a registry that refuses the range", rule: "refuse", tries: 1, ranges: 1},
		{name: "a registry that forbids the range", rule: "forbid", tries: 1, ranges: 1},
		{name: "a registry with another range", rule: "other", tries: 1, ranges: 1},
		{name: "a damaged part", tries: 1, ranges: 1, damage: func(p string) error {
			f, err := os.OpenFile(p, os.O_WRONLY, 0)
			if err != nil {
				return err
			}
			_, err = f.WriteAt([]byte("not this"), 1000)
			return errors.Join(err, f.Close())
		}},
		{name: "a part longer than the layer", tries: 1, ranges: 0, damage: func(p string) error { return os.Truncate(p, 2<<20) }},
		{name: "a part that is gone", tries: 1, ranges: 0, damage: os.Remove},
	} {
		t.Run(tt.name, func(t *testing.T) {
			b := &breaking{hex: digest.Hex, body: body}
			host := serve(t, b.wrap)
			push(t, host+"/a:1", img)
			s := open(t, t.TempDir())
			b.set(first, tt.rule)
			if _, err := s.Ensure(t.Context(), host+"/a:1", Auth{}); err == nil {
				t.Fatal("it was pulled though it broke off")
			}
			path := s.partPath(partKey(digest.Hex, host+"/a"))
			if st, err := os.Stat(path); err != nil || st.Size() == 0 || st.Size() > first {
				t.Fatalf("no part is kept: %v %v", st, err)
			}
			if tt.restart {
				if err := s.Close(); err != nil {
					t.Fatal(err)
				}
				s = open(t, s.cfg.Dir)
			}
			if tt.damage != nil {
				if err := tt.damage(path); err != nil {
					t.Fatal(err)
				}
			}
			b.set(0, tt.rule)
			for try := 1; ; try++ {
				_, err := s.Ensure(t.Context(), host+"/a:1", Auth{})
				if err == nil {
					if try != tt.tries {
						t.Errorf("it took %d tries", try)
					}
					break
				}
				if try == tt.tries {
					t.Fatal(err)
				}
			}
			ranges, sent := b.seen()
			n := 0
			for _, r := range ranges {
				if r != "" {
					n++
				}
			}
			if n != tt.ranges || (sent < len(body)) != tt.saved {
				t.Errorf("asked for %q, %d of %d bytes were sent", ranges, sent, len(body))
			}
			if left, _ := filepath.Glob(s.path("parts", "*")); len(left) != 0 {
				t.Errorf("left: %v", left)
			}
			s.nothingLeft(t)
		})
	}
}

// TestPartsGo: parts go when room is wanted, with their age, and by their number of
// bytes; one that a download is at stays.
func TestPartsGo(t *testing.T) {
	s := open(t, t.TempDir())
	write := func(digest string, size int) {
		t.Helper()
		if err := os.WriteFile(s.partPath(digest), make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	have := func(want ...string) {
		t.Helper()
		list, err := os.ReadDir(s.path("parts"))
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, e := range list {
			got = append(got, e.Name())
		}
		if strings.Join(got, " ") != strings.Join(want, " ") {
			t.Errorf("parts: %v, want %v", got, want)
		}
	}
	old := modTime // years before
	for _, d := range []string{"a", "b", "c"} {
		write(d, 100)
	}
	if err := os.Chtimes(s.partPath("a"), old, old); err != nil {
		t.Fatal(err)
	}
	s.trimParts(partAge, 1000)
	have("b", "c")
	p, err := s.openPart("b", 1000)
	if err != nil || p.have != 100 {
		t.Fatalf("%+v %v", p, err)
	}
	second, err := s.openPart("b", 1000)
	if err != nil || second.have != 0 || second.kept {
		t.Fatalf("two downloads have one part: %+v %v", second, err)
	}
	second.came = 10
	s.closePart(second, errors.New("broke off"))
	if _, err := s.GC(t.Context(), GCPolicy{Bytes: 1}); err != nil {
		t.Fatal(err)
	}
	have("b")
	p.came = 50
	s.closePart(p, fmt.Errorf("x: %w", ErrDigest))
	have()
	write("d", 100)
	write("e", 100)
	s.trimParts(partAge, 150)
	if list, _ := os.ReadDir(s.path("parts")); len(list) != 1 {
		t.Errorf("parts of more bytes than are kept: %v", list)
	}
}

// TestPartOutlivesARefusal: a request that failed before its first byte takes nothing of
// what is here, and does not make it younger either.
func TestPartOutlivesARefusal(t *testing.T) {
	img, digest, body := oneLayer(t)
	b := &breaking{hex: digest.Hex, body: body}
	host := serve(t, b.wrap)
	push(t, host+"/a:1", img)
	s := open(t, t.TempDir())
	pull := func() error {
		_, err := s.Ensure(t.Context(), host+"/a:1", Auth{})
		return err
	}
	b.set(300_000, "")
	if pull() == nil {
		t.Fatal("it was pulled though it broke off")
	}
	path := s.partPath(partKey(digest.Hex, host+"/a"))
	then := time.Now().Add(-time.Hour).Truncate(time.Second)
	if err := os.Chtimes(path, then, then); err != nil {
		t.Fatal(err)
	}
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	b.set(0, "gone")
	if pull() == nil {
		t.Fatal("it was pulled though the layer is not there")
	}
	if st, err := os.Stat(path); err != nil || st.Size() != before.Size() || !st.ModTime().Equal(then) {
		t.Errorf("of the part is left: %v %v, it was %v", st, err, before)
	}
	b.set(0, "")
	if err := pull(); err != nil {
		t.Fatal(err)
	}
	if ranges, sent := b.seen(); int64(sent) != int64(len(body))-before.Size() {
		t.Errorf("asked for %q, %d of %d bytes were sent", ranges, sent, len(body))
	}
}

// TestPartIsReadBeforeTheRequest: while what is here is read, which may take minutes, no
// registry waits for its answer to be read.
func TestPartIsReadBeforeTheRequest(t *testing.T) {
	img, digest, body := oneLayer(t)
	b := &breaking{hex: digest.Hex, body: body}
	host := serve(t, b.wrap)
	push(t, host+"/a:1", img)
	s := open(t, t.TempDir())
	b.set(300_000, "")
	if _, err := s.Ensure(t.Context(), host+"/a:1", Auth{}); err == nil {
		t.Fatal("it was pulled though it broke off")
	}
	st, err := os.Stat(s.partPath(partKey(digest.Hex, host+"/a")))
	if err != nil {
		t.Fatal(err)
	}
	b.set(0, "")
	var read []Progress
	b.asked = func() { // the answer waits for it
		for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
			if read = s.Pulling(); len(read) == 1 && read[0].Done > 0 || time.Now().After(deadline) {
				return
			}
		}
	}
	if _, err := s.Ensure(t.Context(), host+"/a:1", Auth{}); err != nil {
		t.Fatal(err)
	}
	if want := (Progress{Ref: host + "/a:1", Done: st.Size(), Total: int64(len(body))}); len(read) != 1 || read[0] != want {
		t.Errorf("when it was asked: %+v, want %+v", read, want)
	}
}

// TestPartOfAnotherSource: what a mirror, or another registry with a layer of the same
// digest, has sent is not gone on with elsewhere.
func TestPartOfAnotherSource(t *testing.T) {
	img, digest, body := oneLayer(t)
	b := &breaking{hex: digest.Hex, body: body}
	host := serve(t, b.wrap)
	rubbish := func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method != http.MethodGet || !strings.HasSuffix(r.URL.Path, digest.Hex) {
				h.ServeHTTP(w, r)
				return
			}
			_, _ = w.Write(bytes.Repeat([]byte("<p>log in, please"), 200))
			w.(http.Flusher).Flush() // no length is announced
		})
	}
	mirror := serve(t, rubbish)
	for _, h := range []string{host, mirror} {
		push(t, h+"/a:1", img)
	}
	b.set(0, "")
	s := with(t, fmt.Sprintf("registries: {%q: {plainHTTP: true, mirrors: [%q]}, %q: {plainHTTP: true}}", host, mirror, mirror))
	if _, err := s.Ensure(t.Context(), mirror+"/a:1", Auth{}); err == nil {
		t.Fatal("rubbish was pulled")
	}
	if parts, _ := filepath.Glob(s.path("parts", "*")); len(parts) != 1 {
		t.Fatalf("parts: %v", parts)
	}
	if _, err := s.Ensure(t.Context(), host+"/a:1", Auth{}); err != nil {
		t.Errorf("by way of a mirror that sends rubbish: %v", err)
	}
	if ranges, sent := b.seen(); strings.Join(ranges, "") != "" || sent != len(body) {
		t.Errorf("asked for %q, %d of %d bytes were sent", ranges, sent, len(body))
	}
}

// TestLayerTwice: a layer that an image has twice is fetched once.
func TestLayerTwice(t *testing.T) {
	img, digest, body := oneLayer(t)
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	if img, err = mutate.AppendLayers(build(t, v1.Config{}), layers[0], layers[0]); err != nil {
		t.Fatal(err)
	}
	b := &breaking{hex: digest.Hex, body: body}
	host := serve(t, b.wrap)
	push(t, host+"/a:1", img)
	s := open(t, t.TempDir())
	for _, after := range []int{300_000, 0} {
		b.set(after, "")
		if _, err := s.Ensure(t.Context(), host+"/a:1", Auth{}); (err == nil) != (after == 0) {
			t.Fatalf("broken off after %d bytes: %v", after, err)
		}
		if ranges, _ := b.seen(); len(ranges) != 1 {
			t.Errorf("asked for %q", ranges)
		}
	}
	if n := len(s.layerDirs(t)); n != 2 {
		t.Errorf("%d layers", n)
	}
	s.nothingLeft(t)
}

// TestPulling: how far a pull is can be seen while it lasts.
func TestPulling(t *testing.T) {
	img, digest, body := oneLayer(t)
	size := int64(len(body))
	release := make(chan struct{})
	host := serve(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Method != http.MethodGet || !strings.HasSuffix(r.URL.Path, digest.Hex) {
				h.ServeHTTP(w, r)
				return
			}
			_, _ = w.Write(body[:size/2])
			w.(http.Flusher).Flush()
			<-release
			_, _ = w.Write(body[size/2:])
		})
	})
	push(t, host+"/a:1", img)
	s := open(t, t.TempDir())
	done := make(chan error, 1)
	go func() {
		_, err := s.Ensure(t.Context(), host+"/a:1", Auth{})
		done <- err
	}()
	want := Progress{Ref: host + "/a:1", Done: size / 2, Total: size}
	waitFor(t, "half of it", func() bool {
		got := s.Pulling()
		return len(got) == 1 && got[0] == want
	})
	close(release)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if got := s.Pulling(); len(got) != 0 {
		t.Errorf("it is here, and still: %+v", got)
	}
}
