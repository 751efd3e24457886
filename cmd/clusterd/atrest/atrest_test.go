package atrest

import (
	"bytes"
	"cmp"
	"context"
	"encoding/base64"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage/value"

	"github.com/clusterd/clusterd/cmd/clusterd/atrest/kmstest"
	"github.com/clusterd/clusterd/raftstore/kubestore"
)

var (
	secrets    = schema.GroupResource{Resource: "secrets"}
	configMaps = schema.GroupResource{Resource: "configmaps"}
	pods       = schema.GroupResource{Resource: "pods"}
	ovens      = schema.GroupResource{Group: "kitchen.example.com", Resource: "ovens"}
	tokenKeys  = schema.GroupResource{Group: "keys", Resource: "serviceaccounts"}
)

// text of a value, which is never to be seen where it is sealed.
const text = "k8s\x00 what no file is to show"

// logs gathers what is logged.
type logs struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logs) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(b)
}

func (l *logs) count(s string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Count(l.text.String(), s)
}

type fixture struct {
	*Sealing
	t       *testing.T
	file    string
	log     *logs
	changed int
}

// entry is one list of resources with its providers, in JSON.
func entryOf(resources, providers string) string {
	return fmt.Sprintf(`{"resources": [%s], "providers": [%s]}`, resources, providers)
}

func aesKeys(provider string, names ...string) string {
	var keys []string
	for _, name := range names {
		secret := bytes.Repeat([]byte(name[len(name)-1:]), 32)
		keys = append(keys, fmt.Sprintf(`{"name": %q, "secret": %q}`, name, base64.StdEncoding.EncodeToString(secret)))
	}
	return fmt.Sprintf(`{%q: {"keys": [%s]}}`, provider, strings.Join(keys, ","))
}

func kmsOf(p *kmstest.Plugin) string {
	return fmt.Sprintf(`{"kms": {"apiVersion": "v2", "name": "vault", "endpoint": %q, "timeout": "10s"}}`, p.Endpoint())
}

const identityProvider = `{"identity": {}}`

func configOf(entries ...string) string {
	return `{"apiVersion": "apiserver.config.k8s.io/v1", "kind": "EncryptionConfiguration", "resources": [` + strings.Join(entries, ",") + `]}`
}

func write(t *testing.T, file, content string) {
	t.Helper()
	if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// open makes a server's sealing; "" is one without a file.
func open(t *testing.T, content string) *fixture {
	t.Helper()
	f := &fixture{t: t, log: &logs{}}
	if content != "" {
		f.file = filepath.Join(t.TempDir(), "encryption.yaml")
		write(t, f.file, content)
	}
	s, err := f.make()
	if err != nil {
		t.Fatal(err)
	}
	f.Sealing = s
	t.Cleanup(s.Close)
	return f
}

func (f *fixture) make() (*Sealing, error) {
	f.t.Helper()
	key, err := kubestore.DeriveSealKey("own", []byte("master"))
	if err != nil {
		f.t.Fatal(err)
	}
	own, err := kubestore.NewSeal([]kubestore.SealKey{key})
	if err != nil {
		f.t.Fatal(err)
	}
	return New(Config{
		File: f.file, ID: "n1", Own: own, Sealed: map[schema.GroupResource]bool{secrets: true, tokenKeys: true},
		Private: func(r schema.GroupResource) bool { return r == tokenKeys },
		Changed: func() { f.changed++ }, Log: slog.New(slog.NewTextHandler(f.log, nil)),
	})
}

func at(resource schema.GroupResource) value.Context {
	return value.DefaultContext("/registry/" + cmp.Or(resource.Group, "core") + "/" + resource.Resource + "/x/o")
}

func (f *fixture) seals(resource schema.GroupResource, prefix string) []byte {
	f.t.Helper()
	sealed, err := f.Transformer(resource).TransformToStorage(f.t.Context(), []byte(text), at(resource))
	if err != nil || kubestore.SealedBy(sealed) != prefix || prefix != "" && bytes.Contains(sealed, []byte("no file")) {
		f.t.Fatalf("%s is written as %.60q, %v; want %q", resource, sealed, err, prefix)
	}
	return sealed
}

func (f *fixture) opens(resource schema.GroupResource, data []byte, wantStale bool) {
	f.t.Helper()
	out, stale, err := f.Transformer(resource).TransformFromStorage(f.t.Context(), data, at(resource))
	if err != nil || string(out) != text || stale != wantStale {
		f.t.Errorf("%s of %q: %q, stale %t, %v; want stale %t", resource, kubestore.SealedBy(data), out, stale, err, wantStale)
	}
}

func (f *fixture) refuses(resource schema.GroupResource, data []byte, wants ...string) {
	f.t.Helper()
	_, _, err := f.Transformer(resource).TransformFromStorage(f.t.Context(), data, at(resource))
	for _, want := range wants {
		if err == nil || !strings.Contains(err.Error(), want) {
			f.t.Errorf("%s of %q: %v; want %q", resource, kubestore.SealedBy(data), err, want)
		}
	}
}

// TestWithoutFile: Secrets are sealed with the cluster's own keys, other kinds are not,
// and what others have sealed by a file is refused with the cure.
func TestWithoutFile(t *testing.T) {
	f := open(t, "")
	f.opens(secrets, f.seals(secrets, "k8s:enc:clusterd:own:"), false)
	f.opens(secrets, []byte(text), true)
	f.opens(configMaps, f.seals(configMaps, ""), false)
	other := open(t, configOf(entryOf(`"configmaps"`, aesKeys("aesgcm", "key1"))))
	f.refuses(configMaps, other.seals(configMaps, "k8s:enc:aesgcm:v1:key1:"), "configmaps", "k8s:enc:aesgcm:v1:key1:", "--encryption-provider-config")
	if f.Named() || f.Hash() != "" || !f.Valid() || len(f.Keys()) > 0 || f.Covers(configMaps) || !f.Covers(secrets) {
		t.Error("there seems to be a file")
	}
	synctest.Test(t, func(t *testing.T) {
		ctx, end := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- f.Run(ctx) }()
		synctest.Wait()
		if ctx.Err() == nil && len(ended) > 0 { // the node would end with it
			t.Errorf("ends by itself: %v", <-ended)
			ended <- nil
		}
		end()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// TestProviders: the file's first provider writes what it names, in the way of Kubernetes'
// API server; the cluster's own keys write what it does not, and are read anywhere.
func TestProviders(t *testing.T) {
	own := open(t, "")
	bySeal := own.seals(secrets, "k8s:enc:clusterd:own:")
	f := open(t, configOf(
		entryOf(`"configmaps"`, aesKeys("aesgcm", "key1")+","+identityProvider),
		entryOf(`"pods"`, identityProvider+","+aesKeys("aescbc", "key2")),
		entryOf(`"*.kitchen.example.com"`, aesKeys("secretbox", "key3")),
	))
	f.opens(configMaps, f.seals(configMaps, "k8s:enc:aesgcm:v1:key1:"), false)
	f.opens(configMaps, []byte(text), true)
	f.opens(pods, f.seals(pods, ""), false)
	f.opens(ovens, f.seals(ovens, "k8s:enc:secretbox:v1:key3:"), false)
	f.opens(secrets, f.seals(secrets, "k8s:enc:clusterd:own:"), false)
	f.opens(tokenKeys, f.seals(tokenKeys, "k8s:enc:clusterd:own:"), false)
	f.refuses(secrets, f.seals(ovens, "k8s:enc:secretbox:v1:key3:"), "secrets", "k8s:enc:secretbox:v1:key3:", f.file)
	if !f.Covers(configMaps) || f.Covers(pods) || !f.Covers(ovens) || !f.Covers(secrets) || f.Covers(schema.GroupResource{Resource: "nodes"}) {
		t.Error("the wrong resources are to be sealed")
	}
	want := "configmaps: aesgcm key1; pods: identity; *.kitchen.example.com: secretbox key3"
	if got := keysText(f.Keys()); got != want {
		t.Errorf("writes with %q, want %q", got, want)
	}

	all := open(t, configOf(entryOf(`"secrets"`, aesKeys("aescbc", "key2")), entryOf(`"*.*"`, aesKeys("aesgcm", "key1"))))
	all.opens(secrets, bySeal, true)
	all.opens(secrets, all.seals(secrets, "k8s:enc:aescbc:v1:key2:"), false)
	all.opens(ovens, all.seals(ovens, "k8s:enc:aesgcm:v1:key1:"), false)
	all.opens(tokenKeys, all.seals(tokenKeys, "k8s:enc:clusterd:own:"), false) // no API serves them
	core := open(t, configOf(entryOf(`"*."`, aesKeys("aesgcm", "key1"))))
	core.opens(pods, core.seals(pods, "k8s:enc:aesgcm:v1:key1:"), false)
	core.opens(ovens, core.seals(ovens, ""), false)
	if got := keysText(core.Keys()); got != "*.: aesgcm key1" {
		t.Error(got)
	}

	// A key of the same name with another secret.
	wrong := open(t, strings.Replace(configOf(entryOf(`"configmaps"`, aesKeys("aesgcm", "key9"))), "key9", "key1", 1))
	wrong.refuses(configMaps, f.seals(configMaps, "k8s:enc:aesgcm:v1:key1:"), "configmaps", "does not open it", wrong.file)
}

// TestRefusedFiles: a server does not begin with a file that is wrong, and says why.
func TestRefusedFiles(t *testing.T) {
	f := &fixture{t: t, log: &logs{}, file: filepath.Join(t.TempDir(), "encryption.yaml")}
	for content, want := range map[string]string{
		"": "is empty",
		configOf(entryOf(`"secrets"`, `{"kms": {"name": "old", "endpoint": "unix:///x"}}`)):                                       "resources[0].providers[0].kms.apiVersion \"\": only v2",
		configOf(entryOf(`"secrets"`, identityProvider+`,{"kms": {"apiVersion": "v1", "name": "old", "endpoint": "unix:///x"}}`)): "resources[0].providers[1].kms.apiVersion \"v1\": only v2",
		configOf(entryOf(`"secrets"`, `{"aesgcm": {"keys": [{"name": "a", "secret": "c2hvcnQ="}]}}`)):                             "expected length",
		configOf(entryOf(`"*"`, identityProvider)):                                                                                "*.*",
		configOf(entryOf(`"*.*"`, identityProvider), entryOf(`"secrets"`, identityProvider)):                                      "masked",
		strings.Replace(configOf(entryOf(`"secrets"`, identityProvider)), "resources", "resuorces", 1):                            "resuorces",
		`{"apiVersion": "apiserver.config.k8s.io/v1", "kind": "AdmissionConfiguration"}`:                                          "AdmissionConfiguration",
	} {
		write(t, f.file, content)
		if _, err := f.make(); err == nil || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), f.file) {
			t.Errorf("%s: %v, want %q", content, err, want)
		}
	}
	f.file += ".missing"
	if _, err := f.make(); err == nil || !strings.Contains(err.Error(), f.file) {
		t.Error(err)
	}
}

// TestReload: a change of the file is taken up while the server runs; a wrong one leaves
// the one before in force, is logged once, and the next right one is taken up.
func TestReload(t *testing.T) {
	one := configOf(entryOf(`"configmaps"`, aesKeys("aesgcm", "key1")))
	f := open(t, one)
	transformer := f.Transformer(configMaps) // as the storage holds it
	old := f.seals(configMaps, "k8s:enc:aesgcm:v1:key1:")
	f.Look(t.Context())
	if f.changed != 0 {
		t.Error("a file that is the same was taken up")
	}
	write(t, f.file, configOf(entryOf(`"configmaps"`, aesKeys("aesgcm", "key2", "key1"))))
	f.Look(t.Context())
	f.opens(configMaps, old, true)
	sealed, err := transformer.TransformToStorage(t.Context(), []byte(text), at(configMaps))
	if err != nil || kubestore.SealedBy(sealed) != "k8s:enc:aesgcm:v1:key2:" || f.changed == 0 {
		t.Fatalf("%.60q, %v, after %d changes", sealed, err, f.changed)
	}
	hash, changed := f.Hash(), f.changed
	for range 2 {
		write(t, f.file, "not a configuration")
		f.Look(t.Context())
	}
	if f.Valid() || f.Hash() != hash || f.changed != changed || f.log.count("stays as it was") != 1 {
		t.Errorf("a wrong file: valid %t, %s, %d changes, logged %d times", f.Valid(), f.Hash(), f.changed, f.log.count("stays as it was"))
	}
	f.opens(configMaps, sealed, false)
	write(t, f.file, configOf(entryOf(`"configmaps"`, aesKeys("aesgcm", "key2"))))
	f.Look(t.Context())
	f.opens(configMaps, sealed, false)
	f.refuses(configMaps, old, "key1", "put the provider back")
	if !f.Valid() || f.log.count("others can read") != 0 {
		t.Error("the right file is not in force, or its mode is complained of")
	}
	if err := os.Chmod(f.file, 0o644); err != nil {
		t.Fatal(err)
	}
	write(t, f.file, one)
	f.Look(t.Context())
	if f.log.count("others can read") != 1 {
		t.Error("nothing is said of a file that others can read")
	}
}

func (f *fixture) health(ctx context.Context) error {
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, "/readyz", http.NoBody)
	if err != nil {
		f.t.Fatal(err)
	}
	return f.Health().Check(r)
}

// eventually waits for what is looked at again by itself.
func (f *fixture) eventually(what string, done func() bool) {
	f.t.Helper()
	for until := time.Now().Add(3 * time.Minute); !done(); time.Sleep(50 * time.Millisecond) {
		if time.Now().After(until) {
			f.t.Fatal("not within time: " + what)
		}
	}
}

// TestKMSRotates: a plugin seals; its new key is taken up, and what the one before sealed is
// stale. A server asks it once for a key.
func TestKMSRotates(t *testing.T) {
	t.Parallel() // upstream asks a plugin that is well every 20 seconds at most
	plugin := kmstest.Start(t, "k-1")
	conf := configOf(entryOf(`"configmaps"`, kmsOf(plugin)))
	f := open(t, conf)
	old := f.seals(configMaps, "k8s:enc:kms:v2:vault:")
	f.opens(configMaps, old, false)
	if err := f.health(t.Context()); err != nil {
		t.Error(err)
	}
	before := keysText(f.Keys())
	if !strings.HasPrefix(before, "configmaps: kms vault sha256:") {
		t.Error(before)
	}

	plugin.Rotate("k-2")
	f.eventually("the plugin's new key is used", func() bool {
		_ = f.health(t.Context()) // which asks the plugin, as readiness probes do
		f.Look(t.Context())
		return keysText(f.Keys()) != before
	})
	if f.changed == 0 {
		t.Error("a new key of the plugin is no reason to seal anew")
	}
	f.opens(configMaps, old, true)
	f.opens(configMaps, f.seals(configMaps, "k8s:enc:kms:v2:vault:"), false)

	// Another server, which opened nothing yet.
	second := open(t, conf)
	asked := plugin.Decrypted()
	second.opens(configMaps, old, true)
	second.opens(configMaps, old, true)
	if n := plugin.Decrypted() - asked; n != 1 {
		t.Errorf("the plugin was asked %d times for one key", n)
	}
	plugin.Forget("k-1")
	third := open(t, conf)
	third.refuses(configMaps, old, "configmaps", "k8s:enc:kms:v2:vault:", "does not open it")
}

// TestKMSDies: while a plugin is dead or too slow, what was opened or sealed once goes on, and
// its health says so; a server starts without it, and is well when it is; a file whose plugin does
// not answer is not taken up before it does.
func TestKMSDies(t *testing.T) {
	t.Parallel()
	plugin := kmstest.Start(t, "k-1")
	conf := configOf(entryOf(`"configmaps"`, kmsOf(plugin)))
	f := open(t, conf)
	old := f.seals(configMaps, "k8s:enc:kms:v2:vault:")
	if err := f.health(t.Context()); err != nil {
		t.Error(err)
	}
	plugin.End()
	f.eventually("the death of the plugin shows", func() bool { return f.health(t.Context()) != nil })
	f.opens(configMaps, old, false)
	f.opens(configMaps, f.seals(configMaps, "k8s:enc:kms:v2:vault:"), false)
	third := open(t, strings.Replace(conf, "10s", "100ms", 1)) // a server starts without it
	third.refuses(configMaps, old, "configmaps", "k8s:enc:kms:v2:vault:", "does not open it")
	if _, err := third.Transformer(configMaps).TransformToStorage(t.Context(), []byte(text), at(configMaps)); err == nil {
		t.Error("a value was sealed without the plugin")
	}
	if keys := third.Keys(); len(keys) != 1 || keys[0].Err == "" {
		t.Errorf("without the plugin there is a key: %v", keys)
	}

	none := open(t, configOf(entryOf(`"configmaps"`, aesKeys("aesgcm", "key1"))))
	write(t, none.file, strings.Replace(conf, "10s", "100ms", 1))
	none.Look(t.Context())
	if none.Valid() {
		t.Error("a file was taken up whose plugin is dead")
	}
	none.seals(configMaps, "k8s:enc:aesgcm:v1:key1:")

	plugin.Begin()
	none.eventually("the file is taken up", func() bool { none.Look(t.Context()); return none.Valid() })
	// Another server's key of its own, made of the same key of the plugin's.
	none.opens(configMaps, old, false)
	third.eventually("the server that started without it can open", func() bool {
		_, _, err := third.Transformer(configMaps).TransformFromStorage(t.Context(), old, at(configMaps))
		return err == nil
	})
	f.eventually("the plugin is well", func() bool { return f.health(t.Context()) == nil })

	plugin.Slow(time.Hour)
	slow := open(t, strings.Replace(conf, "10s", "100ms", 1))
	slow.refuses(configMaps, old, "does not open it")
	if slow.health(t.Context()) == nil {
		t.Error("a plugin that does not answer in time is well")
	}
}
