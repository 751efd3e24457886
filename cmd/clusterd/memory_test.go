package main

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestQuiet: memory is given back when collections have ceased, and whenever there is
// much again.
func TestQuiet(t *testing.T) {
	const much = spareAtLeast
	var q quiet
	began := time.Now()
	for _, tt := range []struct {
		at     int // seconds
		cycles uint64
		spare  uint64
		due    bool
	}{
		{0, 5, much, false}, {5, 7, much, false}, {20, 8, much, false}, // a start
		{35, 8, much, false}, {40, 8, much, true}, {45, 8, much, false}, {60, 8, much - 1, false}, {100, 8, much, true}, {105, 8, much, false},
		{130, 9, much, false}, {150, 9, much - 1, false}, {155, 9, much, false}, // one at rest, that left little
		{160, 20, much, false}, {180, 20, much, true}, {185, 20, much, false},
	} {
		if got := q.due(began.Add(time.Duration(tt.at)*time.Second), heap{tt.cycles, tt.spare}); got != tt.due {
			t.Errorf("after %d s: %t", tt.at, got)
		}
	}
	var little quiet
	for at, want := range []bool{false, true, false, false} { // a start that left little; later there has to be much
		if got := little.due(began.Add(time.Duration(at)*quietFor), heap{uint64(at / 2), much - 1}); got != want {
			t.Errorf("with little, at %d: %t", at, got)
		}
	}
	if h := readHeap(); h.spare == 0 {
		t.Errorf("the runtime says %+v", h)
	}
}

// TestFileMappings: only what can be read from the file again is taken out.
func TestFileMappings(t *testing.T) {
	const smaps = `00400000-0350a000 r-xp 00000000 fe:00 12                 /usr/bin/clusterd
Size:              50216 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me
0350a000-07572000 r--p 0310a000 fe:00 12                 /usr/bin/clusterd
Anonymous:             8 kB
07572000-07600000 r--p 0410a000 fe:00 12                 /usr/bin/clusterd
Anonymous:             0 kB
07600000-07700000 rw-p 0510a000 fe:00 12                 /usr/bin/clusterd
Anonymous:             0 kB
07700000-07800000 r--p 00000000 fe:00 13                 /usr/bin/clusterd (deleted)
Anonymous:             0 kB
c000000000-c004000000 rw-p 00000000 00:00 0
Anonymous:             0 kB
`
	want := []mapping{{0x400000, 0x350a000}, {0x7572000, 0x7600000}}
	if got := fileMappings(smaps, "/usr/bin/clusterd"); !slices.Equal(got, want) {
		t.Errorf("%x", got)
	}
	if got := fileMappings(smaps, "/usr/bin/clusterd (deleted)"); !slices.Equal(got, []mapping{{0x7700000, 0x7800000}}) {
		t.Errorf("a program that was replaced: %x", got)
	}
}

// TestUnmapProgram: this test's own program runs on without the pages that it does
// not use.
func TestUnmapProgram(t *testing.T) {
	exe, err := os.Readlink("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	smaps, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	if len(fileMappings(string(smaps), exe)) == 0 {
		t.Fatalf("%s is mapped nowhere:\n%s", exe, smaps)
	}
	before := residentFile(t)
	if err := unmapProgram(); err != nil {
		t.Fatal(err)
	}
	if after := residentFile(t); after == before {
		t.Errorf("RssFile is %s as before", after)
	}
}

func residentFile(t *testing.T) string {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, found := strings.Cut(string(status), "RssFile:")
	if !found {
		t.Skip("this kernel does not say it")
	}
	size, _, _ := strings.Cut(strings.TrimSpace(rest), "\n")
	return size
}
