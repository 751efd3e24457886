// Package s3test has a small object store for tests, in memory, over TLS with a CA of
// its own. It checks no signature: what a real store makes of requests is for a real
// one to show (make s3-test).
package s3test

import (
	"bytes"
	"crypto/md5" //nolint:gosec // what S3 calls an ETag
	"crypto/tls"
	"encoding/base64"
	"encoding/hex"
	"encoding/xml"
	"fmt"
	"io"
	"log"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// Bucket is the one that a Server has.
const Bucket = "backups"

// Server is such a store.
type Server struct {
	// URL is that of its bucket, CA a file with its certificate.
	URL, CA string
	// Hook comes first, if it is set before the first request; true: it has answered.
	Hook func(w http.ResponseWriter, r *http.Request) bool
	// Behind answers instead, if it is set before the first request.
	Behind http.Handler

	mu      sync.Mutex // guards all below
	objects map[string]object
	uploads map[string]upload
}

type object struct {
	data []byte
	at   time.Time
}

type upload struct {
	key   string
	parts map[int][]byte
	at    time.Time
}

// New returns one that ends with the test.
func New(t testing.TB) *Server {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return NewOn(t, l, "127.0.0.1")
}

// NewOn is New with a listener at an address.
func NewOn(t testing.TB, l net.Listener, addr string) *Server {
	s := &Server{objects: map[string]object{}, uploads: map[string]upload{}}
	cert, key := Certificate(t, addr)
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	server := &httptest.Server{Listener: l, TLS: &tls.Config{Certificates: []tls.Certificate{pair}}, Config: &http.Server{
		Handler: s, ReadHeaderTimeout: time.Minute, ErrorLog: log.New(io.Discard, "", 0),
	}}
	server.StartTLS()
	t.Cleanup(server.Close)
	s.URL, s.CA = "https://"+l.Addr().String()+"/"+Bucket, cert
	return s
}

// Names are those of its objects, sorted.
func (s *Server) Names() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.objects))
}

// Uploads are the names of uploads that have not ended, sorted.
func (s *Server) Uploads() (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, u := range s.uploads {
		names = append(names, u.key)
	}
	slices.Sort(names)
	return names
}

// Object is what is in one.
func (s *Server) Object(key string) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.objects[key].data
}

// Put makes an object, of some time ago.
func (s *Server) Put(key string, data []byte, age time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.objects[key] = object{data, time.Now().Add(-age)}
}

// Begin begins an upload that does not end.
func (s *Server) Begin(key string, age time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.uploads[fmt.Sprint("u", len(s.uploads))] = upload{key, map[int][]byte{}, time.Now().Add(-age)}
}

// Refuse answers with an error of S3's.
func Refuse(w http.ResponseWriter, status int, code, message string) {
	w.Header().Set("Content-Type", "application/xml")
	w.WriteHeader(status)
	fmt.Fprintf(w, "<Error><Code>%s</Code><Message>%s</Message></Error>", code, message)
}

// ServeHTTP implements http.Handler.
func (s *Server) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if s.Hook != nil && s.Hook(w, r) {
		return
	}
	if s.Behind != nil {
		s.Behind.ServeHTTP(w, r)
		return
	}
	body, err := io.ReadAll(r.Body)
	if err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	bucket, key, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	if bucket != Bucket {
		Refuse(w, http.StatusNotFound, "NoSuchBucket", "The specified bucket does not exist")
		return
	}
	q := r.URL.Query()
	switch {
	case key == "":
		s.bucket(w, q)
	case r.Method == http.MethodPost && q.Has("uploads"):
		id := fmt.Sprint("u", len(s.uploads))
		s.uploads[id] = upload{key, map[int][]byte{}, time.Now()}
		answer(w, "InitiateMultipartUploadResult", struct{ Bucket, Key, UploadId string }{bucket, key, id}) //nolint:staticcheck // S3's name
	case q.Has("uploadId"):
		s.multipart(w, r, q, key, body)
	default:
		s.one(w, r, key, body)
	}
}

// bucket answers about all objects.
func (s *Server) bucket(w http.ResponseWriter, q url.Values) {
	type content struct {
		Key          string
		LastModified string
		Size         int
	}
	type started struct{ Key, UploadId, Initiated string } //nolint:staticcheck // S3's name
	switch {
	case q.Has("location"):
		answer(w, "LocationConstraint", struct{}{})
	case q.Has("uploads"):
		var list struct{ Upload []started }
		for id, u := range s.uploads {
			if strings.HasPrefix(u.key, q.Get("prefix")) {
				list.Upload = append(list.Upload, started{u.key, id, u.at.UTC().Format(time.RFC3339)})
			}
		}
		answer(w, "ListMultipartUploadsResult", list)
	default:
		var list struct{ Contents []content }
		for _, key := range slices.Sorted(maps.Keys(s.objects)) {
			if o := s.objects[key]; strings.HasPrefix(key, q.Get("prefix")) {
				list.Contents = append(list.Contents, content{key, o.at.UTC().Format(time.RFC3339), len(o.data)})
			}
		}
		answer(w, "ListBucketResult", list)
	}
}

// multipart answers to what belongs to an upload.
func (s *Server) multipart(w http.ResponseWriter, r *http.Request, q url.Values, key string, body []byte) {
	id := q.Get("uploadId")
	u, ok := s.uploads[id]
	n, err := strconv.Atoi(q.Get("partNumber"))
	switch {
	case !ok || u.key != key:
		Refuse(w, http.StatusNotFound, "NoSuchUpload", "The specified upload does not exist")
	case r.Method == http.MethodDelete:
		delete(s.uploads, id)
		w.WriteHeader(http.StatusNoContent)
	case r.Method == http.MethodPut && err == nil:
		sum := md5.Sum(body) //nolint:gosec // Content-MD5
		if r.Header.Get("Content-Md5") != base64.StdEncoding.EncodeToString(sum[:]) {
			Refuse(w, http.StatusBadRequest, "BadDigest", "The Content-MD5 you specified did not match what we received.")
			return
		}
		u.parts[n] = body
		w.Header().Set("ETag", etag(body))
	case r.Method == http.MethodPost:
		var whole []byte
		for _, n := range slices.Sorted(maps.Keys(u.parts)) {
			whole = append(whole, u.parts[n]...)
		}
		delete(s.uploads, id)
		s.objects[key] = object{whole, time.Now()}
		answer(w, "CompleteMultipartUploadResult", struct{ Bucket, Key, ETag string }{Bucket, key, etag(whole)})
	default:
		Refuse(w, http.StatusNotImplemented, "NotImplemented", r.Method)
	}
}

// one answers about one object.
func (s *Server) one(w http.ResponseWriter, r *http.Request, key string, body []byte) {
	o, ok := s.objects[key]
	switch r.Method {
	case http.MethodDelete:
		delete(s.objects, key)
		w.WriteHeader(http.StatusNoContent)
	case http.MethodPut:
		if from := r.Header.Get("X-Amz-Copy-Source"); from != "" {
			from, _ = url.PathUnescape(from)
			from = strings.TrimPrefix(strings.TrimPrefix(from, "/"), Bucket+"/")
			body = s.objects[from].data
		}
		s.objects[key] = object{body, time.Now()}
		answer(w, "CopyObjectResult", struct{ ETag, LastModified string }{etag(body), time.Now().UTC().Format(time.RFC3339)})
	case http.MethodGet, http.MethodHead:
		if !ok {
			Refuse(w, http.StatusNotFound, "NoSuchKey", "The specified key does not exist.")
			return
		}
		w.Header().Set("ETag", etag(o.data))
		http.ServeContent(w, r, "", o.at, bytes.NewReader(o.data))
	default:
		Refuse(w, http.StatusNotImplemented, "NotImplemented", r.Method)
	}
}

func etag(b []byte) string {
	sum := md5.Sum(b) //nolint:gosec // what S3 calls an ETag
	return `"` + hex.EncodeToString(sum[:]) + `"`
}

func answer(w http.ResponseWriter, name string, v any) {
	w.Header().Set("Content-Type", "application/xml")
	_ = xml.NewEncoder(w).EncodeElement(v, xml.StartElement{Name: xml.Name{Local: name}})
}
