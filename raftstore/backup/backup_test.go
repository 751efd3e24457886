package backup_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"time"

	"filippo.io/age"

	"github.com/clusterd/clusterd/raftstore/backup"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

func keyspace(t testing.TB) *mvcc.Keyspace {
	t.Helper()
	k := mvcc.New()
	for i := range uint64(300) {
		op := mvcc.Op{Type: mvcc.OpPut, Key: fmt.Sprintf("/registry/core/pods/ns/p%d", i%40), Value: bytes.Repeat([]byte{byte(i)}, 100)}
		if i%7 == 0 {
			op = mvcc.Op{Type: mvcc.OpPut, Key: fmt.Sprintf("/clusterd/members/%d", i)}
		}
		k.Apply(i+1, mvcc.Batch{Time: int64(i), Commands: []mvcc.Command{{
			Type: mvcc.CmdTxn, ID: mvcc.CommandID{Session: 1, Seq: i}, Basis: i, Txn: mvcc.Txn{Ops: []mvcc.Op{op}},
		}}})
	}
	return k
}

func archive(t testing.TB, k *mvcc.Keyspace) []byte {
	t.Helper()
	counts, err := backup.Counts(k)
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	m := backup.Manifest{Cluster: "c", Node: "n1", Taken: time.Unix(1_800_000_000, 5).UTC(), Epoch: 3}
	if err := backup.Write(&b, m, backup.Secrets{CACert: []byte("CERT"), CAKey: []byte("KEY")}, k.Snapshot(), counts); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestSealedRoundTrip(t *testing.T) {
	id, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	lock, err := backup.Recipients([]string{id.Recipient().String()})
	if err != nil {
		t.Fatal(err)
	}
	k := keyspace(t)
	plain := archive(t, k)
	var sealed bytes.Buffer
	w, err := backup.Seal(&sealed, lock)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(plain); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{"KEY", "/registry/core/pods", "manifest.json"} {
		if bytes.Contains(sealed.Bytes(), []byte(secret)) {
			t.Errorf("%q can be read in the sealed file", secret)
		}
	}
	read := func(b []byte, key backup.Key) (*backup.Content, error) {
		r, err := backup.Open(bytes.NewReader(b), key)
		if err != nil {
			return nil, err
		}
		return backup.Read(r)
	}
	c, err := read(sealed.Bytes(), backup.Key{id})
	if err != nil {
		t.Fatal(err)
	}
	if c.Store.Digest() != k.Digest() || string(c.CAKey) != "KEY" || string(c.CACert) != "CERT" || c.Epoch != 3 || c.Counts["/registry/core/pods"] != 40 {
		t.Errorf("%+v", c.Manifest)
	}
	// Wherever it is changed or cut, it is refused.
	n := sealed.Len()
	for _, at := range []int{0, 30, n / 4, n / 2, n - 20, n - 1} {
		bad := bytes.Clone(sealed.Bytes())
		bad[at] ^= 1
		if _, err := read(bad, backup.Key{id}); err == nil {
			t.Errorf("byte %d of %d was changed, and Read did not notice", at, n)
		}
		if _, err := read(sealed.Bytes()[:at], backup.Key{id}); err == nil {
			t.Errorf("it was cut at %d of %d, and Read did not notice", at, n)
		}
	}
	other, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := read(sealed.Bytes(), backup.Key{other}); err == nil || !strings.Contains(err.Error(), "does not open") {
		t.Errorf("another key: %v", err)
	}
}

// TestReadFindsDamage changes the archive itself, as if the seal had been made
// of it like that.
func TestReadFindsDamage(t *testing.T) {
	plain := archive(t, keyspace(t))
	if _, err := backup.Read(bytes.NewReader(plain)); err != nil {
		t.Fatal(err)
	}
	for _, r := range [][2]string{
		{`"revision": 301`, `"revision": 302`}, {`"/registry/core/pods": 40`, `"/registry/core/pods": 41`},
		{"CERT", "CART"}, {"KEY", "KAY"}, {"ca.key", "cb.key"}, {"CLDRSNAP", "CLDRSNAQ"}, {"/registry/core/pods/ns/p1", "/registry/core/pods/ns/p2"},
	} {
		bad := bytes.Replace(plain, []byte(r[0]), []byte(r[1]), 1)
		if bytes.Equal(bad, plain) {
			t.Fatalf("%q is not in it", r[0])
		}
		if _, err := backup.Read(bytes.NewReader(bad)); !errors.Is(err, backup.ErrDamaged) {
			t.Errorf("%q for %q: %v", r[1], r[0], err)
		}
	}
	later := bytes.Replace(plain, []byte(`"version": 1`), []byte(`"version": 9`), 1)
	if _, err := backup.Read(bytes.NewReader(later)); !errors.Is(err, backup.ErrVersion) {
		t.Errorf("a later version: %v", err)
	}
}

func TestPassphrase(t *testing.T) {
	if _, _, err := backup.Passphrase("short"); err == nil {
		t.Error("a short one is taken")
	}
	lock, key, err := backup.CheapPassphrase("correct horse")
	if err != nil {
		t.Fatal(err)
	}
	var b bytes.Buffer
	w, err := backup.Seal(&b, lock)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := backup.Open(bytes.NewReader(b.Bytes()), key); err != nil {
		t.Error(err)
	}
	_, wrong, err := backup.CheapPassphrase("wrong horse")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := backup.Open(bytes.NewReader(b.Bytes()), wrong); err == nil || errors.Is(err, backup.ErrDamaged) {
		t.Errorf("the wrong one: %v", err)
	}
}

func FuzzRead(f *testing.F) {
	plain := archive(f, keyspace(f))
	f.Add(plain)
	f.Add(plain[:len(plain)/2])
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, data []byte) {
		if c, err := backup.Read(bytes.NewReader(data)); err == nil {
			// What is taken can be written, and is the same.
			var b bytes.Buffer
			if err := backup.Write(&b, c.Manifest, c.Secrets, c.Store.Snapshot(), c.Counts); err != nil {
				t.Fatal(err)
			}
			if again, err := backup.Read(io.Reader(&b)); err != nil || again.Digest != c.Digest {
				t.Fatalf("%v", err)
			}
		}
	})
}
