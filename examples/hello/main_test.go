package main

import (
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestPage(t *testing.T) {
	file := filepath.Join(t.TempDir(), "message")
	if err := os.WriteFile(file, []byte("one\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("MESSAGE_FILE", file)
	t.Setenv("POD_NAME", "web-1")
	t.Setenv("NODE_NAME", "n1")
	t.Setenv("POD_IP", "10.42.1.2")
	get := func() string {
		w := httptest.NewRecorder()
		page(w, httptest.NewRequest(http.MethodGet, "/", nil))
		return w.Body.String()
	}
	if got, want := get(), "one\nI am pod web-1 on node n1 at 10.42.1.2; you come from 192.0.2.1\n"; got != want {
		t.Fatalf("got %q\nwant %q", got, want)
	}
	if err := os.WriteFile(file, []byte("two"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := get(); !strings.HasPrefix(got, "two\n") {
		t.Fatalf("the changed message is not shown: %q", got)
	}
}

func TestExitCodes(t *testing.T) {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/bad" {
			w.WriteHeader(http.StatusTeapot)
		}
	}))
	defer srv.Close()
	for _, tt := range []struct {
		args []string
		code int
	}{
		{[]string{"fetch", srv.URL, "3"}, 0},
		{[]string{"fetch", srv.URL + "/bad", "3"}, 1},
		{[]string{"fetch", srv.URL, "0"}, 1},
		{[]string{"exit", "7"}, 7},
		{[]string{"exit", "7", "0.01"}, 7},
		{[]string{"exit", "7", "x"}, 1},
		{[]string{"exit"}, 1},
		{[]string{"exit", "x"}, 1},
		{[]string{"echo", "a", "b"}, 0},
		{[]string{"cat", "/nosuch"}, 1},
		{[]string{"write", filepath.Join(t.TempDir(), "f"), "a", "b"}, 0},
		{[]string{"write", "/nosuch/f"}, 1},
		{[]string{"write"}, 2},
		{[]string{"sleep", "0"}, 0},
		{[]string{"sleep", "x"}, 1},
		{[]string{"fetch", srv.URL + "/good"}, 0},
		{[]string{"fetch", srv.URL + "/bad"}, 1},
		{[]string{"dial", strings.TrimPrefix(srv.URL, "http://")}, 0},
		{[]string{"dial", "127.0.0.1:1"}, 1},
		{[]string{"nonsense"}, 2},
	} {
		if code, err := run(tt.args[0], tt.args[1:]); code != tt.code {
			t.Errorf("%v: exit %d (%v), want %d", tt.args, code, err, tt.code)
		}
	}
}

func TestLines(t *testing.T) {
	t.Setenv("POD_NAME", "web-1")
	t.Setenv("NODE_NAME", "n1")
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { answerLines(conn); close(ended) }()
	client, err := net.Dial("udp", conn.LocalAddr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	if _, err := client.Write([]byte("?")); err != nil {
		t.Fatal(err)
	}
	b := make([]byte, 512)
	n, err := client.Read(b)
	if got, want := string(b[:n]), "I am pod web-1 on node n1; you come from 127.0.0.1\n"; err != nil || got != want {
		t.Errorf("got %q, %v, want %q", got, err, want)
	}
	_ = conn.Close()
	<-ended
}

func TestMethods(t *testing.T) {
	for _, m := range []string{http.MethodGet, http.MethodHead, http.MethodOptions, http.MethodPost, http.MethodPut, http.MethodPatch, http.MethodDelete} {
		w := httptest.NewRecorder()
		pages().ServeHTTP(w, httptest.NewRequest(m, "/method/a", nil))
		if w.Code != http.StatusOK || w.Header().Get("X-Method") != m {
			t.Errorf("%s: %d, %v", m, w.Code, w.Header())
		}
	}
}
