package doctor

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/netsetup/netnstest"
)

var noon = time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)

// well is a machine that lacks nothing.
func well() Machine {
	return Machine{
		Root: true, Name: "n1", Addr: netip.MustParseAddrPort("192.0.2.7:6443"), Release: "6.1.0-18-amd64", Missing: map[string]error{},
		CgroupV2: true, Controllers: []string{"cpuset", "cpu", "io", "memory", "pids"}, Memory: 2 << 30, MemoryFree: 1 << 30,
		Folder: Folder{Path: "/var/lib/clusterd", Type: "ext4", Free: 50 << 30, Sync: time.Millisecond},
		Local:  []netip.Prefix{netip.MustParsePrefix("127.0.0.1/8"), netip.MustParsePrefix("192.0.2.7/24")},
		Ranges: map[string][]netip.Prefix{"pods": {netip.MustParsePrefix("10.244.0.0/14")}, "Services": {netip.MustParsePrefix("10.96.0.0/16")}},
		Now:    noon, Past: noon.Add(-time.Hour), Synced: true, InotifyInstances: 8192,
	}
}

func TestJudgeMachine(t *testing.T) {
	if bad := ills(JudgeMachine(well())); bad != "" {
		t.Fatalf("a good machine: %s", bad)
	}
	for _, test := range []struct {
		name   string
		change func(*Machine)
		want   string // level and check of what is found, and words of it
	}{
		{"not root", func(m *Machine) { m.Root, m.Missing = false, nil }, "problem root: not root"},
		{"old kernel", func(m *Machine) { m.Release = "4.19.0-26-amd64" }, "problem kernel: older than 5.8"},
		{"newer by two digits", func(m *Machine) { m.Release = "5.15.0" }, ""},
		{"odd kernel", func(m *Machine) { m.Release = "custom" }, ""},
		{"no nftables", func(m *Machine) { m.Missing["nftables"] = errors.New("protocol not supported") }, "problem kernel: nftables cannot be used: protocol not supported → modprobe nf_tables"},
		{"no nftables for bridges", func(m *Machine) { m.Missing["nftables for bridges"] = errors.New("operation not supported") }, "problem kernel: nftables for bridges cannot be used: operation not supported → modprobe nf_tables_bridge"},
		{"no vxlan", func(m *Machine) { m.Missing["vxlan"] = errors.New("operation not supported") }, "warning kernel: vxlan cannot be used: operation not supported; pods of nodes behind a router"},
		{"no wireguard, not asked for", func(m *Machine) { m.Missing["wireguard"] = errors.New("operation not supported") }, ""},
		{"no wireguard", func(m *Machine) {
			m.Missing["wireguard"], m.Encrypted = errors.New("operation not supported"), true
		}, "problem kernel: wireguard cannot be used: operation not supported → modprobe wireguard"},
		{"no memory controller", func(m *Machine) { m.Controllers = []string{"cpu", "cpuset", "pids"} }, "problem cgroups: without memory → boot with cgroup_enable=memory"},
		{"cgroup v1", func(m *Machine) { m.CgroupV2 = false }, "warning cgroups: version 1"},
		{"small", func(m *Machine) { m.Memory = 512 << 20 }, "problem memory: 512 MiB"},
		{"full", func(m *Machine) { m.MemoryFree = 100 << 20 }, "warning memory: only 100 MiB are free"},
		{"full, of the node itself", func(m *Machine) { m.MemoryFree, m.Running = 100<<20, true }, ""},
		{"memory unknown", func(m *Machine) { m.Memory = 0 }, "warning memory: could not be read"},
		{"no such disk", func(m *Machine) { m.Folder.Err = errors.New("read-only file system") }, "problem disk: read-only"},
		{"in memory", func(m *Machine) { m.Folder.Type = "tmpfs" }, "problem disk: is in memory"},
		{"elsewhere", func(m *Machine) { m.Folder.Type = "nfs" }, "problem disk: on a disk of this machine"},
		{"disk full", func(m *Machine) { m.Folder.Free = 100 << 20 }, "problem disk: 100 MiB are free"},
		{"disk nearly full", func(m *Machine) { m.Folder.Free = 2 << 30 }, "warning disk: 2048 MiB"},
		{"slow disk", func(m *Machine) { m.Folder.Sync = 40 * time.Millisecond }, "warning disk sync: takes 40ms"},
		{"very slow disk", func(m *Machine) { m.Folder.Sync = time.Second }, "problem disk sync: takes 1s"},
		{"not measured", func(m *Machine) { m.Folder.Sync = 0 }, ""},
		{"foreign address", func(m *Machine) { m.Addr = netip.MustParseAddrPort("192.0.2.8:6443") }, "problem address: on no interface"},
		{"loopback", func(m *Machine) { m.Addr = netip.MustParseAddrPort("127.0.0.1:6443") }, "warning address: no other machine"},
		{"overlap", func(m *Machine) { m.Local = append(m.Local, netip.MustParsePrefix("10.96.3.1/24")) }, "problem address: 10.96.3.0/24 overlaps the range of Services, 10.96.0.0/16"},
		{"overlap with the cluster's own", func(m *Machine) { m.Local, m.Running = append(m.Local, netip.MustParsePrefix("10.244.0.1/24")), true }, ""},
		{"port taken", func(m *Machine) { m.Taken = []Port{{"tcp", m.Addr, "--port"}, {"udp", m.Addr, "--port"}} }, "problem ports: tcp 6443, udp → --port"},
		{"kubelet's port taken", func(m *Machine) {
			m.Taken = []Port{{"tcp", netip.AddrPortFrom(m.Addr.Addr(), 10250), "--kubelet-port"}}
		}, "problem ports: tcp 10250 → --kubelet-port"},
		{"a member's own network", func(m *Machine) { m.Member, m.Local = true, append(m.Local, netip.MustParsePrefix("10.244.3.1/24")) }, ""},
		{"port taken by itself", func(m *Machine) { m.Taken, m.Running = []Port{{"tcp", m.Addr, "--port"}}, true }, ""},
		{"ufw", func(m *Machine) { m.Firewalls = []string{"ufw"}; m.Hooks = []Hook{{"ip filter INPUT", "input"}} }, "warning firewall: ufw is active → ufw allow 6443"},
		{"firewalld", func(m *Machine) { m.Firewalls = []string{"firewalld"} }, "warning firewall: → firewall-cmd --permanent --add-port=6443/tcp"},
		{"input drops", func(m *Machine) { m.Hooks = []Hook{{"inet filter input", "input"}} }, "warning firewall: inet filter input drops → let 6443/tcp and 6443/udp in"},
		{"Docker", func(m *Machine) { m.Hooks = []Hook{{"ip filter FORWARD", "forward"}} }, "warning firewall: ip filter FORWARD → 10.244.0.0/14 DOCKER-USER"},
		{"clock of 1970", func(m *Machine) { m.Now = time.Unix(0, 0) }, "problem clock: 1970-01-01"},
		{"clock runs free", func(m *Machine) { m.Synced = false }, "warning clock: nothing keeps the clock"},
		{"inotify", func(m *Machine) { m.InotifyInstances = 128 }, "warning inotify: is 128"},
		{"connections", func(m *Machine) { m.Tracked, m.TrackedMost = 100_000, 262_144 }, ""},
		{"many connections", func(m *Machine) { m.Tracked, m.TrackedMost = 200_000, 262_144 }, "warning conntrack: 200000 of 262144 → nf_conntrack_max=524288"},
		{"no room for connections", func(m *Machine) { m.Tracked, m.TrackedMost = 262_100, 262_144 }, "problem conntrack: 262100 of 262144 → nf_conntrack_max=524288"},
		{"server away", func(m *Machine) { m.Server = &Server{Addr: "192.0.2.1:6443", Err: errors.New("connection refused")} }, "problem server: 192.0.2.1:6443 does not answer: connection refused"},
		{"server's clock", func(m *Machine) { m.Server = &Server{Addr: "a", Ahead: -time.Hour} }, "problem server: differs from this one by 1h0m0s"},
		{"server well", func(m *Machine) { m.Server = &Server{Addr: "a", Ahead: 2 * time.Second} }, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			m := well()
			test.change(&m)
			check(t, JudgeMachine(m), test.want)
		})
	}
}

// ills are the findings that are not ok, one after the other.
func ills(all []Finding) string {
	var texts []string
	for _, f := range all {
		if f.Level != OK {
			texts = append(texts, fmt.Sprintf("%s %s: %s → %s", f.Level, f.Check, f.Says, f.Fix))
		}
	}
	return strings.Join(texts, "\n")
}

// check wants exactly one ill finding, of the level and check that want begins
// with, that has all its words; none for "".
func check(t *testing.T, all []Finding, want string) {
	t.Helper()
	got := ills(all)
	if want == "" || got == "" {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
		return
	}
	head, words, _ := strings.Cut(want, ":")
	if strings.Contains(got, "\n") || !strings.HasPrefix(got, head+":") {
		t.Fatalf("got %q, want %q", got, want)
	}
	for _, word := range strings.Fields(words) {
		if !strings.Contains(got, word) {
			t.Fatalf("got %q, want %q", got, want)
		}
	}
	for _, f := range all {
		if f.Level != OK && f.Fix == "" {
			t.Errorf("no cure: %+v", f)
		}
	}
}

// healthy is a cluster that lacks nothing.
func healthy() Cluster {
	c := Cluster{Now: noon, Expires: noon.Add(20 * time.Hour), Members: v1.MemberList{Leader: "n1"}}
	for _, name := range []string{"n1", "n2", "n3"} {
		c.Members.Members = append(c.Members.Members, v1.Member{Name: name, Role: v1.RoleVoter, Gossip: "alive", Lag: ptr.To[uint64](0)})
		c.Nodes = append(c.Nodes, corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: name}, Status: corev1.NodeStatus{Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}}})
	}
	c.Store.Quota, c.Store.Keyspace.Bytes = 8<<30, 1<<20
	return c
}

func TestJudgeCluster(t *testing.T) {
	if bad := ills(JudgeCluster(healthy())); bad != "" {
		t.Fatalf("a good cluster: %s", bad)
	}
	for _, test := range []struct {
		name   string
		change func(*Cluster)
		want   string
	}{
		{"no answer", func(c *Cluster) { *c = Cluster{Err: errors.New("connection refused")} }, "problem API: connection refused → journalctl"},
		{"no leader", func(c *Cluster) { c.Members.Leader = "" }, "problem quorum: no leader"},
		{"agent silent", func(c *Cluster) {
			c.Members.Members = append(c.Members.Members, v1.Member{Name: "w1", Role: v1.RoleAgent, Gossip: "silent"})
		}, "warning members: w1 (silent)"},
		{"one voter for many", func(c *Cluster) {
			for i := range 2 {
				c.Members.Members[i+1].Role = v1.RoleNonvoter
			}
		}, "warning quorum: one voter → clusterctl members voters 3"},
		{"far behind", func(c *Cluster) { c.Members.Members[2].Lag = ptr.To[uint64](1 << 20) }, "warning members: n3 by 1048576 entries"},
		{"warned", func(c *Cluster) {
			c.Members.Warnings = []string{"n4 joins"}
			c.Store.Warnings = c.Members.Warnings
		}, "warning members: n4 joins"},
		{"stores differ", func(c *Cluster) { c.Store.Warnings = []string{"the stores of n1 and n2 differ"} }, "problem store: n1 and n2 differ"},
		{"store full", func(c *Cluster) {
			c.Store.Reserve = 512 << 20
			c.Store.Keyspace.Bytes = c.Store.Quota - c.Store.Reserve
		}, "problem store: 100 % of what its quota leaves"},
		{"store nearly full", func(c *Cluster) { c.Store.Keyspace.Bytes = c.Store.Quota * 96 / 100 }, "problem store: 96 % of its quota"},
		{"store nearly full", func(c *Cluster) { c.Store.Keyspace.Bytes = 7 << 30 }, "warning store: 88 %"},
		{"disk short", func(c *Cluster) { c.Store.DiskShort, c.Store.DiskFree = true, 10<<20 }, "problem store: only 10 MiB"},
		{"node not ready", func(c *Cluster) {
			c.Nodes[1].Status.Conditions[0] = corev1.NodeCondition{Type: corev1.NodeReady, Status: corev1.ConditionFalse, Message: "no disk"}
		}, "problem nodes: n2 is not Ready: no disk"},
		{"node says nothing", func(c *Cluster) { c.Nodes[1].Status.Conditions = nil }, "problem nodes: n2 is not Ready: it does not say why"},
		{"pressure", func(c *Cluster) {
			c.Nodes[0].Status.Conditions = append(c.Nodes[0].Status.Conditions, corev1.NodeCondition{Type: corev1.NodeDiskPressure, Status: corev1.ConditionTrue, Message: "full"})
		}, "warning nodes: n1 has DiskPressure: full → clusterctl drain n1"},
		{"certificate ends", func(c *Cluster) { c.Expires = noon.Add(3 * time.Hour) }, "warning cert: ends in 3h"},
		{"certificate ended", func(c *Cluster) { c.Expires = noon.Add(-time.Hour) }, "problem cert: ended"},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := healthy()
			test.change(&c)
			check(t, JudgeCluster(c), test.want)
		})
	}
	lost := healthy()
	lost.Members.Members[1].Gossip, lost.Members.Members[2].Gossip = "dead", "left"
	if got := ills(JudgeCluster(lost)); !strings.Contains(got, "problem quorum: 1 of 3 voters are alive and 2 are needed") || !strings.Contains(got, "clusterctl recover") || !strings.Contains(got, "not here: n2 (dead), n3 (left)") {
		t.Errorf("quorum lost: %s", got)
	}
	silent := healthy()
	for i := range 2 {
		silent.Nodes[i].Status.Conditions[0].Status = corev1.ConditionUnknown
	}
	if got := ills(JudgeCluster(silent)); !strings.Contains(got, "problem nodes: 2 of 3 nodes are lost, more than half: their pods are not evicted and not replaced → bring them back; delete Nodes") {
		t.Errorf("most nodes lost: %s", got)
	}
	near := healthy()
	near.Members.Members[1].Gossip = "dead"
	if got := ills(JudgeCluster(near)); !strings.Contains(got, "warning quorum: 2 of 3 voters are alive: one more lost stops the cluster") {
		t.Errorf("quorum near its end: %s", got)
	}
}

func TestPrint(t *testing.T) {
	var out bytes.Buffer
	Print(&out, "This machine:", []Finding{{"memory", OK, "enough", ""}, {"clock", Warning, "runs\nfree", "chrony"}})
	want := `This machine:
  ok       memory     enough
  WARNING  clock      runs free
                      → chrony
`
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", out.String(), want)
	}
}

func TestCgroups(t *testing.T) {
	root := t.TempDir()
	list := filepath.Join(root, "cgroups")
	if err := os.WriteFile(list, []byte("#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t1\t1\t1\nmemory\t0\t1\t0\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if v2, got := cgroups(root, list); v2 || fmt.Sprint(got) != "[cpu]" {
		t.Errorf("version 1: %v %v", v2, got)
	}
	if err := os.WriteFile(filepath.Join(root, "cgroup.controllers"), []byte("cpu memory pids\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if v2, got := cgroups(root, list); !v2 || fmt.Sprint(got) != "[cpu memory pids]" {
		t.Errorf("version 2: %v %v", v2, got)
	}
}

// TestRootLook looks at the machine that the tests run on, where a node works:
// what is tried of the kernel passes, and nothing of it is left.
func TestRootLook(t *testing.T) {
	netnstest.NeedRoot(t)
	before, err := filepath.Glob(filepath.Join(os.TempDir(), "clusterd-doctor-*"))
	if err != nil {
		t.Fatal(err)
	}
	data := t.TempDir()
	m := Look(t.Context(), Ask{Name: "n1", Addr: netip.MustParseAddrPort("127.0.0.1:6443"), Data: filepath.Join(data, "not", "there")})
	for name, err := range m.Missing {
		if name != "wireguard" || m.Encrypted { // few need it
			t.Errorf("missing: %s: %v", name, err)
		}
	}
	if m.Missing == nil {
		t.Error("the kernel was not tried")
	}
	if m.Memory == 0 || m.MemoryFree == 0 || m.Folder.Free == 0 || m.Folder.Sync == 0 || m.Release == "" || len(m.Controllers) == 0 || len(m.Local) == 0 {
		t.Errorf("not seen: %+v", m)
	}
	for _, f := range JudgeMachine(m) {
		if f.Check == "kernel" && f.Level != OK {
			t.Errorf("%+v", f)
		}
	}
	after, err := filepath.Glob(filepath.Join(os.TempDir(), "clusterd-doctor-*"))
	if err != nil || len(after) != len(before) {
		t.Errorf("left behind: %q (%v)", after, err)
	}
	if left, err := os.ReadDir(data); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v (%v)", left, err)
	}
}
