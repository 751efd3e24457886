package delta

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"
)

// status looks like an object whose times change.
func status(times ...string) []byte {
	var b strings.Builder
	b.WriteString("k8s\x00 Pod web-0 of the namespace default, labels app=web, owner ReplicaSet web-5d4f8c7b9")
	for i, t := range times {
		fmt.Fprintf(&b, " condition-%d=True reason=Fine message=all of it is well lastTransitionTime=%s;", i, t)
	}
	b.WriteString(" hostIP 10.0.0.7 podIP 10.244.3.19 qosClass BestEffort")
	return []byte(b.String())
}

func random(r *rand.Rand, n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}

func TestMake(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 1))
	large, sealed := random(r, 1<<20), random(r, 600)
	changed := bytes.Clone(large)
	changed[500_000]++
	for name, tc := range map[string]struct {
		base, target []byte
		most         int // of the patch; 0: none
	}{
		"the same":          {status("1", "2"), status("1", "2"), 6},
		"one region":        {status("11:12:13.000001", "2"), status("11:12:23.000007", "2"), 24},
		"several regions":   {status("11:12:13", "11:12:13", "11:12:13", "11:12:13"), status("11:12:23", "11:12:24", "11:12:25", "11:12:26"), 60},
		"another length":    {status("9", "9", "9"), status("10", "11", "12"), 50},
		"one more in front": {status("b", "c"), status("a", "b", "c"), 120},
		"order":             {append(status("a"), sealed...), append(bytes.Clone(sealed), status("a")...), 40},
		"one byte of many":  {large, changed, 16},
		"shorter":           {large, large[:1000], 16},
		"longer":            {large[:1000], large[:1100], 120},
		"nothing alike":     {sealed, random(r, 600), 0},
		"from nothing":      {nil, status("a"), 0},
		"to nothing":        {status("a"), nil, 0},
		"short":             {[]byte("abc"), []byte("abd"), 0},
	} {
		patch := Make(tc.base, tc.target)
		if (patch == nil) != (tc.most == 0) || len(patch) > max(tc.most, 0) {
			t.Errorf("%s: %d to %d bytes take a patch of %d, want at most %d: %x", name, len(tc.base), len(tc.target), len(patch), tc.most, patch)
		}
		if patch == nil {
			continue
		}
		got, err := Expand(tc.base, patch, len(tc.target))
		if err != nil || !bytes.Equal(got, tc.target) {
			t.Errorf("%s: %v, it came out different", name, err)
		}
		if !bytes.Equal(patch, Make(tc.base, tc.target)) {
			t.Errorf("%s: another patch the second time", name)
		}
	}
}

// edited is b with some regions changed, moved or gone.
func edited(r *rand.Rand, b []byte) []byte {
	b = bytes.Clone(b)
	for range r.IntN(6) {
		at := r.IntN(len(b) + 1)
		n := r.IntN(min(40, len(b)-at) + 1)
		switch r.IntN(3) {
		case 0:
			copy(b[at:at+n], random(r, n))
		case 1:
			b = append(b[:at:at], append(random(r, n), b[at:]...)...)
		default:
			b = append(b[:at:at], b[at+n:]...)
		}
	}
	return b
}

// Whatever was changed comes out again, and no patch that is cut or flipped makes
// more than its bounds.
func TestRandomEdits(t *testing.T) {
	for seed := range uint64(2000) {
		r := rand.New(rand.NewPCG(seed, 3))
		base := status(strings.Repeat("t", r.IntN(9)), "u", "v")
		if r.IntN(2) == 0 {
			base = random(r, r.IntN(3000))
		}
		target := edited(r, base)
		patch := Make(base, target)
		if patch == nil {
			continue
		}
		if got, err := Expand(base, patch, len(target)); err != nil || !bytes.Equal(got, target) {
			t.Fatalf("seed %d: %v\n%q\n%q", seed, err, got, target)
		}
		for i := range patch {
			bad := bytes.Clone(patch)
			bad[i] ^= 1 << r.IntN(8)
			_, _ = Expand(base, bad, len(target))
			if _, err := Expand(base, patch[:i], len(target)); !errors.Is(err, ErrPatch) {
				// A patch may be cut behind bytes to insert, if nothing is missing then.
				if got, _ := Expand(base, patch[:i], len(target)); !bytes.Equal(got, target) {
					t.Fatalf("seed %d, cut at %d: %v", seed, i, err)
				}
			}
		}
	}
}

func TestExpandRefuses(t *testing.T) {
	base := []byte("0123456789abcdef")
	for name, tc := range map[string]struct {
		patch []byte
		size  int
	}{
		"nothing":             {nil, 0},
		"negative size":       {[]byte{0}, -1},
		"more than the bound": {[]byte{0, 16, 0, 0, 16, 31, 0, 16, 31, 0}, 48},
		"short insertion":     {[]byte{3, 'a'}, 3},
		"long insertion":      {[]byte{2, 'a', 'b'}, 1},
		"copy without end":    {[]byte{0, 4, 0}, 4},
		"copy too long":       {[]byte{0, 17, 0, 0}, 17},
		"copy before base":    {[]byte{0, 4, 1, 0}, 4},
		"copy behind base":    {[]byte{0, 4, 26, 0}, 4},
		"far":                 {append([]byte{0, 4}, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1, 0), 4},
		"less than was said":  {[]byte{0, 4, 0, 0}, 5},
		"more than was said":  {[]byte{0, 4, 0, 0}, 3},
	} {
		if got, err := Expand(base, tc.patch, tc.size); !errors.Is(err, ErrPatch) {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
}

func FuzzExpand(f *testing.F) {
	base, target := status("11:12:13", "2", "3"), status("11:12:23", "2", "4")
	f.Add(base, Make(base, target), len(target))
	f.Add([]byte("0123456789"), []byte{1, 'a', 9, 2, 0}, 10)
	f.Fuzz(func(t *testing.T, base, patch []byte, size int) {
		got, err := Expand(base, patch, size)
		if err == nil && (len(got) != size || size > 2*len(base)+len(patch)) {
			t.Fatalf("%d bytes of %d and %d, %d were said", len(got), len(base), len(patch), size)
		}
	})
}

func FuzzMake(f *testing.F) {
	f.Add(status("11:12:13", "2", "3"), status("11:12:23", "2", "4"))
	f.Add([]byte("00000"), []byte("00000000"))
	f.Fuzz(func(t *testing.T, base, target []byte) {
		patch := Make(base, target)
		if patch == nil {
			return
		}
		if got, err := Expand(base, patch, len(target)); err != nil || !bytes.Equal(got, target) {
			t.Fatalf("%v: %q", err, got)
		}
	})
}

func BenchmarkMake(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	for name, tc := range map[string][2][]byte{
		"status": {status("11:12:13", "2", "3"), status("11:12:23", "2", "4")},
		"sealed": {random(r, 4096), random(r, 4096)},
	} {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				Make(tc[0], tc[1])
			}
		})
	}
}
