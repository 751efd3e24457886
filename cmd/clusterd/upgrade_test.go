package main

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/releases"
	"github.com/clusterd/clusterd/member/transport"
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

// TestTrialComesBeforeTheConfiguration: a version on trial that refuses the node's
// configuration, flags or variables is taken back by its next start, as after a power
// cut, when there is no guard. It was never looked at: each start ended before that.
func TestTrialComesBeforeTheConfiguration(t *testing.T) {
	for _, tt := range []struct {
		what, config string
		args, env    []string
		says         string
	}{
		{"the configuration", "noSuchField: true\n", nil, nil, "noSuchField"},
		{"a flag", "", []string{"--no-such-flag", "x"}, nil, "no-such-flag"},
		{"a variable", "", nil, []string{"CLUSTERD_MAX_PODS=many"}, "CLUSTERD_MAX_PODS"},
	} {
		t.Run(tt.what, func(t *testing.T) {
			dir := t.TempDir()
			data, exe := filepath.Join(dir, "data"), filepath.Join(dir, "bin", "clusterd")
			place := releases.Place{Exe: exe, State: filepath.Join(data, "upgrade")}
			trial, err := json.Marshal(releases.Trial{Version: version(), From: "v0", Began: time.Now(), Limit: time.Hour, UpWithin: time.Hour})
			if err != nil {
				t.Fatal(err)
			}
			self, err := os.ReadFile("/proc/self/exe")
			if err != nil {
				t.Fatal(err)
			}
			// Without a guard: nothing that it starts stays.
			const before = "#!/bin/sh\necho the program before: \"$@\"\n"
			err = errors.Join(os.MkdirAll(place.State, 0o700), os.MkdirAll(filepath.Dir(place.Previous()), 0o755),
				os.WriteFile(filepath.Join(place.State, "trial.json"), trial, 0o600), os.WriteFile(filepath.Join(data, "config.yaml"), []byte(tt.config), 0o600),
				os.WriteFile(exe, self, 0o755), os.WriteFile(place.Previous(), []byte(before), 0o755))
			if err != nil {
				t.Fatal(err)
			}
			args := append([]string{"run", "--data", data}, tt.args...)
			start := func() string {
				c := exec.Command(exe, args...)
				c.Env = append(append(os.Environ(), asClusterd+"=1"), tt.env...)
				out, _ := c.CombinedOutput()
				return string(out)
			}
			if said := start(); os.Geteuid() == 0 && !strings.Contains(said, tt.says) {
				t.Errorf("the first start does not name %s:\n%s", tt.says, said)
			}
			if got, err := place.Trial(); err != nil || got == nil || got.Starts != 1 {
				t.Fatalf("after the first start: %+v %v", got, err)
			}
			if said := start(); !strings.Contains(said, fmt.Sprint("the program before: ", strings.Join(args, " "))) {
				t.Errorf("the second start does not take it back:\n%s", said)
			}
			if got, err := place.Trial(); err != nil || got != nil {
				t.Errorf("after the second start: %+v %v", got, err)
			}
		})
	}
}

func TestDataOf(t *testing.T) {
	for _, tt := range []struct {
		args string
		env  string
		want string
	}{
		{"", "", DefaultData},
		{"--data /d", "", "/d"},
		{"--data=/d --log-level debug", "", "/d"},
		{"--new-switch --data /d", "", "/d"},
		{"--new value --data /d -x --other=1", "", "/d"},
		{"--new value", "/env", "/env"},
		{"--data /d", "/env", "/d"},
	} {
		if tt.env != "" {
			t.Setenv("CLUSTERD_DATA", tt.env)
		}
		if got, err := dataOf(strings.Fields(tt.args)); got != tt.want || err != nil {
			t.Errorf("%q: %q %v, want %q", tt.args, got, err, tt.want)
		}
	}
	if _, err := dataOf([]string{"--data", "/d", "--help"}); !errors.Is(err, pflag.ErrHelp) {
		t.Errorf("%v", err)
	}
}

// TestServersOwn: a server of the version before passes a user's request on without
// saying so. What changes a node is refused there; what older servers ask is answered.
func TestServersOwn(t *testing.T) {
	ca, err := pki.NewCA("test", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	pair := func(name string) (*tls.Certificate, string) {
		key, err := pki.NewKey()
		if err != nil {
			t.Fatal(err)
		}
		cert, err := ca.IssueServer(key.Public(), name, []netip.Addr{netip.MustParseAddr("127.0.0.1")}, time.Now())
		if err != nil {
			t.Fatal(err)
		}
		return &tls.Certificate{Certificate: [][]byte{cert.Raw, ca.Cert.Raw}, PrivateKey: key, Leaf: cert}, pki.Fingerprint(key.Public())
	}
	own, _ := pair("n1")
	port, err := transport.Listen(netip.MustParseAddrPort("127.0.0.1:0"), transport.Identity{Certificate: func() *tls.Certificate { return own }, Roots: ca.Roots}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	done := func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusNoContent) }
	mux.HandleFunc("/own", serversOwn(done))
	mux.HandleFunc("/ask", serversAsk(done))
	g := group{log: slog.New(slog.DiscardHandler)}
	g.add("port", port.Run)
	g.add("node calls", serveHTTP(g.log, transport.Calls(port.HTTPOver(transport.Node)), mux))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- g.run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })

	other, _ := pair("n2")
	ask := func(protocol, path string, who *transport.Caller) int {
		t.Helper()
		c, err := tls.Dial("tcp", port.Addr().String(), &tls.Config{Certificates: []tls.Certificate{*other}, InsecureSkipVerify: true, NextProtos: []string{protocol}})
		if err != nil {
			t.Fatal(err)
		}
		tr := &http.Transport{DisableKeepAlives: true, DialContext: func(context.Context, string, string) (_ net.Conn, err error) {
			if who != nil {
				err = transport.Announce(c, *who)
			}
			return c, err
		}}
		res, err := (&http.Client{Transport: tr}).Get("http://n1" + path)
		if err != nil {
			t.Fatal(err)
		}
		res.Body.Close()
		return res.StatusCode
	}
	const older = "clusterd-node/1"
	jane := &transport.Caller{User: "jane"}
	for _, tt := range []struct {
		what, protocol, path string
		who                  *transport.Caller
		want                 int
	}{
		{"a server", transport.Node, "/own", nil, http.StatusNoContent},
		{"a server", transport.Node, "/ask", nil, http.StatusNoContent},
		{"a user", transport.Node, "/own", jane, http.StatusForbidden},
		{"a user", transport.Node, "/ask", jane, http.StatusForbidden},
		{"an older server, or a user of it", older, "/own", nil, http.StatusForbidden},
		{"an older server, or a user of it", older, "/ask", nil, http.StatusNoContent},
	} {
		if got := ask(tt.protocol, tt.path, tt.who); got != tt.want {
			t.Errorf("%s asks for %s: %d, want %d", tt.what, tt.path, got, tt.want)
		}
	}
}
