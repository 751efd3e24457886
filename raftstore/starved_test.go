package raftstore_test

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"
)

var (
	starveQuota  = flag.Duration("starve-quota", 4*time.Millisecond, "how much processor time a member gets in each period")
	starvePeriod = flag.Duration("starve-period", time.Second, "period")
	starveFor    = flag.Duration("starve-for", 30*time.Second, "for")
	starveLoad   = flag.Duration("starve-every", 200*time.Millisecond, "pause between writes")
)

func TestStarved(t *testing.T) {
	p := startProcesses(t)
	began := p.term()
	for _, id := range p.ids {
		dir := filepath.Join("/sys/fs/cgroup/cpu", "raftstore-test-"+id)
		if err := os.Mkdir(dir, 0o755); err != nil && !os.IsExist(err) {
			t.Fatal(err)
		}
		t.Cleanup(func() { 
			time.Sleep(time.Second)
			os.Remove(dir) })
		for _, f := range [][2]string{{"cpu.cfs_period_us", strconv.Itoa(int(starvePeriod.Microseconds()))}, {"cpu.cfs_quota_us", strconv.Itoa(int(starveQuota.Microseconds()))}, {"cgroup.procs", strconv.Itoa(p.cmds[id].Process.Pid)}} {
			if err := os.WriteFile(filepath.Join(dir, f[0]), []byte(f[1]), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		t.Cleanup(func() { 
			os.WriteFile(filepath.Join(dir, "cpu.cfs_quota_us"), []byte("-1"), 0o644)
			})
	}
	r := rand.New(rand.NewPCG(1, 2))
	last, start, acks, tries := time.Now(), time.Now(), 0, 0
	var gap time.Duration
	for end := time.Now().Add(*starveFor); time.Now().Before(end); time.Sleep(*starveLoad) {
		tries++
		out, happened := p.try(r, registerInput{key: "/x", op: "put", value: fmt.Sprint(tries)})
		if g := time.Since(last); g > gap {
			gap = g
		}
		if happened && !out.unknown {
			acks++
			last = time.Now()
		} else {
			t.Logf("%.1f no ack: %v %v", time.Since(start).Seconds(), out, happened)
		}
	}
	for _, id := range p.ids {
		dir := filepath.Join("/sys/fs/cgroup/cpu", "raftstore-test-"+id)
		b, _ := os.ReadFile(filepath.Join(dir, "cpu.stat"))
		os.WriteFile(filepath.Join(dir, "cpu.cfs_quota_us"), []byte("-1"), 0o644)
		t.Logf("%s %s", id, b)
	}
	t.Logf("%d of %d acknowledged, longest gap %v; %d elections", acks, tries, gap, p.term()-began)
}
