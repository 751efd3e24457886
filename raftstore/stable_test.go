package raftstore

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func openedStable(t testing.TB, dir string) *stable {
	t.Helper()
	s, repaired, err := openStable(dir)
	if err != nil || repaired != nil {
		t.Fatalf("open: %v, repaired: %v", err, repaired)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func TestStable(t *testing.T) {
	dir := t.TempDir()
	s := openedStable(t, dir)
	for _, key := range []string{keyTerm, keyVoteTerm} {
		if n, err := s.GetUint64([]byte(key)); n != 0 || err == nil || err.Error() != "not found" {
			t.Errorf("%s of a new one: %d, %v", key, n, err)
		}
	}
	if b, err := s.Get([]byte(keyVoteCand)); b != nil || err == nil || err.Error() != "not found" {
		t.Errorf("candidate of a new one: %q, %v", b, err)
	}
	for _, err := range []error{
		s.SetUint64([]byte(keyTerm), 7), s.SetUint64([]byte(keyVoteTerm), 6), s.Set([]byte(keyVoteCand), []byte("somebody")),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := s.Set([]byte("Else"), nil); err == nil {
		t.Error("took what it has no place for")
	}
	if err := s.Set([]byte(keyVoteCand), bytes.Repeat([]byte("x"), stableCand+1)); err == nil {
		t.Error("took an ID that is too long")
	}
	if _, _, err := openStable(dir); err == nil {
		t.Error("opened twice")
	}
	_ = s.Close()
	path := filepath.Join(dir, stableFile)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if len(whole) != stableCopies*stableSlot {
		t.Errorf("%d bytes", len(whole))
	}
	has := func(what string) {
		t.Helper()
		s, _, err := openStable(dir)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		defer func() { _ = s.Close() }()
		term, _ := s.GetUint64([]byte(keyTerm))
		vote, _ := s.GetUint64([]byte(keyVoteTerm))
		cand, _ := s.Get([]byte(keyVoteCand))
		if term != 7 || vote != 6 || string(cand) != "somebody" {
			t.Errorf("%s: term %d, vote %d for %q", what, term, vote, cand)
		}
		if now, err := os.ReadFile(path); err != nil || len(now) != len(whole) {
			t.Errorf("%s: not made good: %d bytes, %v", what, len(now), err)
		}
	}
	has("as it was")
	for at := range len(whole) {
		if at%stableSlot > 64 && at%97 != 0 {
			continue // zeros
		}
		bad := bytes.Clone(whole)
		bad[at] ^= 1
		if err := os.WriteFile(path, bad, 0o600); err != nil {
			t.Fatal(err)
		}
		has("one byte flipped")
	}
	for _, cut := range []int{stableSlot, stableSlot + 100} {
		if err := os.WriteFile(path, whole[:cut], 0o600); err != nil {
			t.Fatal(err)
		}
		has("cut off")
	}
	// Torn while the first copy was written: the second one is what raft knows.
	torn := bytes.Clone(whole)
	newer := (&stableRecord{seq: 99, term: 8}).encode()
	copy(torn, newer[:30])
	if err := os.WriteFile(path, torn, 0o600); err != nil {
		t.Fatal(err)
	}
	has("torn")
	bad := bytes.Clone(whole)
	bad[20] ^= 1
	bad[stableSlot+20] ^= 1
	if err := os.WriteFile(path, bad, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := openStable(dir); !errors.As(err, new(*DamageError)) {
		t.Errorf("both copies damaged: %v", err)
	}
}

func FuzzOpenStable(f *testing.F) {
	one := (&stableRecord{seq: 3, term: 7, voteTerm: 6, voteCand: []byte("somebody")}).encode()
	f.Add(append(bytes.Clone(one), one...))
	f.Add(one)
	f.Add([]byte(stableMagic))
	f.Fuzz(func(t *testing.T, data []byte) {
		dir := t.TempDir()
		if len(data) >= stableSlot { // else the checksum would hide the rest
			data = bytes.Clone(data)
			copy(data[12:16], uint32Bytes(checksum(data[stableHead:stableSlot])))
		}
		if err := os.WriteFile(filepath.Join(dir, stableFile), data, 0o600); err != nil {
			t.Fatal(err)
		}
		s, _, err := openStable(dir)
		if err != nil {
			return
		}
		was := s.rec
		_ = s.Close()
		s, repaired, err := openStable(dir)
		if err != nil || repaired != nil {
			t.Fatalf("not made good: %v, %v", err, repaired)
		}
		defer func() { _ = s.Close() }()
		if s.rec.term != was.term || s.rec.voteTerm != was.voteTerm || !bytes.Equal(s.rec.voteCand, was.voteCand) {
			t.Fatalf("%+v, was %+v", s.rec, was)
		}
	})
}

func uint32Bytes(n uint32) []byte { return []byte{byte(n), byte(n >> 8), byte(n >> 16), byte(n >> 24)} }

// A snapshot's description is JSON of raft's making, found on a disk.
func FuzzCheckSnapshot(f *testing.F) {
	f.Add([]byte(`{"Version":1,"ID":"2-9-1","Index":9,"Term":2,"Size":4}`), []byte("abcd"))
	f.Add([]byte(`{"Version":1,`), []byte("CLDRSNAP\x02\x00\x00\x00"))
	f.Fuzz(func(t *testing.T, meta, state []byte) {
		dir := filepath.Join(t.TempDir(), "2-9-1")
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		for name, b := range map[string][]byte{snapMeta: meta, snapState: state} {
			if err := os.WriteFile(filepath.Join(dir, name), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		_ = checkSnapshot(dir, 2, 9)
	})
}
