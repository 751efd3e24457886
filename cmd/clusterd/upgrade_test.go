package main

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// deadlines is a connection that keeps the deadline it was given last.
type deadlines struct {
	http.ResponseWriter
	last time.Time
}

func (d *deadlines) SetReadDeadline(t time.Time) error {
	d.last = t
	return nil
}

// The limit on a silent sender ends with the file: what comes after may take longer.
func TestSlowReader(t *testing.T) {
	d := &deadlines{ResponseWriter: httptest.NewRecorder()}
	r := &slowReader{from: strings.NewReader("file"), conn: http.NewResponseController(d)}
	if n, err := r.Read(make([]byte, 2)); n != 2 || err != nil || !r.begun || d.last.IsZero() {
		t.Errorf("%d %v, begun %v, deadline %v", n, err, r.begun, d.last)
	}
	if b, err := io.ReadAll(r); string(b) != "le" || err != nil || !d.last.IsZero() {
		t.Errorf("%q %v, deadline %v", b, err, d.last)
	}
}
