package datadir

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"io"
	"math/rand/v2"
	"os"
	"testing"

	"github.com/clusterd/clusterd/raftstore/wire"
)

func packedOf(t testing.TB, data []byte, step int) []byte {
	t.Helper()
	var out bytes.Buffer
	p, err := newPacker(&out)
	if err != nil {
		t.Fatal(err)
	}
	for rest := data; len(rest) > 0; {
		n := min(step, len(rest))
		if m, err := p.Write(rest[:n]); m != n || err != nil {
			t.Fatal(m, err)
		}
		rest = rest[n:]
	}
	if err := p.finish(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// unpack reads all of a packed file, and says what was wrong with it.
func unpack(file []byte) ([]byte, error) {
	packed, holds, err := isPacked(bytes.NewReader(file), int64(len(file)))
	if err != nil || !packed {
		return nil, errors.Join(err, map[bool]error{false: wire.ErrCorrupt}[packed])
	}
	checked := checkPacked(bytes.NewReader(file))
	u, err := newUnpacker(io.NopCloser(bytes.NewReader(file)))
	if err != nil {
		return nil, err
	}
	got, err := io.ReadAll(u)
	if closing := u.Close(); closing != nil {
		return nil, closing
	}
	switch {
	case err != nil:
		return nil, err
	case checked != nil:
		return nil, checked
	case int64(len(got)) != holds:
		return nil, wire.ErrCorrupt
	}
	return got, nil
}

var rewrite = flag.Bool("update", false, "rewrite the golden file of the present version")

// TestPackedGolden: what a version before packed can be read. (What is packed now
// may look different: that is the compressor's business.)
func TestPackedGolden(t *testing.T) {
	const name = "testdata/packed-v1.bin"
	want := bytes.Repeat([]byte("objects of the API, more than a block of them\n"), blockBytes/30)
	if *rewrite {
		if err := os.WriteFile(name, packedOf(t, want, 1000), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	file, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := unpack(file); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes of %d: %v", len(got), len(want), err)
	}
}

func TestPack(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	text := bytes.Repeat([]byte("the same words over and over. "), 60_000)
	noise := make([]byte, 1<<20)
	for i := range noise {
		noise[i] = byte(r.Uint32())
	}
	for name, data := range map[string][]byte{
		"nothing": {}, "a byte": {7}, "a block": text[:blockBytes], "more": text, "noise": noise,
	} {
		for _, step := range []int{100, 70_000, 3 << 20} {
			file := packedOf(t, data, step)
			got, err := unpack(file)
			if err != nil || !bytes.Equal(got, data) {
				t.Errorf("%s in steps of %d: %d bytes of %d, %v", name, step, len(got), len(data), err)
			}
			if name == "more" && len(file) > len(data)/20 {
				t.Errorf("%d bytes of text take %d", len(data), len(file))
			}
			if name == "noise" && len(file) > len(data)+1000 {
				t.Errorf("%d bytes of noise take %d", len(data), len(file))
			}
		}
	}
}

// Every byte that is wrong or missing is noticed.
func TestPackDamage(t *testing.T) {
	good := packedOf(t, []byte("what a snapshot holds"), 100)
	for i := range good {
		bad := bytes.Clone(good)
		bad[i] ^= 0x10
		if _, err := unpack(bad); !errors.Is(err, wire.ErrCorrupt) && !errors.Is(err, wire.ErrVersion) {
			t.Errorf("byte %d flipped: %v", i, err)
		}
		if _, err := unpack(good[:i]); !errors.Is(err, wire.ErrCorrupt) {
			t.Errorf("cut at %d: %v", i, err)
		}
	}
	if _, err := unpack(append(bytes.Clone(good), 0)); err == nil {
		t.Error("a byte too many was not noticed")
	}
}

// What is not read to its end leaves nothing running.
func TestUnpackStops(t *testing.T) {
	file := packedOf(t, make([]byte, 20*blockBytes), 1<<20)
	u, err := newUnpacker(io.NopCloser(bytes.NewReader(file)))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(u, make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	if err := u.Close(); err != nil { // waits
		t.Fatal(err)
	}
}

func FuzzUnpack(f *testing.F) {
	f.Add([]byte("CLDRPACK"))
	f.Add(packedOf(f, []byte("what a snapshot holds"), 100))
	f.Add(packedOf(f, nil, 1))
	f.Fuzz(func(t *testing.T, file []byte) {
		// Repair the checksums of the blocks.
		for at := packHead; at+blockHead <= len(file); {
			n := int(binary.LittleEndian.Uint32(file[at+4:]))
			if n < 0 || n > len(file)-at-blockHead {
				break
			}
			binary.LittleEndian.PutUint32(file[at+8:], blockSum(file[at:at+blockHead+n]))
			at += blockHead + n
		}
		data, err := unpack(file)
		if err != nil {
			return
		}
		if again, err := unpack(packedOf(t, data, 1<<20)); err != nil || !bytes.Equal(again, data) {
			t.Fatal(err)
		}
	})
}
