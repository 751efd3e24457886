package doctor

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"
)

// Machine is what was seen of a machine. Zero values mean "not seen" where the
// comment says so; such checks are left out or said to be open.
type Machine struct {
	Root    bool
	Name    string // the node's name to be
	Addr    netip.AddrPort
	Member  bool // the data directory holds a node
	Running bool // a clusterd runs on the data directory: its ports are taken, rightly
	// Release is the kernel's.
	Release string
	// Missing are the kernel's features that were tried and failed, each with
	// the error; nil map: nothing could be tried, for lack of root.
	Missing map[string]error
	// Encrypted: the node is to encrypt what its pods send to other nodes.
	Encrypted bool
	// CgroupV2 is set when version 2 is alone; else Controllers are version 1's
	// or of both.
	CgroupV2    bool
	Controllers []string
	// Memory of the machine and what is free of it now, in bytes.
	Memory, MemoryFree uint64
	// Folder is the data directory's disk.
	Folder Folder
	// Taken are ports of this node's that others use.
	Taken []Port
	// Local are the machine's own addresses, with their networks.
	Local []netip.Prefix
	// Ranges are the cluster's: pods and Services.
	Ranges map[string][]netip.Prefix
	// Now and Past: the clock, and a moment that has passed for certain; zero: none is known.
	Now, Past time.Time
	// Synced tells whether the kernel's clock is kept by NTP or the like.
	Synced bool
	// Hooks are the packet filter's chains that drop what no rule accepts.
	Hooks []Hook
	// Firewalls are services that run one: ufw, firewalld.
	Firewalls []string
	// InotifyInstances is fs.inotify.max_user_instances; 0: not seen.
	InotifyInstances int
	// Tracked connections, and how many the kernel has room for; 0: it tracks none.
	Tracked, TrackedMost int
	// Server is one of the cluster to be joined; nil: none was named.
	Server *Server
}

// Folder is where the node keeps its state.
type Folder struct {
	Path string
	Type string // of the file system: "ext4", "tmpfs", …
	Free uint64 // bytes
	// Sync is the median of writing a page and waiting until the disk has it; 0:
	// not measured, with Err.
	Sync time.Duration
	Err  error
}

// Port is one that the node listens on.
type Port struct {
	Network string // tcp or udp
	Addr    netip.AddrPort
	Flag    string // sets it; "": none does
}

// Hook is a base chain of the packet filter whose policy is to drop.
type Hook struct {
	Name string // "inet filter input": family, table, chain
	Hook string // "input", "forward"
}

// Server is a member that a joining machine asks.
type Server struct {
	Addr string
	Err  error // it did not answer
	// Ahead is how far its clock is ahead of ours; its answer has whole seconds.
	Ahead time.Duration
}

// Bounds of what is good enough.
const (
	leastMemory   = 700 << 20 // a node uses some 350 MB without pods
	leastFree     = 1 << 30
	littleFree    = 5 << 30
	slowSync      = 25 * time.Millisecond
	badSync       = 200 * time.Millisecond // elections come after about a second of silence
	mostSkew      = 30 * time.Second
	leastInotify  = 512
	oldestRelease = "5.8"
)

// controllers of cgroups that pods' limits need.
var controllers = []string{"cpu", "cpuset", "memory", "pids"}

// JudgeMachine says what a machine lacks.
func JudgeMachine(m Machine) []Finding {
	var f findings
	if !m.Root {
		f.problem("root", "run it with sudo", "this is not root: a node makes namespaces, mounts and cgroups, and half of the checks need it too")
	}
	m.kernel(&f)
	m.cgroups(&f)
	m.memory(&f)
	m.disk(&f)
	m.address(&f)
	m.ports(&f)
	m.firewall(&f)
	m.clock(&f)
	if m.InotifyInstances > 0 && m.InotifyInstances < leastInotify {
		f.warn("inotify", fmt.Sprintf("sysctl -w fs.inotify.max_user_instances=%d, and the same in /etc/sysctl.d/", 8192),
			"fs.inotify.max_user_instances is %d: programs in some tens of pods use it up and fail with \"too many open files\"", m.InotifyInstances)
	}
	m.tracked(&f)
	if s := m.Server; s != nil {
		s.judge(&f)
	}
	return f
}

// cures of kernel features by name.
var cures = map[string]string{
	"overlay":  "modprobe overlay, or use a kernel with CONFIG_OVERLAY_FS",
	"veth":     "modprobe veth, or use a kernel with CONFIG_VETH",
	"bridge":   "modprobe bridge, or use a kernel with CONFIG_BRIDGE",
	"nftables": "modprobe nf_tables nft_chain_nat nft_ct nft_masq, or use a kernel with CONFIG_NF_TABLES",
	// What holds pods to their own addresses; without it none starts.
	"nftables for bridges": "modprobe nf_tables_bridge nft_meta_bridge, or use a kernel with CONFIG_NF_TABLES_BRIDGE",
	"vxlan":                "modprobe vxlan, or use a kernel with CONFIG_VXLAN",
	"wireguard":            "modprobe wireguard, or use a kernel with CONFIG_WIREGUARD",
	"namespaces":           "use a kernel with network, PID, mount, UTS and IPC namespaces; in a container, run a privileged one",
}

func (m Machine) kernel(f *findings) {
	if older(m.Release, oldestRelease) {
		f.problem("kernel", "install a newer kernel; Debian 12 and Ubuntu 22.04 have one", "Linux %s is older than %s", m.Release, oldestRelease)
	} else {
		f.ok("kernel", "Linux %s", m.Release)
	}
	if m.Missing == nil {
		return
	}
	var bad []string
	for name := range m.Missing {
		bad = append(bad, name)
	}
	slices.Sort(bad)
	for _, name := range bad {
		if name == "wireguard" && !m.Encrypted {
			f.ok("kernel", "there is no WireGuard, which --pod-encryption wireguard would need: %v", m.Missing[name])
			continue
		}
		if name == "vxlan" {
			f.warn("kernel", cures[name], "vxlan cannot be used: %v; pods of nodes behind a router will be out of reach", m.Missing[name])
			continue
		}
		f.problem("kernel", cures[name], "%s cannot be used: %v", name, m.Missing[name])
	}
	if others := slices.DeleteFunc(bad, func(name string) bool { return name == "wireguard" }); len(others) == 0 {
		f.ok("kernel", "network namespaces, veth, bridge, VXLAN, nftables and overlay work")
	}
}

func (m Machine) cgroups(f *findings) {
	kind := "version 1, or both versions"
	if m.CgroupV2 {
		kind = "version 2"
	}
	var lacks []string
	for _, c := range controllers {
		if !slices.Contains(m.Controllers, c) {
			lacks = append(lacks, c)
		}
	}
	switch {
	case len(lacks) > 0:
		f.problem("cgroups", "boot with cgroup_enable="+strings.Join(lacks, ",")+" (on a Raspberry Pi: cgroup_enable=memory cgroup_memory=1 in cmdline.txt)",
			"%s, without %s: pods cannot be limited", kind, strings.Join(lacks, ", "))
	case !m.CgroupV2:
		f.warn("cgroups", "boot with systemd.unified_cgroup_hierarchy=1", "%s: it works, but memory.high, I/O limits and OOM handling by group need version 2 alone", kind)
	default:
		f.ok("cgroups", "%s with %s", kind, strings.Join(controllers, ", "))
	}
}

func (m Machine) memory(f *findings) {
	switch mib := m.Memory >> 20; {
	case m.Memory == 0:
		f.warn("memory", "look at /proc/meminfo", "its size could not be read")
	case m.Memory < leastMemory:
		f.problem("memory", "give the machine 1 GiB or more", "%d MiB: a node uses some 350 MiB before its first pod", mib)
	case !m.Running && m.MemoryFree < leastMemory/2:
		f.warn("memory", "end what else runs here, or give the machine more", "%d MiB, but only %d MiB are free", mib, m.MemoryFree>>20)
	default:
		f.ok("memory", "%d MiB, %d MiB free", mib, m.MemoryFree>>20)
	}
}

// remote are file systems that a store must not lie on.
var remote = []string{"nfs", "nfs4", "cifs", "smb2", "9p", "fuse", "ceph"}

func (m Machine) disk(f *findings) {
	d := m.Folder
	switch {
	case d.Err != nil:
		f.problem("disk", "name a folder that can be written with --data", "%s: %v", d.Path, d.Err)
		return
	case d.Type == "tmpfs":
		f.problem("disk", "put --data on a disk", "%s is in memory: a restart loses this machine's part of the store", d.Path)
	case slices.Contains(remote, d.Type):
		f.problem("disk", "put --data on a disk of this machine", "%s is on %s: locks and syncs there are not what a store needs", d.Path, d.Type)
	}
	switch {
	case d.Free < leastFree:
		f.problem("disk", "free some, or name another folder with --data", "%d MiB are free at %s", d.Free>>20, d.Path)
	case d.Free < littleFree:
		f.warn("disk", "free some: images and logs need room", "%d MiB are free at %s", d.Free>>20, d.Path)
	default:
		f.ok("disk", "%d GiB are free at %s (%s)", d.Free>>30, d.Path, d.Type)
	}
	took := d.Sync.Round(10 * time.Microsecond)
	switch {
	case d.Sync == 0:
	case d.Sync >= badSync:
		f.problem("disk sync", "use a disk of its own, or an SSD, for --data", "a write takes %s to be on the disk: leaders will be voted out for being slow", took)
	case d.Sync >= slowSync:
		f.warn("disk sync", "use an SSD for --data where many objects change", "a write takes %s to be on the disk, and so does every change of the cluster", took)
	default:
		f.ok("disk sync", "a write takes %s to be on the disk", took)
	}
}

func (m Machine) address(f *findings) {
	a := m.Addr.Addr()
	owns := slices.ContainsFunc(m.Local, func(p netip.Prefix) bool { return p.Addr() == a })
	switch {
	case !owns:
		f.problem("address", "give an address of this machine with --advertise; `ip address` lists them", "%s is on no interface of this machine", a)
	case a.IsLoopback():
		f.warn("address", "connect the machine to a network, or give --advertise", "%s: no other machine can reach it; a cluster of one works", a)
	default:
		f.ok("address", "%s, as node %s", a, m.Name)
	}
	if m.Running || m.Member {
		return // the cluster's own addresses are among the machine's, also while clusterd is stopped
	}
	for what, ranges := range m.Ranges {
		for _, r := range ranges {
			if i := slices.IndexFunc(m.Local, r.Overlaps); i >= 0 {
				f.problem("address", "begin the cluster with another range: clusterd init --cluster-cidr … --service-cidr …", "this machine's network %s overlaps the range of %s, %s", m.Local[i].Masked(), what, r)
			}
		}
	}
}

func (m Machine) ports(f *findings) {
	switch {
	case m.Running:
		f.ok("ports", "clusterd runs and has them")
	case len(m.Taken) > 0:
		var taken, flags []string
		for _, p := range m.Taken {
			taken = append(taken, fmt.Sprintf("%s %d", p.Network, p.Addr.Port()))
			if p.Flag != "" && !slices.Contains(flags, p.Flag) {
				flags = append(flags, p.Flag)
			}
		}
		cure := "end who listens there (ss -lntup tells)"
		if len(flags) > 0 {
			cure += ", or give another " + strings.Join(flags, ", ")
		}
		f.problem("ports", cure, "in use: %s", strings.Join(taken, ", "))
	default:
		f.ok("ports", "those that this node listens on are free")
	}
}

func (m Machine) firewall(f *findings) {
	port := m.Addr.Port()
	allow := fmt.Sprintf("let %d/tcp and %d/udp in from the other machines", port, port)
	for _, name := range m.Firewalls {
		how := map[string]string{
			"ufw":       fmt.Sprintf("ufw allow %d", port) + m.eachPods("; ufw route allow from "),
			"firewalld": fmt.Sprintf("firewall-cmd --permanent --add-port=%d/tcp --add-port=%d/udp; firewall-cmd --permanent --zone=trusted%s; firewall-cmd --reload", port, port, m.eachPods(" --add-source=")),
		}[name]
		f.warn("firewall", how, "%s is active: without rules for the cluster it keeps the other machines and the pods out", name)
	}
	if len(m.Firewalls) > 0 {
		return // the chains are theirs
	}
	for _, h := range m.Hooks {
		switch h.Hook {
		case "input":
			f.warn("firewall", allow, "chain %s drops what it does not know", h.Name)
		case "forward":
			f.warn("firewall", fmt.Sprintf("accept what is forwarded from and to %s (with Docker: in its chain DOCKER-USER)", strings.Join(texts(m.Ranges["pods"]), " and ")), "chain %s drops what it does not know: pods of different machines may not reach each other", h.Name)
		}
	}
	if len(m.Hooks) == 0 {
		f.ok("firewall", "none is seen on this machine")
	}
}

// tracked judges the kernel's table of connections: when it is full, packets of new
// ones are dropped without a word but the kernel's.
func (m Machine) tracked(f *findings) {
	if m.TrackedMost == 0 {
		return
	}
	share := 100 * m.Tracked / m.TrackedMost
	cure := fmt.Sprintf("find who opens so many (conntrack -L, or ss -s in the pods); or sysctl -w net.netfilter.nf_conntrack_max=%d, and the same in /etc/sysctl.d/ (some 300 bytes each)", 2*m.TrackedMost)
	switch {
	case share >= 95:
		f.problem("conntrack", cure, "%d of %d connections are tracked: further ones are refused or take the place of others", m.Tracked, m.TrackedMost)
	case share >= 75:
		f.warn("conntrack", cure, "%d of %d connections are tracked: when it is full, further ones are refused", m.Tracked, m.TrackedMost)
	}
}

func (m Machine) clock(f *findings) {
	switch {
	case !m.Past.IsZero() && m.Now.Before(m.Past):
		f.problem("clock", "set the clock (timedatectl set-time), and run chrony or systemd-timesyncd", "it is %s here, which is before %s (two days before this clusterd was built): certificates are not valid yet", m.Now.UTC().Format(time.RFC3339), m.Past.UTC().Format(time.RFC3339))
	case !m.Synced:
		f.warn("clock", "apt-get install chrony, or timedatectl set-ntp true", "nothing keeps the clock: certificates and history go by it")
	default:
		f.ok("clock", "kept in time")
	}
}

func (s Server) judge(f *findings) {
	cure := "see that clusterd runs there, that its port is open for TCP and UDP, and that the address is the one `clusterd init` printed"
	switch {
	case s.Err != nil:
		f.problem("server", cure, "%s does not answer: %v", s.Addr, s.Err)
	case s.Ahead.Abs() > mostSkew:
		f.problem("server", "set both clocks; run chrony or systemd-timesyncd on each", "its clock differs from this one by %s", s.Ahead.Abs().Round(time.Second))
	default:
		f.ok("server", "%s answers, and its clock agrees", s.Addr)
	}
}

// older compares the first two numbers of kernel releases.
func older(release, than string) bool {
	var a, b [2]int
	if n, _ := fmt.Sscanf(release, "%d.%d", &a[0], &a[1]); n != 2 {
		return false // not to be read: nothing is said
	}
	fmt.Sscanf(than, "%d.%d", &b[0], &b[1])
	return slices.Compare(a[:], b[:]) < 0
}

// eachPods is every range of the pods with the words before it.
func (m Machine) eachPods(before string) string {
	var b strings.Builder
	for _, text := range texts(m.Ranges["pods"]) {
		b.WriteString(before + text)
	}
	return b.String()
}

func texts(ranges []netip.Prefix) (out []string) {
	for _, r := range ranges {
		out = append(out, r.String())
	}
	return out
}
