package main

import (
	"os"
	"slices"
	"strings"
	"testing"
	"time"
)

// TestQuiet: memory is given back when collections have ceased, and whenever there is
// much again; pages of the program with it, and once a minute.
func TestQuiet(t *testing.T) {
	const much = spareAtLeast
	var q quiet
	began := time.Now()
	for _, tt := range []struct {
		at              int // seconds
		cycles          uint64
		spare           uint64
		memory, program bool
	}{
		{0, 5, much, false, false}, {5, 7, much, false, false}, {20, 8, much, false, false}, // a start
		{35, 8, much, false, false}, {40, 8, 0, true, true}, {45, 8, much, false, false}, // what it left goes in any case
		{60, 8, much - 1, false, false}, {95, 8, much - 1, false, false}, {100, 8, much - 1, false, true},
		{110, 8, much, true, true}, {115, 8, much, false, false},
		{170, 9, 0, false, false}, {175, 9, 0, false, false}, {190, 9, much - 1, false, true}, // one collection at rest
		{195, 9, much, true, true}, {200, 20, much, false, false}, {220, 20, much, true, true}, {225, 20, much, false, false},
	} {
		memory, program := q.due(began.Add(time.Duration(tt.at)*time.Second), heap{tt.cycles, tt.spare})
		if memory != tt.memory || program != tt.program {
			t.Errorf("after %d s: memory %t, program %t", tt.at, memory, program)
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
