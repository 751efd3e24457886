package image

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// A part is what is here of a compressed layer whose download broke off. The next one
// asks for the rest. A part is not trusted: the digest is taken of all bytes, those
// that were here included, and a part that led to another one goes.

const (
	// partAge is how long a part is of use.
	partAge = 24 * time.Hour
	// partsKept bounds the bytes of all parts; the oldest go.
	partsKept = 16 << 30
)

func (s *Store) partPath(digest string) string { return s.path("parts", digest) }

// part is the file of a download under way.
type part struct {
	*os.File
	have int64 // bytes that were here before
	kept bool  // it is in parts, and no other download has it
	// resumed: the answer is of the bytes after have, and those before it come from
	// the file.
	resumed atomic.Bool
}

// openPart opens what is here of a layer of that digest and size, or begins anew.
func (s *Store) openPart(digest string, size int64) (*part, error) {
	s.mu.Lock()
	taken := s.parts[digest]
	if s.parts == nil {
		s.parts = map[string]bool{}
	}
	s.parts[digest] = true
	s.mu.Unlock()
	if taken { // another pull, with other credentials, is at it
		f, err := os.CreateTemp(s.path("tmp"), "blob-")
		return &part{File: f}, err
	}
	f, err := os.OpenFile(s.partPath(digest), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		s.leavePart(digest)
		return nil, err
	}
	p := &part{File: f, kept: true}
	st, err := f.Stat()
	if err == nil {
		p.have = st.Size()
	}
	if err == nil && p.have >= size { // the last byte at least is to come
		p.have, err = 0, f.Truncate(0)
	}
	if err != nil {
		s.leavePart(digest)
		return nil, errors.Join(err, f.Close())
	}
	return p, nil
}

func (s *Store) leavePart(digest string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.parts, digest)
}

// closePart ends a download that failed after so many bytes of the layer. What came is
// kept, unless it is no good or there is no room.
func (s *Store) closePart(p *part, digest string, came int64, why error) {
	defer func() {
		_ = p.Close()
		if p.kept {
			s.leavePart(digest)
			s.trimParts(partAge, partsKept)
		}
	}()
	if p.kept && came > 0 && !errors.Is(why, ErrDigest) && !errors.Is(why, errPartRange) && !errors.Is(why, syscall.ENOSPC) && p.Truncate(max(came, p.resumedBytes())) == nil {
		return
	}
	if err := os.Remove(p.Name()); err != nil {
		s.log.Warn("cannot remove a part of a layer", "file", p.Name(), "err", err)
	}
}

func (p *part) resumedBytes() int64 {
	if p.resumed.Load() {
		return p.have
	}
	return 0
}

// partWriter puts the bytes of a layer, from its first on, where they belong; those
// that came from the file are there.
type partWriter struct {
	p    *part
	came int64
	done *atomic.Int64 // counts as came does
}

func (w *partWriter) Write(b []byte) (n int, err error) {
	n = int(min(max(w.p.resumedBytes()-w.came, 0), int64(len(b))))
	if n < len(b) {
		var more int
		more, err = w.p.WriteAt(b[n:], w.came+int64(n))
		n += more
	}
	w.came += int64(n)
	w.done.Add(int64(n))
	return n, err
}

// trimParts removes parts that no download has: those above an age, and the oldest of
// more bytes than that.
func (s *Store) trimParts(age time.Duration, keep int64) {
	list, err := os.ReadDir(s.path("parts"))
	if err != nil {
		s.log.Warn("cannot look for parts of layers", "err", err)
		return
	}
	s.mu.Lock() // so that no download begins with one that goes
	defer s.mu.Unlock()
	var infos []fs.FileInfo
	for _, e := range list {
		if st, err := e.Info(); err == nil && !s.parts[e.Name()] {
			infos = append(infos, st)
		}
	}
	slices.SortFunc(infos, func(a, b fs.FileInfo) int { return cmp.Compare(b.ModTime().UnixNano(), a.ModTime().UnixNano()) })
	for _, st := range infos {
		if keep -= st.Size(); keep >= 0 && time.Since(st.ModTime()) <= age {
			continue
		}
		if err := os.Remove(s.partPath(st.Name())); err != nil {
			s.log.Warn("cannot remove a part of a layer", "file", st.Name(), "err", err)
		}
	}
}

// errPartRange is returned when a registry was asked for the rest of a layer and
// answered with another part of it.
var errPartRange = errors.New("the registry answered with another range than it was asked for")

var blobRequest = regexp.MustCompile(`/blobs/sha256:([0-9a-f]{64})$`)

// resuming asks for the rest of layers of which a part is here, and gives the answer
// as if it were of the whole.
type resuming struct {
	http.RoundTripper
	part func(digest string) *part // of the download under way
}

// RoundTrip implements http.RoundTripper.
func (t resuming) RoundTrip(r *http.Request) (*http.Response, error) {
	var p *part
	if m := blobRequest.FindStringSubmatch(firstRequest(r).URL.Path); m != nil && r.Method == http.MethodGet {
		p = t.part(m[1])
	}
	if p == nil {
		return t.RoundTripper.RoundTrip(r)
	}
	p.resumed.Store(false) // also where it is asked a second time
	if p.have == 0 {
		return t.RoundTripper.RoundTrip(r)
	}
	rest := r.Clone(r.Context())
	rest.Header.Set("Range", fmt.Sprintf("bytes=%d-", p.have))
	resp, err := t.RoundTripper.RoundTrip(rest)
	if err != nil {
		return nil, err
	}
	switch resp.StatusCode {
	case http.StatusPartialContent:
		if !strings.HasPrefix(resp.Header.Get("Content-Range"), fmt.Sprintf("bytes %d-", p.have)) {
			_ = resp.Body.Close()
			return nil, fmt.Errorf("%w: bytes from %d on, it was %q", errPartRange, p.have, resp.Header.Get("Content-Range"))
		}
		p.resumed.Store(true)
		resp.StatusCode, resp.Status = http.StatusOK, "200 OK"
		resp.Body = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(io.NewSectionReader(p, 0, p.have), resp.Body), resp.Body}
		if resp.ContentLength >= 0 {
			resp.ContentLength += p.have
		}
	case http.StatusRequestedRangeNotSatisfiable:
		_ = resp.Body.Close()
		return t.RoundTripper.RoundTrip(r)
	}
	return resp, nil
}

// firstRequest is the one before all redirects.
func firstRequest(r *http.Request) *http.Request {
	for r.Response != nil && r.Response.Request != nil {
		r = r.Response.Request
	}
	return r
}

// downloads are the layers that one pull fetches.
type downloads struct {
	mu    sync.Mutex // guards parts
	parts map[string]*part
}

func (d *downloads) part(digest string) *part {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.parts[digest]
}

func (d *downloads) set(digest string, p *part) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.parts == nil {
		d.parts = map[string]*part{}
	}
	d.parts[digest] = p
}
