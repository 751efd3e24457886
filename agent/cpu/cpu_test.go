package cpu

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/utils/cpuset"
)

// twoSockets has two memory nodes of four cores with two threads each, counted
// as Linux does on such machines: first all cores, then their siblings.
func twoSockets() Topology {
	t := Topology{}
	for id := range 16 {
		core := id % 8
		t[id] = CPU{ID: id, Core: core % 4, Socket: core / 4, Node: core / 4}
	}
	return t
}

func TestTake(t *testing.T) {
	for _, tt := range []struct {
		free string
		n    int
		want string
	}{
		{"0-15", 1, "0"},
		{"0-15", 2, "0,8"},       // a whole core
		{"0-15", 8, "0-3,8-11"},  // a whole socket
		{"1-15", 8, "4-7,12-15"}, // the socket that it fills
		{"0-7,9-15", 1, "0"},     // the core that is broken already
		{"1-15", 2, "1,9"},       // a whole core in the socket that it fills better
		{"1-15", 3, "1,8-9"},     // a whole core and what is left of a broken one
		{"0-15", 10, "0-4,8-12"}, // a socket and a core of the other
		{"3,5", 2, "3,5"},        // no choice
		{"0-15", 0, ""},
		{"0-15", 16, "0-15"},
	} {
		free, err := cpuset.Parse(tt.free)
		if err != nil {
			t.Fatal(err)
		}
		if got := take(twoSockets(), free, tt.n).String(); got != tt.want {
			t.Errorf("%d of %s: %s, want %s", tt.n, tt.free, got, tt.want)
		}
	}
}

func TestDiscover(t *testing.T) {
	root := t.TempDir()
	write := func(name, content string) {
		t.Helper()
		name = filepath.Join(root, "devices/system", name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(content+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	write("cpu/online", "0-2,5")
	for id, core := range map[int]int{0: 0, 1: 1, 2: 0, 5: -1} {
		write(fmt.Sprintf("cpu/cpu%d/topology/core_id", id), fmt.Sprint(core))
		write(fmt.Sprintf("cpu/cpu%d/topology/physical_package_id", id), fmt.Sprint(id/2))
	}
	write("node/node0/cpulist", "0-1")
	write("node/node1/cpulist", "2-7")
	write("node/node2/cpulist", "")
	got, err := Discover(root)
	if err != nil {
		t.Fatal(err)
	}
	want := Topology{0: {0, 0, 0, 0}, 1: {1, 1, 0, 0}, 2: {2, 0, 1, 1}, 5: {5, 0, 2, 1}}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if _, err := Discover("/sys"); err != nil {
		t.Errorf("this machine: %v", err)
	}
}

func TestManager(t *testing.T) {
	cfg := Config{Topology: twoSockets(), Reserved: cpuset.New(0, 8), File: filepath.Join(t.TempDir(), "cpus.json")}
	open := func() *Manager {
		t.Helper()
		m, err := New(cfg)
		if err != nil {
			t.Fatal(err)
		}
		return m
	}
	m := open()
	if err := m.Assign("a", map[string]int{"big": 4, "small": 1}); err != nil {
		t.Fatal(err)
	}
	if err := m.Assign("b", map[string]int{"main": 8}); err != nil {
		t.Fatal(err)
	}
	if err := m.Assign("c", map[string]int{"x": 1, "y": 1}); !errors.Is(err, ErrNotEnough) || !strings.Contains(err.Error(), "requested 2, free 1") {
		t.Fatalf("too many: %v", err)
	}
	for range 2 { // the second time from the file
		for _, tt := range []struct {
			uid, container, want string
			own                  bool
		}{
			{"a", "big", "1-2,9-10", true}, {"a", "small", "3", true}, {"b", "main", "4-7,12-15", true},
			{"a", "other", "0,8,11", false}, {"z", "any", "0,8,11", false},
		} {
			if got, own := m.Of(tt.uid, tt.container); got.String() != tt.want || own != tt.own {
				t.Errorf("%s/%s: %s %v, want %s %v", tt.uid, tt.container, got, own, tt.want, tt.own)
			}
		}
		m = open()
	}
	if err := m.Assign("a", map[string]int{"big": 2}); err != nil { // has them already
		t.Fatal(err)
	}
	if got, _ := m.Of("a", "big"); got.Size() != 4 {
		t.Errorf("a known pod was given others: %s", got)
	}
	if err := m.Release("a"); err != nil {
		t.Fatal(err)
	}
	if got, own := open().Of("a", "big"); own || got.String() != "0-3,8-11" {
		t.Errorf("after the release: %s %v", got, own)
	}

	// The policy is given up: everybody shares everything.
	cfg.Shared = true
	m = open()
	if err := m.Assign("d", map[string]int{"main": 2}); err != nil {
		t.Fatal(err)
	}
	for _, uid := range []string{"b", "d"} {
		if got, own := m.Of(uid, "main"); own || got.String() != "0-15" {
			t.Errorf("%s still has %s %v", uid, got, own)
		}
	}
	if _, err := os.Stat(cfg.File); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file stays: %v", err)
	}
}

func TestNewRefuses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "cpus.json")
	for _, tt := range []struct{ reserved, content, want string }{
		{"", "", "no processor is reserved"},
		{"99", "", "this machine has 0-15"},
		{"0", "{", "unexpected end"},
		{"0", `{"version":2}`, "version 2"},
		{"0", `{"version":1,"pods":{"u":{"c":"0-1"}}}`, "drain the node"},
		{"0", `{"version":1,"pods":{"u":{"c":"99"}}}`, "drain the node"},
		{"0", `{"version":1,"pods":{"u":{"c":"1"},"v":{"c":"1"}}}`, "drain the node"},
		{"0", `{"version":1,"pods":{"u":{"c":"x"}}}`, "container c"},
	} {
		_ = os.Remove(file)
		if tt.content != "" {
			if err := os.WriteFile(file, []byte(tt.content), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		reserved, err := cpuset.Parse(tt.reserved)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := New(Config{Topology: twoSockets(), Reserved: reserved, File: file}); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("reserved %q, file %s: %v", tt.reserved, tt.content, err)
		}
	}
}
