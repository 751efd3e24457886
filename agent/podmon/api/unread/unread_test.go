package unread

import (
	"bytes"
	"os"
	"testing"
	"time"
)

// TestEach: what was written is read after a deadline, and what comes later is not
// waited for, while the other end stays open.
func TestEach(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	want := bytes.Repeat([]byte("0123456789abcdef"), 60_000/16)
	if _, err := w.Write(want); err != nil {
		t.Fatal(err)
	}
	if err := r.SetReadDeadline(time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	var got []byte
	Each(r, func(b []byte) bool { got = append(got, b...); return true })
	if !bytes.Equal(got, want) {
		t.Errorf("%d bytes were read, want %d", len(got), len(want))
	}
}

// TestEachIsBounded: a writer that is as fast as the reader does not keep it.
func TestEachIsBounded(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	block := make([]byte, 4096)
	if _, err := w.Write(block); err != nil {
		t.Fatal(err)
	}
	read := 0
	Each(r, func(b []byte) bool {
		read += len(b)
		if _, err := w.Write(b); err != nil {
			t.Fatal(err)
		}
		return true
	})
	if read != most {
		t.Errorf("%d bytes were read, want %d", read, most)
	}
}
