package cluster

import (
	"net/netip"
	"os"
	"strings"
	"testing"
)

func TestClaimOn(t *testing.T) {
	me := owner{Pid: 10, Start: "100", Dir: "/tmp/mine"}
	demo := owner{Pid: 10, Start: "100", Dir: "/home/demo", Lasting: true}
	for _, tc := range []struct {
		name    string
		was, me owner
		alive   bool
		want    claim
	}{
		{"a killed test", owner{Pid: 9, Start: "90", Dir: "/tmp/a"}, me, false, takeOver},
		{"a test that runs", owner{Pid: 9, Start: "90", Dir: "/tmp/a"}, me, true, awaitOwner},
		{"this process's own", owner{Pid: 10, Start: "100", Dir: "/tmp/a"}, me, true, refuseClaim},
		{"a demo whose maker ended", owner{Pid: 9, Start: "90", Dir: "/home/demo", Lasting: true}, me, false, refuseClaim},
		{"a demo being made", owner{Pid: 9, Start: "90", Dir: "/home/demo", Lasting: true}, me, true, refuseClaim},
		{"another folder's demo", owner{Pid: 9, Start: "90", Dir: "/home/other", Lasting: true}, demo, false, refuseClaim},
		{"the same demo, killed half made", owner{Pid: 9, Start: "90", Dir: "/home/demo", Lasting: true}, demo, false, takeOver},
		{"a running test, asked by a demo", owner{Pid: 9, Start: "90", Dir: "/tmp/a"}, demo, true, refuseClaim},
	} {
		if got := claimOn(tc.was, tc.me, tc.alive); got != tc.want {
			t.Errorf("%s: %d, want %d", tc.name, got, tc.want)
		}
	}
}

func TestAlias(t *testing.T) {
	me, err := self(Config{Dir: "/tmp/c"})
	if err != nil {
		t.Fatal(err)
	}
	alias, err := me.alias()
	if err != nil {
		t.Fatal(err)
	}
	if got, ok := parseOwner(alias); !ok || got != me || !got.alive() {
		t.Errorf("%q is read as %+v", alias, got)
	}
	again := me
	again.Start = "1" // another process once had the pid
	if again.alive() || (owner{Pid: os.Getpid()}).alive() {
		t.Error("another process with this pid is taken for this one")
	}
	for _, alias := range []string{"", "uplink", aliasPrefix, aliasPrefix + `{"pid":0,"dir":"/"}`, aliasPrefix + `{"pid":7,"dir":"c"}`} {
		if o, ok := parseOwner(alias); ok {
			t.Errorf("%q is read as %+v", alias, o)
		}
	}
	if _, err := (owner{Dir: strings.Repeat("/long", 60)}).alias(); err == nil {
		t.Error("an alias that the kernel would refuse")
	}
}

func TestFarSubnet(t *testing.T) {
	for near, far := range map[string]string{"10.90.0.0/24": "10.90.1.0/24", "10.90.255.7/24": "10.91.0.0/24", "192.168.0.0/20": "192.168.16.0/20"} {
		if got := FarSubnet(netip.MustParsePrefix(near)); got.String() != far {
			t.Errorf("after %s comes %s, want %s", near, got, far)
		}
	}
}
