package kubestore

import (
	"bytes"
	"encoding/base64"
	"strings"
	"testing"

	"k8s.io/apiserver/pkg/storage/value"
)

func sealKey(t *testing.T, id string) SealKey {
	t.Helper()
	key, err := DeriveSealKey(id, []byte("master"))
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func TestSealRotates(t *testing.T) {
	clear, at := []byte("k8s\x00 a secret that must stay secret"), value.DefaultContext("/registry/core/secrets/default/s")
	old, young := sealKey(t, "one"), sealKey(t, "two")
	seal, err := NewSeal([]SealKey{old})
	if err != nil {
		t.Fatal(err)
	}
	sealed, err := seal.TransformToStorage(t.Context(), clear, at)
	if err != nil || bytes.Contains(sealed, []byte("stay secret")) || !bytes.HasPrefix(sealed, []byte("k8s:enc:clusterd:one:")) {
		t.Fatalf("%q %v", sealed, err)
	}
	read := func(what string, data []byte, where value.Context, wantStale, wantErr bool) {
		t.Helper()
		got, stale, err := seal.TransformFromStorage(t.Context(), data, where)
		if (err != nil) != wantErr || !wantErr && (stale != wantStale || !bytes.Equal(got, clear)) {
			t.Errorf("%s: %q stale %t, %v", what, got, stale, err)
		}
	}
	read("as written", sealed, at, false, false)
	read("stored before there was a seal", clear, at, true, false)
	read("moved to another name", sealed, value.DefaultContext("/registry/core/secrets/default/t"), false, true)
	changed := bytes.Clone(sealed)
	changed[len(changed)-1] ^= 1
	read("changed", changed, at, false, true)

	if err := seal.Use([]SealKey{young, old}); err != nil {
		t.Fatal(err)
	}
	read("of the key before", sealed, at, true, false)
	if err := seal.Use([]SealKey{young}); err != nil {
		t.Fatal(err)
	}
	read("of a key that is gone", sealed, at, false, true)
	if seal.Use(nil) == nil || seal.Use([]SealKey{old, old}) == nil {
		t.Error("no key, or one twice, was taken")
	}
}

func TestParseSealKeys(t *testing.T) {
	good := base64.StdEncoding.EncodeToString(bytes.Repeat([]byte{7}, 32))
	keys, err := ParseSealKeys("# newest first\nkey-2 " + good + "\n\n  key-1\t" + good + "\n")
	if err != nil || len(keys) != 2 || keys[0].ID != "key-2" || keys[1].ID != "key-1" || len(keys[0].Secret) != 32 {
		t.Fatalf("%v %v", keys, err)
	}
	for _, bad := range []string{good, "a b c", "Key " + good, "a: " + good, "a " + good[:20], "a !!!"} {
		if _, err := ParseSealKeys("x " + good + "\n" + bad); err == nil || !strings.HasPrefix(err.Error(), "line 2: ") {
			t.Errorf("%q: %v", bad, err)
		}
	}
}
