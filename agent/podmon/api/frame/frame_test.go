package frame

import (
	"bytes"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func TestRoundTrip(t *testing.T) {
	want := api.Request{ID: 7, Op: api.OpStartContainer, Container: &api.Container{ID: "c", Args: []string{"sh", "-c", "a<b"}}}
	b, err := Encode(want)
	if err != nil {
		t.Fatal(err)
	}
	var got api.Request
	if err := Decode(bytes.NewReader(b), &got); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Fatal(d)
	}
}

func TestDecodeFaults(t *testing.T) {
	for name, tc := range map[string]struct {
		in   string
		want error
	}{
		"nothing":          {"", io.EOF},
		"half a length":    {"\x00\x00", io.ErrUnexpectedEOF},
		"half a body":      {"\x00\x00\x00\x09{}", io.ErrUnexpectedEOF},
		"length too large": {"\xff\xff\xff\xff{}", ErrTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			var v api.Request
			if err := Decode(strings.NewReader(tc.in), &v); !errors.Is(err, tc.want) {
				t.Fatalf("got %v, want %v", err, tc.want)
			}
		})
	}
}

// TestBound: a frame of many small elements is refused, which would take many times its
// size in memory; so is a long one.
func TestBound(t *testing.T) {
	for what, v := range map[string][]string{"elements": make([]string, maxCommas+2), "bytes": {strings.Repeat("x", 1<<20)}} {
		t.Run(what, func(t *testing.T) {
			a, b := pair(t)
			b.Bound(1 << 20)
			go func() { _ = a.Write(v) }()
			var got []string
			if _, err := b.Read(&got); !errors.Is(err, ErrTooLarge) || got != nil {
				t.Errorf("%d elements, %v", len(got), err)
			}
		})
	}
	a, b := pair(t)
	b.Bound(1 << 20)
	go func() { _ = a.Write(make([]string, maxCommas)) }()
	var got []string
	if _, err := b.Read(&got); err != nil || len(got) != maxCommas {
		t.Errorf("%d elements, %v", len(got), err)
	}
}

func TestConnCarriesFiles(t *testing.T) {
	a, b := pair(t)
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	// Two frames back to back: the descriptor must arrive with the second.
	if err := a.Write(api.Request{ID: 1}); err != nil {
		t.Fatal(err)
	}
	if err := a.Write(api.Request{ID: 2}, w); err != nil {
		t.Fatal(err)
	}
	w.Close()
	var req api.Request
	files, err := b.Read(&req)
	if err != nil || len(files) != 0 || req.ID != 1 {
		t.Fatalf("first: %v %v %v", req.ID, files, err)
	}
	files, err = b.Read(&req)
	if err != nil || len(files) != 1 || req.ID != 2 {
		t.Fatalf("second: %v %v %v", req.ID, files, err)
	}
	if _, err := files[0].WriteString("hi"); err != nil {
		t.Fatal(err)
	}
	files[0].Close()
	got, _ := io.ReadAll(r)
	if string(got) != "hi" {
		t.Fatalf("through the passed pipe: %q", got)
	}
	a.Close()
	if _, err := b.Read(&req); !errors.Is(err, io.EOF) {
		t.Fatalf("after close: %v", err)
	}
}

func pair(t *testing.T) (*Conn, *Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	conn := func(fd int) *Conn {
		f := os.NewFile(uintptr(fd), "pair")
		defer f.Close()
		c, err := net.FileConn(f)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		return NewConn(c.(*net.UnixConn))
	}
	return conn(fds[0]), conn(fds[1])
}

func FuzzDecode(f *testing.F) {
	ok, _ := Encode(api.Request{ID: 1, Op: api.OpHello, Version: 1})
	f.Add(ok)
	f.Add([]byte("\x00\x00\x00\x02{}"))
	f.Add([]byte("\x04\x00\x00\x00{"))
	f.Fuzz(func(t *testing.T, in []byte) {
		var req api.Request
		if err := Decode(bytes.NewReader(in), &req); err != nil {
			return
		}
		b, err := Encode(req)
		if err != nil {
			t.Fatalf("decoded but cannot be encoded: %v", err)
		}
		var again api.Request
		if err := Decode(bytes.NewReader(b), &again); err != nil {
			t.Fatalf("encoded but cannot be decoded: %v", err)
		}
		if d := cmp.Diff(req, again); d != "" {
			t.Fatal(d)
		}
	})
}
