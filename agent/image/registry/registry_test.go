package registry

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"log/slog"
	"math/big"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func write(t *testing.T, dir, file, text string) string {
	t.Helper()
	p := filepath.Join(dir, file)
	if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return p
}

// pair makes a certificate and its key.
func pair(t *testing.T) (cert, key string) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{SerialNumber: big.NewInt(1)}, &x509.Certificate{}, &k.PublicKey, k)
	if err != nil {
		t.Fatal(err)
	}
	keyDER, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		t.Fatal(err)
	}
	block := func(kind string, b []byte) string {
		return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: b}))
	}
	return block("CERTIFICATE", der), block("PRIVATE KEY", keyDER)
}

// TestParseErrors: what is wrong is named with its field, its value and a cure.
func TestParseErrors(t *testing.T) {
	dir := t.TempDir()
	certText, keyText := pair(t)
	_, otherText := pair(t)
	cert, key, other := write(t, dir, "cert", certText), write(t, dir, "key", keyText), write(t, dir, "other", otherText)
	empty := write(t, dir, "empty", "\n")
	helper := write(t, dir, "helper", `{"auths":{"x.io":{}},"credsStore":"desktop"}`)
	noColon := write(t, dir, "nocolon", `{"auths":{"x.io":{"auth":"YQ=="}}}`)
	for text, wants := range map[string][]string{
		"registry: {}":                                                   {`unknown field "registry"`, "docs/images.md"},
		"registries: {x.io: {plainHttps: true}}":                         {`unknown field "plainHttps"`, "mirrors, fallback, plainHTTP, caFile"},
		"registries: {x.io: {}, x.io: {}}":                               {`"x.io" already set`},
		"registries: {x.io: }":                                           {`registries["x.io"]`, "leave it out"},
		"registries: {\"https://x.io\": {}}":                             {`registries["https://x.io"]`, "without https://"},
		"registries: {x.io/team: {}}":                                    {`registries["x.io/team"]`, "the host alone"},
		"registries: {\"*.io\": {}}":                                     {`registries["*.io"]`, "stands alone"},
		"registries: {index.docker.io: {}}":                              {`registries["index.docker.io"]`, "as docker.io"},
		"registries: {X.io: {}}":                                         {`registries["X.io"]`, "as x.io"},
		"registries: {team: {}}":                                         {`registries["team"]`, "a dot or a port"},
		"registries: {\"x.io:a b\": {}}":                                 {`registries["x.io:a b"]`, "registry.example.org:5000"},
		"registries: {x.io: {mirrors: [\"http://m.io\"]}}":               {`registries["x.io"].mirrors "http://m.io"`, "plainHTTP: true"},
		"registries: {x.io: {mirrors: [x.io]}}":                          {`mirrors "x.io"`, "leave it out"},
		"registries: {x.io: {mirrors: [m.io, m.io]}}":                    {`mirrors "m.io"`, "twice"},
		"registries: {x.io: {mirrors: [m.io/Team]}}":                     {`mirrors "m.io/Team"`, "lower case"},
		"registries: {x.io: {mirrors: [m.io/]}}":                         {`mirrors "m.io/"`, "lower case"},
		"registries: {x.io: {mirrors: [\"*\"]}}":                         {`mirrors "*"`, "has a name"},
		"registries: {x.io: {fallback: false}}":                          {"fallback false", "name some"},
		"registries: {\"*\": {plainHTTP: true}}":                         {`registries["*"]`, "name each registry for plainHTTP"},
		"registries: {\"*\": {username: a, passwordFile: /p}}":           {`registries["*"]`, "name each registry"},
		"registries: {x.io: {plainHTTP: true, caFile: " + cert + "}}":    {"plainHTTP true", "leave out caFile"},
		"registries: {x.io: {caFile: ca.pem}}":                           {`caFile "ca.pem"`, "absolute"},
		"registries: {x.io: {caFile: " + dir + "/none}}":                 {"caFile", "no such file"},
		"registries: {x.io: {caFile: " + empty + "}}":                    {"caFile", "certificates in PEM"},
		"registries: {x.io: {caFile: " + dir + "}}":                      {"caFile", "no file of at most"},
		"registries: {x.io: {clientCertFile: " + cert + "}}":             {"clientKeyFile", "give both"},
		"registries: {x.io: {username: a}}":                              {`username "a"`, "give both"},
		"registries: {x.io: {passwordFile: /p}}":                         {`passwordFile "/p"`, "give both"},
		"registries: {x.io: {username: a, passwordFile: " + empty + "}}": {"passwordFile", "it is empty"},
		"registries: {x.io: {username: a, passwordFile: " + key + ", dockerConfigFile: " + helper + "}}": {"dockerConfigFile", "one of them"},
		"dockerConfigFile: " + helper:                                                      {"dockerConfigFile", "credsStore", "in auths"},
		"registries: {x.io: {dockerConfigFile: " + noColon + "}}":                          {"dockerConfigFile", `auths["x.io"].auth`, "no colon"},
		"registries: {x.io: {clientCertFile: " + cert + ", clientKeyFile: " + other + "}}": {"clientKeyFile", "its own key"},
	} {
		_, err := Parse([]byte(text))
		for _, want := range wants {
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s\n\tgot  %v\n\twant %q", text, err, want)
			}
		}
	}
	if _, err := Parse([]byte("registries: {x.io: {clientCertFile: " + cert + ", clientKeyFile: " + key + "}}")); err != nil {
		t.Error(err)
	}
}

func TestEndpoints(t *testing.T) {
	dir := t.TempDir()
	password := write(t, dir, "password", "pass word\r\n")
	docker := write(t, dir, "config.json", `{"auths":{"https://index.docker.io/v1/":{"username":"hub"},"m.io":{"username":"short"},"m.io/hub/library":{"username":"long"},"other.io":{"username":"no"}}}`)
	s, err := Parse([]byte(`
dockerConfigFile: ` + docker + `
registries:
  docker.io:
    mirrors: [m.io/hub, "10.0.0.5:5000"]
  "10.0.0.5:5000":
    plainHTTP: true
  own.io:
    username: me
    passwordFile: ` + password + `
    fallback: true
  none.io:
    mirrors: []
  closed.io:
    mirrors: [m.io]
    fallback: false
  "*":
    mirrors: [m.io, all.io]
`))
	if err != nil {
		t.Fatal(err)
	}
	hub := Auth{Username: "hub"}
	for _, tt := range []struct {
		registry string
		want     []Endpoint
	}{
		{"index.docker.io", []Endpoint{
			{Host: "m.io", Repository: "hub/library/nginx", Namespace: "docker.io", Auths: []Auth{{Username: "long"}, {Username: "short"}}},
			{Host: "10.0.0.5:5000", Repository: "library/nginx", Namespace: "docker.io", PlainHTTP: true},
			{Host: "index.docker.io", Repository: "library/nginx", Auths: []Auth{hub}},
		}},
		{"none.io", []Endpoint{{Host: "none.io", Repository: "library/nginx"}}},
		{"closed.io", []Endpoint{{Host: "m.io", Repository: "library/nginx", Namespace: "closed.io", Auths: []Auth{{Username: "short"}}}}},
		{"own.io", []Endpoint{
			{Host: "m.io", Repository: "library/nginx", Namespace: "own.io", Auths: []Auth{{Username: "short"}}},
			{Host: "all.io", Repository: "library/nginx", Namespace: "own.io"},
			{Host: "own.io", Repository: "library/nginx", Auths: []Auth{{Username: "me", Password: "pass word"}}},
		}},
		{"m.io", []Endpoint{ // not a mirror of itself
			{Host: "all.io", Repository: "library/nginx", Namespace: "m.io"},
			{Host: "m.io", Repository: "library/nginx", Auths: []Auth{{Username: "short"}}},
		}},
	} {
		if d := cmp.Diff(tt.want, s.Endpoints(tt.registry, "library/nginx")); d != "" {
			t.Errorf("%s: %s", tt.registry, d)
		}
	}
	if !s.PlainHTTP("10.0.0.5:5000") || s.PlainHTTP("10.0.0.5") || s.PlainHTTP("m.io") {
		t.Error("plain HTTP is not as named")
	}
	var unset *Settings
	if d := cmp.Diff([]Endpoint{{Host: "index.docker.io", Repository: "a"}}, unset.Endpoints("index.docker.io", "a")); d != "" || unset.TLS("x.io") != nil || unset.PlainHTTP("localhost:5000") {
		t.Errorf("without settings: %s", d)
	}
}

// TestSource: what changes counts at the next look; what is wrong does not.
func TestSource(t *testing.T) {
	dir := t.TempDir()
	password := write(t, dir, "password", "first")
	path := filepath.Join(dir, "registries.yaml")
	text := func(user string) string {
		return fmt.Sprintf("registries: {x.io: {username: %s, passwordFile: %s}}", user, password)
	}
	if _, err := Open(path, false, slog.New(slog.DiscardHandler)); err == nil || !strings.Contains(err.Error(), path) {
		t.Fatalf("no file: %v", err)
	}
	late, err := Open(path, true, slog.New(slog.DiscardHandler))
	if err != nil || late.Settings().Endpoints("x.io", "a")[0].Auths != nil {
		t.Fatalf("no file, and there need not be one: %v", err)
	}
	write(t, dir, "registries.yaml", text("a"))
	if len(late.Settings().Endpoints("x.io", "a")[0].Auths) != 1 {
		t.Error("a file that came later does not count")
	}
	var said strings.Builder
	s, err := Open(path, false, slog.New(slog.NewTextHandler(&said, nil)))
	if err != nil {
		t.Fatal(err)
	}
	check := func(what, user, pass string) {
		t.Helper()
		if got := s.Settings().Endpoints("x.io", "a")[0].Auths; len(got) != 1 || got[0] != (Auth{Username: user, Password: pass}) {
			t.Errorf("%s: %+v", what, got)
		}
	}
	// A file is replaced, as it has to be where a program watches: another inode.
	replace := func(file, text string) {
		t.Helper()
		if err := os.Rename(write(t, dir, file+".new", text), filepath.Join(dir, file)); err != nil {
			t.Fatal(err)
		}
	}
	before := s.Settings()
	check("at first", "a", "first")
	replace("password", "other")
	check("another password", "a", "other")
	if now := s.Settings(); s.Settings() != now || now == before {
		t.Error("it is read again without a change, or not at all")
	}
	replace("registries.yaml", text("b"))
	check("another user", "b", "other")
	if err := os.Remove(password); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		check("the password is gone", "b", "other")
	}
	if n := strings.Count(said.String(), "level=ERROR"); n != 1 || !strings.Contains(said.String(), "passwordFile") {
		t.Errorf("said %d times:\n%s", n, said.String())
	}
	write(t, dir, "password", "back")
	check("the password is back", "b", "back")
	replace("registries.yaml", "registries: {x.io: {user: b}}")
	check("an unknown field", "b", "back")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	check("the file is gone", "b", "back")
	replace("registries.yaml", text("c"))
	check("the file is back", "c", "back")
}

func TestDockerConfig(t *testing.T) {
	for _, tt := range []struct {
		entry, image string
		fits         bool
	}{
		{"https://index.docker.io/v1/", "docker.io/library/nginx:1", true},
		{"registry-1.docker.io", "docker.io/library/nginx:1", true},
		{"docker.io/library", "docker.io/library/nginx:1", true},
		{"registry.io", "registry.io/team/app:1", true},
		{"registry.io/team", "registry.io/team/app:1", true},
		{"registry.io/tea", "registry.io/team/app:1", false},
		{"*.registry.io", "eu.registry.io/app", true},
		{"*.registry.io", "registry.io/app", false},
		{"other.io", "registry.io/app", false},
		{"registry.io:5000", "registry.io:5000/app", true},
		{"registry.io", "registry.io:5000/app", false},
	} {
		if got := match(tt.entry, tt.image) >= 0; got != tt.fits {
			t.Errorf("%s for %s: %t", tt.entry, tt.image, got)
		}
	}
	want := Auths{"x.io": {Username: "user", Password: "pa:ss"}, "y.io": {IdentityToken: "t"}}
	got, err := ParseDockerConfig([]byte(`{"auths":{"x.io":{"auth":"dXNlcjpwYTpzcw=="},"y.io":{"identitytoken":"t"},"z.io":{"auth":"!"}}}`))
	if d := cmp.Diff(want, got); d != "" || err == nil || !strings.Contains(err.Error(), `auths["z.io"].auth: not base64`) {
		t.Errorf("%v %s", err, d)
	}
	got, err = ParseDockerCfg([]byte(`{"x.io":{"auth":"dXNlcjpwYTpzcw=="},"y.io":{"identitytoken":"t"}}`))
	if d := cmp.Diff(want, got); d != "" || err != nil {
		t.Errorf("the older form: %v %s", err, d)
	}
}
