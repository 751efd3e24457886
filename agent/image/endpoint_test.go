package image

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	regs "github.com/clusterd/clusterd/agent/image/registry"
)

// with opens a store whose registries are set up by that text.
func with(t *testing.T, text string) *Store {
	t.Helper()
	settings, err := regs.Parse([]byte(text))
	if err != nil {
		t.Fatal(err)
	}
	s, err := Open(Config{Dir: t.TempDir(), Registries: func() *regs.Settings { return settings }, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// guarded is a registry that is open to one user, and remembers what it was asked.
type guarded struct {
	host           string
	user, password string // empty: open to all

	mu    sync.Mutex // guards all below
	asked []string   // the queries of requests for manifests
	users map[string]bool
}

func guard(t *testing.T, user, password string) *guarded {
	g := &guarded{user: user, password: password, users: map[string]bool{}}
	g.host = serve(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			u, p, _ := r.BasicAuth()
			g.mu.Lock()
			if u != "" {
				g.users[u] = true
			}
			if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/manifests/") {
				g.asked = append(g.asked, r.URL.RawQuery)
			}
			g.mu.Unlock()
			if g.user != "" && (u != g.user || p != g.password) {
				w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			h.ServeHTTP(w, r)
		})
	})
	return g
}

func (g *guarded) push(t *testing.T, repository string, img v1.Image) {
	t.Helper()
	r, err := name.ParseReference(g.host + "/" + repository)
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(r, img, remote.WithAuth(authenticator(Auth{Username: g.user, Password: g.password}))); err != nil {
		t.Fatal(err)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.asked, g.users = nil, map[string]bool{}
}

func (g *guarded) seen() (asked []string, users map[string]bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.asked, g.users
}

// TestNoPlainHTTPUnlessNamed: nothing is spoken to without TLS by itself, not even on
// the loopback, and the error says what allows it.
func TestNoPlainHTTPUnlessNamed(t *testing.T) {
	host := serve(t, nil)
	push(t, host+"/a:1", build(t, v1.Config{}, archive(t, entry{name: "f", body: "x"})))
	for _, text := range []string{"", "registries: {\"127.0.0.1:1\": {plainHTTP: true}}"} {
		_, err := with(t, text).Ensure(t.Context(), host+"/a:1", Auth{})
		var pe *PullError
		if !errors.As(err, &pe) || pe.Reason != ReasonUnreachable || !errors.Is(err, ErrNoTLS) || !strings.Contains(err.Error(), fmt.Sprintf("plainHTTP: true of %q in the file of --registries-config", host)) {
			t.Errorf("%q: got %v", text, err)
		}
	}
	if _, err := with(t, fmt.Sprintf("registries: {%q: {plainHTTP: true}}", host)).Ensure(t.Context(), host+"/a:1", Auth{}); err != nil {
		t.Error(err)
	}
}

// TestAuthorityAndClientCertificate: a registry with an authority of its own that asks
// for a certificate.
func TestAuthorityAndClientCertificate(t *testing.T) {
	var shown atomic.Int64 // certificates with the last request
	h := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		shown.Store(int64(len(r.TLS.PeerCertificates)))
		h.ServeHTTP(w, r)
	}))
	srv.TLS = &tls.Config{ClientAuth: tls.RequestClientCert}
	srv.Config.ErrorLog = slog.NewLogLogger(slog.DiscardHandler, slog.LevelInfo)
	srv.StartTLS()
	t.Cleanup(srv.Close)
	dir := t.TempDir()
	write := func(file, kind string, der []byte) string {
		p := filepath.Join(dir, file)
		if err := os.WriteFile(p, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	ca := write("ca.pem", "CERTIFICATE", srv.Certificate().Raw)
	keyDER, err := x509.MarshalPKCS8PrivateKey(srv.TLS.Certificates[0].PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	key := write("key.pem", "PRIVATE KEY", keyDER)
	host := strings.TrimPrefix(srv.URL, "https://")
	r, err := name.ParseReference(host + "/a:1")
	if err != nil {
		t.Fatal(err)
	}
	if err := remote.Write(r, build(t, v1.Config{}, archive(t, entry{name: "f", body: "x"})), remote.WithTransport(srv.Client().Transport)); err != nil {
		t.Fatal(err)
	}
	_, err = with(t, "").Ensure(t.Context(), host+"/a:1", Auth{})
	if err == nil || !strings.Contains(err.Error(), "certificate signed by unknown authority") || !strings.Contains(err.Error(), fmt.Sprintf("caFile of %q", host)) || errors.Is(err, ErrNoTLS) {
		t.Errorf("an unknown authority: %v", err)
	}
	text := fmt.Sprintf("registries: {%q: {caFile: %s}}", host, ca)
	if _, err := with(t, text).Ensure(t.Context(), host+"/a:1", Auth{}); err != nil {
		t.Error(err)
	}
	if n := shown.Load(); n != 0 {
		t.Errorf("%d certificates were shown, none is set", n)
	}
	text = fmt.Sprintf("registries: {%q: {caFile: %s, clientCertFile: %s, clientKeyFile: %s}}", host, ca, ca, key)
	if _, err := with(t, text).Ensure(t.Context(), host+"/a:1", Auth{}); err != nil {
		t.Error(err)
	}
	if n := shown.Load(); n != 1 {
		t.Errorf("%d certificates were shown", n)
	}
}

// TestMirrors: mirrors are asked in order, then the registry itself; a mirror learns
// which registry is meant.
func TestMirrors(t *testing.T) {
	img := build(t, v1.Config{}, archive(t, entry{name: "f", body: "x"}))
	digest, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	first, second, itself := guard(t, "", ""), guard(t, "", ""), guard(t, "", "")
	plain := fmt.Sprintf("\n  %q: {plainHTTP: true}\n  %q: {plainHTTP: true}\n", first.host, second.host)
	text := fmt.Sprintf("registries:\n  %q: {plainHTTP: true, mirrors: [127.0.0.1:1, %q, %q]}", itself.host, first.host, second.host+"/kept/here") + plain

	// None has it: each says so.
	_, err = with(t, text).Ensure(t.Context(), itself.host+"/team/app:1", Auth{})
	var pe *PullError
	if !errors.As(err, &pe) || pe.Reason != ReasonNotFound {
		t.Fatalf("got %v", err)
	}
	for _, want := range []string{": the registry says: NAME_UNKNOWN", "; before it, mirror 127.0.0.1:1: ", "connection refused", "; before it, mirror " + first.host + " says: NAME_UNKNOWN", "mirror " + second.host + " says: "} {
		if !strings.Contains(err.Error(), want) {
			t.Errorf("%v: no %q", err, want)
		}
	}
	// The registry alone has it.
	itself.push(t, "team/app:1", img)
	if _, err := with(t, text).Ensure(t.Context(), itself.host+"/team/app:1", Auth{}); err != nil {
		t.Fatal(err)
	}
	if asked, _ := itself.seen(); !slices.Equal(asked, []string{""}) {
		t.Errorf("the registry itself was asked %q", asked)
	}
	// A mirror has it below a path; the image is known by its own name.
	second.push(t, "kept/here/team/app:1", img)
	itself.push(t, "team/app:1", img)
	got, err := with(t, text).Ensure(t.Context(), itself.host+"/team/app:1", Auth{})
	if err != nil {
		t.Fatal(err)
	}
	if want := itself.host + "/team/app"; !slices.Equal(got.Refs, []string{want + ":1"}) || !slices.Equal(got.RepoDigests, []string{want + "@" + digest.String()}) {
		t.Errorf("it is known as %v, %v", got.Refs, got.RepoDigests)
	}
	if asked, _ := second.seen(); len(asked) == 0 || asked[0] != "ns="+strings.ReplaceAll(itself.host, ":", "%3A") {
		t.Errorf("the mirror was asked %q", asked)
	}
	if asked, _ := itself.seen(); len(asked) != 0 {
		t.Errorf("the registry itself was asked %q though a mirror has it", asked)
	}
	// By digest too.
	if _, err := with(t, text).Ensure(t.Context(), itself.host+"/team/app@"+digest.String(), Auth{}); err != nil {
		t.Error(err)
	}
	// Mirrors of all registries, and no way back.
	all := fmt.Sprintf("registries:\n  \"*\": {mirrors: [%q], fallback: false}", first.host) + plain
	_, err = with(t, all).Ensure(t.Context(), "registry.invalid/team/app:1", Auth{})
	if !errors.As(err, &pe) || pe.Reason != ReasonNotFound || !strings.Contains(err.Error(), "mirror "+first.host+" says: NAME_UNKNOWN") {
		t.Errorf("mirrors alone: %v", err)
	}
	first.push(t, "library/nginx:1", img)
	if got, err := with(t, all).Ensure(t.Context(), "nginx:1", Auth{}); err != nil || !slices.Equal(got.Refs, []string{"docker.io/library/nginx:1"}) {
		t.Errorf("%v %v", got.Refs, err)
	}
}

// TestMirrorWithOtherContent: what a mirror gives for a digest has to be that.
func TestMirrorWithOtherContent(t *testing.T) {
	img := build(t, v1.Config{}, archive(t, entry{name: "f", body: "right"}))
	digest, err := img.Digest()
	if err != nil {
		t.Fatal(err)
	}
	other, err := build(t, v1.Config{}, archive(t, entry{name: "f", body: "wrong"})).RawManifest()
	if err != nil {
		t.Fatal(err)
	}
	itself := guard(t, "", "")
	mirror := serve(t, func(h http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if strings.Contains(r.URL.Path, "/manifests/") {
				w.Header().Set("Content-Type", "application/vnd.docker.distribution.manifest.v2+json")
				_, _ = w.Write(other)
				return
			}
			h.ServeHTTP(w, r)
		})
	})
	itself.push(t, "a:1", img)
	text := fmt.Sprintf("registries:\n  %q: {plainHTTP: true, mirrors: [%q]}\n  %q: {plainHTTP: true}", itself.host, mirror, mirror)
	got, err := with(t, text).Ensure(t.Context(), itself.host+"/a@"+digest.String(), Auth{})
	id, _ := img.ConfigName()
	if err != nil || got.ID != id.String() {
		t.Errorf("%v %v", got.ID, err)
	}
}

// TestCredentialsOfTheNode: the node's credentials for a registry open it to pods that
// have none; those for a mirror, and a pod's own, go nowhere else.
func TestCredentialsOfTheNode(t *testing.T) {
	img := build(t, v1.Config{}, archive(t, entry{name: "f", body: "x"}))
	itself, mirror := guard(t, "node", "secret"), guard(t, "mirrored", "other")
	dir := t.TempDir()
	write := func(file, text string) string {
		p := filepath.Join(dir, file)
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return p
	}
	password := write("password", "secret\n")
	docker := write("config.json", fmt.Sprintf(`{"auths":{%q:{"username":"mirrored","password":"wrong"},%q:{"username":"mirrored","password":"other"},%q:{"username":"elsewhere","password":"x"}}}`, mirror.host, mirror.host+"/team", "registry.example.org"))
	text := fmt.Sprintf("dockerConfigFile: %s\nregistries:\n  %q: {plainHTTP: true, username: node, passwordFile: %s, mirrors: [%q]}\n  %q: {plainHTTP: true}", docker, itself.host, password, mirror.host, mirror.host)

	itself.push(t, "team/app:1", img)
	if _, err := with(t, text).Ensure(t.Context(), itself.host+"/team/app:1", Auth{}); err != nil {
		t.Fatal(err)
	}
	_, at := itself.seen()
	if _, there := mirror.seen(); len(at) != 1 || !at["node"] || len(there) != 1 || !there["mirrored"] {
		t.Errorf("the registry saw %v, the mirror %v", at, there)
	}
	// A pod's own are the registry's alone.
	itself.push(t, "team/app:1", img)
	mirror.push(t, "other/image:1", img)
	var pe *PullError
	if _, err := with(t, text).Ensure(t.Context(), itself.host+"/team/app:1", Auth{Username: "pod", Password: "its own"}); !errors.As(err, &pe) || pe.Reason != ReasonUnauthorized {
		t.Errorf("a pod's wrong credentials: %v", err)
	}
	_, at = itself.seen()
	if _, there := mirror.seen(); !at["pod"] || at["node"] || there["pod"] || there["node"] {
		t.Errorf("the registry saw %v, the mirror %v", at, there)
	}
	mirror.push(t, "team/app:1", img)
	itself.push(t, "team/app:1", img)
	if _, err := with(t, text).Ensure(t.Context(), itself.host+"/team/app:1", Auth{}); err != nil {
		t.Fatal(err)
	}
	if asked, at := itself.seen(); len(asked) != 0 || len(at) != 0 {
		t.Errorf("a mirror has it, and the registry was asked: %v %v", asked, at)
	}
}

// TestCredentialsStayWithTLS: a registry with TLS sends on to one without, once with
// its blobs and once with its tokens.
func TestCredentialsStayWithTLS(t *testing.T) {
	leaked := make(chan string, 100)
	plain := serve(t, func(http.Handler) http.Handler {
		return http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { leaked <- r.Header.Get("Authorization") })
	})
	for _, challenge := range []string{`Bearer realm="http://` + plain + `/token",service="x"`, ""} {
		srv := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			switch {
			case challenge != "":
				w.Header().Set("WWW-Authenticate", challenge)
				w.WriteHeader(http.StatusUnauthorized)
			case r.URL.Path != "/v2/":
				http.Redirect(w, r, "http://"+plain+r.URL.Path, http.StatusTemporaryRedirect)
			}
		}))
		ca := filepath.Join(t.TempDir(), "ca.pem")
		if err := os.WriteFile(ca, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw}), 0o600); err != nil {
			t.Fatal(err)
		}
		host := strings.TrimPrefix(srv.URL, "https://")
		text := fmt.Sprintf("registries: {%q: {caFile: %s}, %q: {plainHTTP: true}}", host, ca, plain)
		if _, err := with(t, text).Ensure(t.Context(), host+"/a:1", Auth{Username: "me", Password: "secret"}); err == nil {
			t.Errorf("%q: it was pulled", challenge)
		}
		srv.Close()
	}
	// Without TLS itself, it may send on to another that is named, without credentials.
	first := serve(t, func(http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.URL.Path != "/v2/" {
				http.Redirect(w, r, "http://"+plain+r.URL.Path, http.StatusTemporaryRedirect)
			}
		})
	})
	select {
	case got := <-leaked:
		t.Errorf("it was asked without TLS, with %q", got)
	default:
	}
	text := fmt.Sprintf("registries: {%q: {plainHTTP: true}, %q: {plainHTTP: true}}", first, plain)
	if _, err := with(t, text).Ensure(t.Context(), first+"/a:1", Auth{Username: "me", Password: "secret"}); err == nil {
		t.Error("an empty answer is an image")
	}
	if got := <-leaked; got != "" {
		t.Errorf("credentials were sent on: %q", got)
	}
}

// TestRegistryThatFails: what a registry without TLS answers is said, once and without
// a word of TLS; one that sends around in circles is given up.
func TestRegistryThatFails(t *testing.T) {
	img := build(t, v1.Config{}, archive(t, entry{name: "f", body: "x"}))
	layers, err := img.Layers()
	if err != nil {
		t.Fatal(err)
	}
	digest, err := layers[0].Digest()
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name, path string
		answer     http.HandlerFunc
		want       string
	}{
		{"an error at once", "/v2/", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusTeapot) }, "418"},
		{"circles", digest.Hex, func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, r.URL.Path, http.StatusTemporaryRedirect)
		}, "sends on more than 10 times"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var pushed atomic.Bool
			host := serve(t, func(h http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if pushed.Load() && r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, tt.path) {
						tt.answer(w, r)
						return
					}
					h.ServeHTTP(w, r)
				})
			})
			push(t, host+"/a:1", img)
			pushed.Store(true)
			_, err := open(t, t.TempDir()).Ensure(t.Context(), host+"/a:1", Auth{})
			if err == nil || !strings.Contains(err.Error(), tt.want) || strings.Contains(err.Error(), "TLS") {
				t.Errorf("got %v", err)
			}
		})
	}
	// Nothing listens there: it is said once.
	_, err = with(t, "registries: {\"127.0.0.1:1\": {plainHTTP: true}}").Ensure(t.Context(), "127.0.0.1:1/a:1", Auth{})
	if err == nil || strings.Count(err.Error(), "connection refused") != 1 {
		t.Errorf("got %v", err)
	}
}
