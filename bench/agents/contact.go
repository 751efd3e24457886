package main

import (
	"io"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/clusterd/clusterd/member/pki"
)

// bucket is the grain in which requests are counted.
const bucket = 100 * time.Millisecond

// requests counts what agents ask of the API, by time.
type requests struct {
	mu     sync.Mutex
	began  time.Time
	counts []int // by bucket
}

func newRequests() *requests { return &requests{began: time.Now()} }

func (r *requests) add() {
	i := int(time.Since(r.began) / bucket)
	r.mu.Lock()
	defer r.mu.Unlock()
	if i >= len(r.counts) {
		r.counts = slices.Grow(r.counts, i+1-len(r.counts))[:i+1]
	}
	r.counts[i]++
}

// since says how many there were from a moment on, and in the busiest second.
func (r *requests) since(from time.Time) (sum, peak int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	counts := r.counts[min(len(r.counts), int(from.Sub(r.began)/bucket)):]
	const width = int(time.Second / bucket)
	window := 0
	for i, n := range counts {
		sum += n
		window += n
		if i >= width {
			window -= counts[i-width]
		}
		peak = max(peak, window)
	}
	return sum, peak
}

// contact is which server each of an agent's watches hangs on.
type contact struct {
	all *requests

	mu      sync.Mutex
	watches map[*watched]string // the server's name
}

func newContact(all *requests) *contact {
	return &contact{all: all, watches: map[*watched]string{}}
}

// count says how many watches are open, and how many of them at that server.
func (c *contact) count(server string) (open, there int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, at := range c.watches {
		if at == server {
			there++
		}
	}
	return len(c.watches), there
}

// over takes note of what goes over next.
func (c *contact) over(next http.RoundTripper) http.RoundTripper { return &noting{next, c} }

type noting struct {
	next http.RoundTripper
	to   *contact
}

// RoundTrip implements http.RoundTripper.
func (n *noting) RoundTrip(req *http.Request) (*http.Response, error) {
	n.to.all.add()
	res, err := n.next.RoundTrip(req)
	if err != nil || res.StatusCode != http.StatusOK || req.URL.Query().Get("watch") == "" || res.TLS == nil || len(res.TLS.PeerCertificates) == 0 {
		return res, err
	}
	server, _ := pki.NodeName(res.TLS.PeerCertificates[0])
	w := &watched{ReadCloser: res.Body, of: n.to}
	n.to.mu.Lock()
	n.to.watches[w] = server
	n.to.mu.Unlock()
	res.Body = w
	return res, nil
}

// CloseIdleConnections is what http.Client calls.
func (n *noting) CloseIdleConnections() {
	if c, ok := n.next.(interface{ CloseIdleConnections() }); ok {
		c.CloseIdleConnections()
	}
}

// watched is the answer to a watch, until it ends.
type watched struct {
	io.ReadCloser
	of *contact
}

// Read implements io.Reader.
func (w *watched) Read(b []byte) (int, error) {
	n, err := w.ReadCloser.Read(b)
	if err != nil {
		w.gone()
	}
	return n, err
}

// Close implements io.Closer.
func (w *watched) Close() error {
	w.gone()
	return w.ReadCloser.Close()
}

func (w *watched) gone() {
	w.of.mu.Lock()
	defer w.of.mu.Unlock()
	delete(w.of.watches, w)
}
