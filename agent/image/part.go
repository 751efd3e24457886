package image

import (
	"cmp"
	"context"
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
// that were here included, and if it is another one the layer is fetched from its first
// byte. Only the source that a part came from goes on with it: what another one sent, a
// mirror or a registry that anybody may name in a pod, costs nobody else anything.

const (
	// partAge is how long a part is of use.
	partAge = 24 * time.Hour
	// partsKept bounds the bytes of all parts; the oldest go.
	partsKept = 16 << 30
)

// partKey is the file name of a part: of a layer's digest, and of the host and
// repository that it comes from.
func partKey(digest, source string) string {
	return digest + "-" + strings.TrimPrefix(digestOf([]byte(source)), "sha256:")[:16]
}

func (s *Store) partPath(key string) string { return s.path("parts", key) }

// part is the file of a download under way.
type part struct {
	*os.File
	key  string
	kept bool  // it is in parts, and no other download has it
	have int64 // bytes that were here before
	came int64 // bytes of the layer up to where this download has come
	// rest is the registry's answer, if that goes on behind what was here.
	rest io.Reader
}

// openPart opens what is here of a layer of that size, or begins again.
func (s *Store) openPart(key string, size int64) (*part, error) {
	s.mu.Lock()
	taken := s.parts[key]
	if s.parts == nil {
		s.parts = map[string]bool{}
	}
	s.parts[key] = true
	s.mu.Unlock()
	if taken { // another pull, with other credentials, is at it
		f, err := os.CreateTemp(s.path("tmp"), "blob-")
		return &part{File: f, key: key}, err
	}
	f, err := os.OpenFile(s.partPath(key), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		s.leavePart(key)
		return nil, err
	}
	st, err := f.Stat()
	if err != nil {
		s.leavePart(key)
		return nil, errors.Join(err, f.Close())
	}
	p := &part{File: f, key: key, kept: true}
	if st.Size() < size { // the last byte at least is to come
		p.have = st.Size()
	}
	return p, nil
}

func (s *Store) leavePart(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.parts, key)
}

// closePart ends a download that failed. What came is kept, or what was here if nothing
// did, unless it is no good or there is no room.
func (s *Store) closePart(p *part, why error) {
	defer func() {
		_ = p.Close()
		if p.kept {
			s.leavePart(p.key)
			s.trimParts(partAge, partsKept)
		}
	}()
	if p.kept && !errors.Is(why, ErrDigest) && !errors.Is(why, syscall.ENOSPC) && p.keep() {
		return
	}
	if err := os.Remove(p.Name()); err != nil {
		s.log.Warn("cannot remove a part of a layer", "file", p.Name(), "err", err)
	}
}

// keep cuts off what is not of this download once it has written. Where nothing was
// written the file's age stays, too.
func (p *part) keep() bool {
	st, err := p.Stat()
	if err != nil {
		return false
	}
	n := cmp.Or(p.came, st.Size())
	return n > 0 && (n == st.Size() || p.Truncate(n) == nil)
}

// read takes what is here into the hash.
func (p *part) read(ctx context.Context, hash io.Writer, done *atomic.Int64) (n int64, err error) {
	return io.Copy(io.MultiWriter(hash, counter{done}), ctxReader{ctx, io.NewSectionReader(p, 0, p.have)})
}

type counter struct{ n *atomic.Int64 }

func (c counter) Write(b []byte) (int, error) {
	c.n.Add(int64(len(b)))
	return len(b), nil
}

// partWriter puts the bytes of a layer behind those that came.
type partWriter struct {
	p    *part
	done *atomic.Int64
}

func (w *partWriter) Write(b []byte) (int, error) {
	n, err := w.p.WriteAt(b, w.p.came)
	w.p.came += int64(n)
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

var blobRequest = regexp.MustCompile(`/blobs/sha256:([0-9a-f]{64})$`)

// resuming asks for the rest of layers of which a part is here, and leaves it in the
// part's rest. The library takes the answer for one to its own request, and reads none
// of it: it would take the digest of all bytes, those on the disk included, while the
// registry waits for somebody to read what it sends, and gives up in the end.
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
	p.rest = nil // also where it is asked a second time
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
			break // it is of other bytes
		}
		p.rest = resp.Body
		resp.StatusCode, resp.Status = http.StatusOK, "200 OK"
		if resp.ContentLength >= 0 {
			resp.ContentLength += p.have
		}
		return resp, nil
	case http.StatusRequestedRangeNotSatisfiable, http.StatusBadRequest, http.StatusForbidden, http.StatusInternalServerError, http.StatusNotImplemented:
		// Some of those that know no ranges say it like this. If that was not the
		// reason, the request for the whole gets the same answer.
	default:
		return resp, nil
	}
	_ = resp.Body.Close()
	return t.RoundTripper.RoundTrip(r)
}

// firstRequest is the one before all redirects.
func firstRequest(r *http.Request) *http.Request {
	for r.Response != nil && r.Response.Request != nil {
		r = r.Response.Request
	}
	return r
}

// downloads are the layers that one pull fetches from one source.
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
