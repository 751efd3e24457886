package datadir

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/raftstore/logtest"
)

func openedStable(t testing.TB, dir string) *Stable {
	t.Helper()
	s, repaired, err := OpenStable(dir)
	if err != nil || repaired != nil {
		t.Fatalf("open: %v, repaired: %v", err, repaired)
	}
	t.Cleanup(func() { _ = s.Close() })
	return s
}

func TestStable(t *testing.T) {
	dir := logtest.MemDir(t)
	s := openedStable(t, dir)
	for _, key := range []string{KeyTerm, keyVoteTerm} {
		if n, err := s.GetUint64([]byte(key)); n != 0 || err == nil || err.Error() != "not found" {
			t.Errorf("%s of a new one: %d, %v", key, n, err)
		}
	}
	if b, err := s.Get([]byte(keyVoteCand)); b != nil || err == nil || err.Error() != "not found" {
		t.Errorf("candidate of a new one: %q, %v", b, err)
	}
	for _, err := range []error{
		s.SetUint64([]byte(KeyTerm), 7), s.SetUint64([]byte(keyVoteTerm), 6), s.Set([]byte(keyVoteCand), []byte("candidate")),
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
	if _, _, err := OpenStable(dir); err == nil {
		t.Error("opened twice")
	}
	_ = s.Close()
	var whole [2][]byte
	for i, name := range VoteFiles {
		whole[i] = fileOf(t, dir, name)
	}
	write := func(i int, b []byte) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, VoteFiles[i]), b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	has := func(what string, damaged bool) {
		t.Helper()
		s, repaired, err := OpenStable(dir)
		if err != nil {
			t.Fatalf("%s: %v", what, err)
		}
		defer func() { _ = s.Close() }()
		if repaired == nil && damaged {
			t.Errorf("%s: the damage was not reported", what)
		}
		term, _ := s.GetUint64([]byte(KeyTerm))
		vote, _ := s.GetUint64([]byte(keyVoteTerm))
		cand, _ := s.Get([]byte(keyVoteCand))
		if term != 7 || vote != 6 || string(cand) != "candidate" {
			t.Errorf("%s: term %d, vote %d for %q", what, term, vote, cand)
		}
		_ = s.Close()
		if s, repaired, err = OpenStable(dir); err != nil || repaired != nil {
			t.Fatalf("%s: not made good: %v, %v", what, repaired, err)
		}
		for _, name := range VoteFiles {
			if n := len(fileOf(t, dir, name)); n != stableRoom {
				t.Errorf("%s: %s has %d bytes", what, name, n)
			}
		}
	}
	has("as it was", false)
	for i := range VoteFiles {
		used := bytes.TrimRight(whole[i], "\x00")
		for at := 0; at < len(used); at += 97 {
			bad := bytes.Clone(whole[i])
			bad[at] ^= 1
			write(i, bad)
			has(fmt.Sprintf("byte %d of copy %d flipped", at, i), at < 2*4096 && at%4096 < 80)
		}
		for _, cut := range []int{0, 100, 4096, 8192, 3*4096 + 50} {
			write(i, whole[i][:cut])
			has(fmt.Sprintf("copy %d cut off at %d", i, cut), true)
		}
		if err := os.Remove(filepath.Join(dir, VoteFiles[i])); err != nil {
			t.Fatal(err)
		}
		has("gone", true)
	}
	for i := range VoteFiles {
		write(i, spoiled(whole[i]))
	}
	if _, _, err := OpenStable(dir); !errors.As(err, new(*DamageError)) {
		t.Errorf("both copies damaged: %v", err)
	}
}

// spoiled changes every record in the file, old ones included.
func spoiled(b []byte) []byte {
	b = bytes.Clone(b)
	for at := 0; ; at++ {
		i := bytes.Index(b[at:], []byte(stableMagic))
		if i < 0 {
			return b
		}
		at += i
		b[at+20] ^= 1
	}
}

func fileOf(t testing.TB, dir, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(dir, name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Of two copies the newer one counts: a crash came between their writes.
func TestStableBehind(t *testing.T) {
	dir := logtest.MemDir(t)
	s := openedStable(t, dir)
	for term := range uint64(20) {
		if err := s.SetUint64([]byte(KeyTerm), term+1); err != nil {
			t.Fatal(err)
		}
		before := fileOf(t, dir, VoteFiles[1])
		if err := errors.Join(s.SetUint64([]byte(keyVoteTerm), term+1), s.Set([]byte(keyVoteCand), []byte("x"))); err != nil {
			t.Fatal(err)
		}
		_ = s.Close()
		if err := os.WriteFile(filepath.Join(dir, VoteFiles[1]), before, 0o600); err != nil {
			t.Fatal(err)
		}
		s = openedStable(t, dir)
		if n, _ := s.GetUint64([]byte(keyVoteTerm)); n != term+1 {
			t.Fatalf("the vote of term %d is one of %d", term+1, n)
		}
	}
}

// Half a vote is none: raft says the term first and then the candidate.
func TestStableHalfVote(t *testing.T) {
	dir := logtest.MemDir(t)
	s := openedStable(t, dir)
	if err := errors.Join(s.SetUint64([]byte(keyVoteTerm), 3), s.Set([]byte(keyVoteCand), []byte("a")), s.SetUint64([]byte(keyVoteTerm), 4)); err != nil {
		t.Fatal(err)
	}
	_ = s.Close()
	s = openedStable(t, dir)
	n, _ := s.GetUint64([]byte(keyVoteTerm))
	cand, _ := s.Get([]byte(keyVoteCand))
	if n != 3 || string(cand) != "a" {
		t.Errorf("after a crash in the middle of a vote: term %d for %q", n, cand)
	}
}

// A full disk stops no election: thousands of votes take no more room than the
// first one.
func TestStableNeedsNoRoom(t *testing.T) {
	dir := logtest.MemDir(t)
	s := openedStable(t, dir)
	room := func() (n int64) {
		for _, name := range VoteFiles {
			var st unix.Stat_t
			if err := unix.Stat(filepath.Join(dir, name), &st); err != nil {
				t.Fatal(err)
			}
			n += st.Blocks*512 + st.Size
		}
		return n
	}
	before := room()
	for i := range uint64(2000) {
		term := i + 1
		cand := bytes.Repeat([]byte("x"), int(i%stableCand))
		if err := errors.Join(s.SetUint64([]byte(KeyTerm), term), s.SetUint64([]byte(keyVoteTerm), term), s.Set([]byte(keyVoteCand), cand)); err != nil {
			t.Fatal(err)
		}
	}
	if after := room(); after != before {
		t.Errorf("it took %d bytes, and takes %d", before, after)
	}
}

// A file of version 1, with both of its copies or one, becomes the databases,
// also when that is interrupted.
func TestStableVersion1(t *testing.T) {
	record := func(seq, term uint64) []byte {
		r := stableRecord{seq: seq, term: term, voteTerm: 6, voteCand: []byte("candidate")}
		b := append(r.encode(), make([]byte, stableSlotV1)...)[:stableSlotV1]
		b[8] = 1
		copy(b[12:16], uint32Bytes(Checksum(b[stableHead:])))
		return b
	}
	for name, file := range map[string][]byte{
		"whole":  append(record(5, 7), record(5, 7)...),
		"behind": append(record(5, 7), record(4, 6)...),
		"torn":   append(make([]byte, stableSlotV1), record(5, 7)...),
	} {
		for interrupted := range 2 {
			dir := t.TempDir()
			path := filepath.Join(dir, VoteFileV1)
			if err := os.WriteFile(path, file, 0o600); err != nil {
				t.Fatal(err)
			}
			s := openedStable(t, dir)
			for range interrupted {
				_ = s.Close()
				if err := os.WriteFile(path, file, 0o600); err != nil { // it was not removed
					t.Fatal(err)
				}
				_ = os.Remove(filepath.Join(dir, VoteFiles[1]))
				s = openedStable(t, dir)
			}
			term, _ := s.GetUint64([]byte(KeyTerm))
			cand, _ := s.Get([]byte(keyVoteCand))
			if term != 7 || string(cand) != "candidate" {
				t.Errorf("%s: term %d, vote for %q", name, term, cand)
			}
			if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s: the old file is still there: %v", name, err)
			}
		}
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, VoteFileV1), make([]byte, 2*stableSlotV1), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := OpenStable(dir); !errors.As(err, new(*DamageError)) {
		t.Errorf("an old file that is damaged: %v", err)
	}
}

func FuzzDecodeStable(f *testing.F) {
	one := (&stableRecord{seq: 3, term: 7, voteTerm: 6, voteCand: []byte("candidate")}).encode()
	f.Add(one)
	f.Add([]byte(stableMagic))
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) >= stableHead { // else the checksum would hide the rest
			data = bytes.Clone(data)
			copy(data[12:16], uint32Bytes(Checksum(data[stableHead:])))
		}
		r, err := decodeStable(data)
		if err != nil {
			return
		}
		again, err := decodeStable(r.encode())
		if err != nil || again.seq != r.seq || again.term != r.term || again.voteTerm != r.voteTerm || !bytes.Equal(again.voteCand, r.voteCand) {
			t.Fatalf("%+v, was %+v (%v)", again, r, err)
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
