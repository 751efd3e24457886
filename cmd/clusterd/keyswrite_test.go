package main

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/cmd/clusterd/doctor"
	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/sealkey"
	"github.com/clusterd/clusterd/raftstore/backup"
	"github.com/clusterd/clusterd/raftstore/kubestore"
)

// giveKey gives the node a sealing key, and starts it.
func (n *sealedNode) giveKey() {
	n.t.Helper()
	made, err := sealkey.New()
	if err != nil {
		n.t.Fatal(err)
	}
	n.cfg.SealKey = n.t.TempDir() + "/key"
	if err := os.WriteFile(n.cfg.SealKey, made, 0o600); err != nil {
		n.t.Fatal(err)
	}
	if err := n.start(); err != nil {
		n.t.Fatal(err)
	}
}

// TestWriteLosesNoSealKeys: the file of keys for Secrets at rest is not replaced by who
// cannot read it, and loses no key unless that is asked for.
func TestWriteLosesNoSealKeys(t *testing.T) {
	n := newSealedNode(t)
	n.giveKey()
	key, err := kubestore.DeriveSealKey("key-2", []byte("another"))
	if err != nil {
		t.Fatal(err)
	}
	added := string(nodedir.SealLine(key))
	key.ID = "own" // with another secret
	d, bare := n.dir(), nodedir.KeyDir{Dir: nodedir.Dir(n.cfg.Data)}
	before, err := os.ReadFile(d.Path(nodedir.SealKeysFile))
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		what string
		dir  nodedir.KeyDir
		list string
		drop bool
		want string
	}{
		{"without the sealing key", bare, added, false, "--seal-key"},
		{"without the sealing key, --drop", bare, added, true, "--seal-key"},
		{"a key less", d, added, false, `"own"`},
		{"another secret", d, added + string(nodedir.SealLine(key)), false, `"own"`},
		{"two secrets of one id", d, string(n.seals) + string(nodedir.SealLine(key)), true, "own"},
	} {
		if err := c.dir.WriteSealKeys(strings.NewReader(c.list), c.drop); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: %v", c.what, err)
		}
		if after, err := os.ReadFile(d.Path(nodedir.SealKeysFile)); err != nil || !bytes.Equal(before, after) {
			t.Fatalf("%s: the file was changed: %q, %v", c.what, after, err)
		}
	}
	if _, err := bare.Show(nodedir.SealKeysFile); err == nil {
		t.Error("shown without the sealing key")
	}
	// Nor does a sealed node get its first one in clear.
	if err := os.Remove(d.Path(nodedir.SealKeysFile)); err != nil {
		t.Fatal(err)
	}
	if list, err := d.Show(nodedir.SealKeysFile); err != nil || len(list) > 0 {
		t.Errorf("no file: %q, %v", list, err)
	}
	if err := bare.WriteSealKeys(strings.NewReader(added), false); err == nil {
		t.Error("written in clear on a sealed node")
	}
	for _, c := range []struct {
		list, want string
		drop       bool
	}{
		{string(n.seals), string(n.seals), false},
		{string(n.seals) + added, string(n.seals) + added, false},
		{added + "# made by hand\n" + string(n.seals) + strings.TrimSpace(added), added + "# made by hand\n" + string(n.seals), false},
		{added, added, true},
	} {
		if err := d.WriteSealKeys(strings.NewReader(c.list), c.drop); err != nil {
			t.Errorf("%q: %v", c.list, err)
		}
		if got, err := d.ReadKey(d.Path(nodedir.SealKeysFile)); err != nil || string(got) != c.want {
			t.Errorf("%q became %q, %v", c.list, got, err)
		}
	}
}

// TestSealSettled: a file of keys that was put there in clear is taken up at once, and sealed once it
// is left alone; what replaces it meanwhile is taken up, too.
func TestSealSettled(t *testing.T) {
	n := newSealedNode(t)
	n.giveKey()
	d := n.dir()
	m := &Main{cfg: n.cfg, dir: d, id: n.id, log: slog.New(slog.DiscardHandler), resealNow: make(chan struct{}, 1), metrics: newMetrics()}
	if err := m.openSeal(); err != nil {
		t.Fatal(err)
	}
	put := func(list string, age time.Duration) {
		t.Helper()
		at := time.Now().Add(-age)
		if err := os.WriteFile(d.Path(nodedir.SealKeysFile), []byte(list), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(d.Path(nodedir.SealKeysFile), at, at); err != nil {
			t.Fatal(err)
		}
	}
	sealed := func() bool {
		t.Helper()
		b, err := os.ReadFile(d.Path(nodedir.SealKeysFile))
		if err != nil {
			t.Fatal(err)
		}
		return sealkey.Sealed(b)
	}
	key, err := kubestore.DeriveSealKey("key-2", []byte("another"))
	if err != nil {
		t.Fatal(err)
	}
	whole := string(nodedir.SealLine(key)) + string(n.seals)
	var w sealWatch
	now := time.Now()
	put(whole, 0)
	if !m.lookAtSeal(&w) {
		t.Fatal("not taken up")
	}
	if err := m.sealSettled(&w, now); err != nil || sealed() {
		t.Fatalf("sealed while it may still be written: %v", err)
	}
	put(whole[:len(whole)-9], time.Hour) // half of one
	if m.lookAtSeal(&w) {
		t.Fatal("half a list was taken up")
	}
	if err := m.sealSettled(&w, now); err != nil || sealed() {
		t.Fatalf("half a list was sealed: %v", err)
	}
	put(whole, time.Hour)
	if err := m.sealSettled(&w, now); err != nil || !sealed() {
		t.Fatalf("not sealed: %v", err)
	}
	if m.lookAtSeal(&w) {
		t.Error("a file that was only sealed was taken up as a new one")
	}
	// One that comes right after the sealing, before the next look.
	put(string(n.seals), time.Hour)
	if !m.lookAtSeal(&w) {
		t.Error("a file that came after the sealing was not taken up")
	}
	// What was checked is sealed, and nothing else.
	if changed, err := d.SealFile(d.Path(nodedir.SealKeysFile), []byte(whole)); err != nil || changed || sealed() {
		t.Errorf("another file than the one that was checked was sealed: %v", err)
	}
}

// TestFailedPrepareLeavesNoSealKeys: of a join or a restore that fails the cluster's keys do
// not stay, and those that were there before do.
func TestFailedPrepareLeavesNoSealKeys(t *testing.T) {
	key, err := kubestore.DeriveSealKey("mine", []byte("an administrator's"))
	if err != nil {
		t.Fatal(err)
	}
	mine := nodedir.SealLine(key)
	key.ID = "theirs"
	for _, had := range [][]byte{nil, mine} {
		cfg := defaultConfig()
		cfg.Name, cfg.Data, cfg.Advertise = "m1", t.TempDir(), "127.0.0.1"
		file := nodedir.Dir(cfg.Data).Path(nodedir.SealKeysFile)
		if had != nil {
			if err := os.WriteFile(file, had, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		fails := errors.New("it fails later")
		err := prepare(cfg, func(d nodedir.KeyDir) error {
			if err := d.AddSealKeys(nodedir.SealLine(key)); err != nil {
				t.Error(err)
			}
			return fails
		})
		if !errors.Is(err, fails) {
			t.Fatal(err)
		}
		if got, err := os.ReadFile(file); !bytes.Equal(got, had) || (err == nil) != (had != nil) {
			t.Errorf("of %q is left: %q, %v", had, got, err)
		}
	}
}

// TestAgentKeepsSealKeys: keys that an administrator puts on an agent, for it to become a
// server, stay there; those of a server that was demoted do not (TestDemotedKeepsNoKeys).
func TestAgentKeepsSealKeys(t *testing.T) {
	m, _ := sealingServer(t)
	if err := m.dir.DropServerState(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(m.dir.Path(nodedir.SealKeysFile)); err != nil {
		t.Error(err)
	}
}

// TestDerivedSeals: what follows from an authority and what does not is the same for the
// keys of a server and for a snapshot's check.
func TestDerivedSeals(t *testing.T) {
	now := time.Now()
	ca, err := pki.NewCA("c", now)
	if err != nil {
		t.Fatal(err)
	}
	next, err := ca.NewSuccessor(now)
	if err != nil {
		t.Fatal(err)
	}
	for _, ca := range []*pki.CA{ca, next} {
		if key, err := nodedir.SealKeyOf(ca); err != nil || !backup.DerivedSeal(key.ID) {
			t.Errorf("%q: derived %t, %v", key.ID, backup.DerivedSeal(key.ID), err)
		}
	}
	for _, own := range []string{"authority-1", "authority-of-mine", "authority2", "key-1"} {
		if backup.DerivedSeal(own) {
			t.Errorf("%q is an administrator's", own)
		}
	}
}

// TestExamineSwap: keys in memory are on a disk where the machine swaps to one.
func TestExamineSwap(t *testing.T) {
	bare, sealed := defaultConfig(), defaultConfig()
	sealed.SealKey = "/media/key/n1"
	for _, c := range []struct {
		cfg   Config
		swaps []string
		want  string
	}{
		{bare, []string{"/swap.img"}, ""}, {sealed, nil, ""}, {sealed, []string{"/dev/zram0"}, ""},
		{sealed, []string{"/dev/zram0", "/dev/sda2"}, "swaps to /dev/sda2:"},
	} {
		f := examineSwap(c.cfg, c.swaps)
		if found := len(f) == 1; found != (c.want != "") || found && (f[0].Level != doctor.Warning || f[0].Fix == "" || !strings.Contains(f[0].Says, c.want)) {
			t.Errorf("%q, sealing key %q: %+v", c.swaps, c.cfg.SealKey, f)
		}
	}
}
