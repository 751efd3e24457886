package doctor

import (
	"bufio"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/lb"
	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/nft"
)

// Ask says what to look at.
type Ask struct {
	Name    string
	Addr    netip.AddrPort
	Data    string
	Member  bool
	Running bool
	Ranges  map[string][]netip.Prefix
	Past    time.Time // a moment that has passed for certain
	Server  string    // HOST:PORT of a member; "": none
	Ports   []Port    // that the node will listen on
	// Encrypted: see Machine.
	Encrypted bool
}

// Look gathers what is seen of this machine. It changes nothing that stays: what
// it tries of the kernel it tries in a network namespace that it removes.
func Look(ctx context.Context, a Ask) Machine {
	m := Machine{
		Root: os.Geteuid() == 0, Name: a.Name, Addr: a.Addr, Member: a.Member, Running: a.Running,
		Ranges: a.Ranges, Encrypted: a.Encrypted, Now: time.Now(), Past: a.Past, Local: localAddrs(), Synced: synced(),
	}
	m.Release = release()
	m.CgroupV2, m.Controllers = cgroups("/sys/fs/cgroup", "/proc/cgroups")
	m.Memory, m.MemoryFree = memory()
	m.Folder = look(a.Data)
	if !m.Running {
		m.Taken = taken(a.Ports)
	}
	m.Firewalls = firewalls()
	if n, err := strconv.Atoi(firstLine("/proc/sys/fs/inotify/max_user_instances")); err == nil {
		m.InotifyInstances = n
	}
	if used, most, err := lb.Tracked(); err == nil {
		m.Tracked, m.TrackedMost = used, most
	}
	if m.Root {
		m.Missing = try()
		if hooks, err := nft.Dropping(); err == nil {
			for _, h := range hooks {
				m.Hooks = append(m.Hooks, Hook{Name: h.Name, Hook: h.Hook})
			}
		}
	}
	if a.Server != "" {
		s := ask(ctx, a.Server)
		m.Server = &s
	}
	return m
}

func release() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}

// cgroups tells whether version 2 is alone, and the controllers there are.
func cgroups(root, list string) (v2 bool, controllers []string) {
	if b, err := os.ReadFile(filepath.Join(root, "cgroup.controllers")); err == nil {
		return true, strings.Fields(string(b))
	}
	b, err := os.ReadFile(list)
	if err != nil {
		return false, nil
	}
	for line := range strings.Lines(string(b)) {
		if f := strings.Fields(line); len(f) == 4 && f[3] == "1" && !strings.HasPrefix(line, "#") {
			controllers = append(controllers, f[0])
		}
	}
	return false, controllers
}

func memory() (total, free uint64) {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0, 0
	}
	defer func() { _ = f.Close() }()
	for s := bufio.NewScanner(f); s.Scan(); {
		name, rest, _ := strings.Cut(s.Text(), ":")
		kib, _ := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
		switch name {
		case "MemTotal":
			total = kib << 10
		case "MemAvailable":
			free = kib << 10
		}
	}
	return total, free
}

// types are file systems by their magic numbers, where it matters.
var types = map[int64]string{
	unix.TMPFS_MAGIC: "tmpfs", unix.NFS_SUPER_MAGIC: "nfs", unix.V9FS_MAGIC: "9p", unix.FUSE_SUPER_MAGIC: "fuse", unix.CEPH_SUPER_MAGIC: "ceph",
	unix.SMB2_SUPER_MAGIC: "cifs", unix.EXT4_SUPER_MAGIC: "ext4", unix.XFS_SUPER_MAGIC: "xfs", unix.BTRFS_SUPER_MAGIC: "btrfs", unix.OVERLAYFS_SUPER_MAGIC: "overlay",
}

// syncs is how often the disk is asked to sync; the median counts.
const syncs = 15

// look measures the disk of the data directory, or of the nearest one above it
// that is there.
func look(path string) Folder {
	f := Folder{Path: path}
	there := path
	for there != "/" {
		if st, err := os.Stat(there); err == nil && st.IsDir() {
			break
		}
		there = filepath.Dir(there)
	}
	var st unix.Statfs_t
	if f.Err = unix.Statfs(there, &st); f.Err != nil {
		return f
	}
	f.Free = st.Bavail * uint64(st.Bsize)
	if f.Type = types[int64(st.Type)]; f.Type == "" {
		f.Type = fmt.Sprintf("file system %#x", st.Type)
	}
	if os.Geteuid() == 0 {
		f.Sync, f.Err = measureSync(there)
	}
	return f
}

func measureSync(folder string) (time.Duration, error) {
	file, err := os.CreateTemp(folder, ".clusterd-doctor-*")
	if err != nil {
		return 0, err
	}
	defer func() { _ = file.Close(); _ = os.Remove(file.Name()) }()
	var took []time.Duration
	page := make([]byte, 4096)
	for range syncs {
		began := time.Now()
		if _, err := file.Write(page); err != nil {
			return 0, err
		}
		if err := unix.Fdatasync(int(file.Fd())); err != nil {
			return 0, err
		}
		took = append(took, time.Since(began))
	}
	slices.Sort(took)
	return took[len(took)/2], nil
}

func localAddrs() (all []netip.Prefix) {
	addrs, err := net.InterfaceAddrs()
	if err != nil {
		return nil
	}
	for _, a := range addrs {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			all = append(all, netip.PrefixFrom(p.Addr().Unmap(), p.Bits()))
		}
	}
	return all
}

// taken are those of the ports that somebody else has.
func taken(ports []Port) (all []Port) {
	for _, p := range ports {
		var c io.Closer
		var err error
		if p.Network == "udp" {
			c, err = net.ListenPacket(p.Network, p.Addr.String())
		} else {
			c, err = net.Listen(p.Network, p.Addr.String())
		}
		if err == nil {
			_ = c.Close()
		} else if inUse(err) {
			all = append(all, p)
		}
	}
	return all
}

// inUse: that the address is not this machine's is another finding.
func inUse(err error) bool { return strings.Contains(err.Error(), unix.EADDRINUSE.Error()) }

// synced asks the kernel whether something keeps its clock.
func synced() bool {
	var t unix.Timex
	state, err := unix.Adjtimex(&t)
	return err == nil && state != unix.TIME_ERROR
}

// firewalls are the services that are known to manage one, and active.
func firewalls() (all []string) {
	if b, err := os.ReadFile("/etc/ufw/ufw.conf"); err == nil {
		for line := range strings.Lines(string(b)) {
			if strings.EqualFold(strings.TrimSpace(line), "ENABLED=yes") {
				all = append(all, "ufw")
			}
		}
	}
	if _, err := os.Stat("/run/firewalld"); err == nil {
		all = append(all, "firewalld")
	}
	return all
}

// try uses what a node will use of the kernel, and removes it again. The
// kernel loads the modules it needs and has.
func try() map[string]error {
	missing := map[string]error{}
	note := func(name string, err error) {
		if err != nil {
			missing[name] = err
		}
	}
	note("overlay", hasFileSystem("overlay"))
	dir, err := os.MkdirTemp("", "clusterd-doctor-")
	if err != nil {
		note("namespaces", err)
		return missing
	}
	defer func() { _ = os.RemoveAll(dir) }() // nothing is mounted there any more, or it fails
	spaces, err := netns.Open(dir)
	if err != nil {
		note("namespaces", err)
		return missing
	}
	path, err := spaces.Create("try")
	if err != nil {
		note("namespaces", err)
		return missing
	}
	err = netns.Do(path, func() error {
		note("bridge", netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "try0"}}))
		note("veth", netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "try1"}, PeerName: "try2"}))
		note("nftables", tryTables())
		note("nftables for bridges", tryBridgeTable())
		note("vxlan", netlink.LinkAdd(&netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "try3"}, VxlanId: 1, Port: 8473}))
		note("wireguard", netlink.LinkAdd(&netlink.Wireguard{LinkAttrs: netlink.LinkAttrs{Name: "try4"}}))
		return nil
	})
	note("namespaces", err)
	note("namespaces", spaces.Delete("try"))
	return missing
}

// tryTables makes a table with the chains that Services need.
func tryTables() error {
	t, err := nft.OpenTables()
	if err != nil {
		return err
	}
	defer func() { _ = t.Close() }()
	return t.Replace(nft.Table{Name: "clusterd-doctor", Chains: []nft.Chain{
		{Name: "dnat", Type: "nat", Hook: "prerouting", Priority: -100},
		{Name: "snat", Type: "nat", Hook: "postrouting", Priority: 100},
		{Name: "forward", Type: "filter", Hook: "forward"},
	}})
}

// tryBridgeTable makes a table as the one that holds pods to their addresses.
func tryBridgeTable() error {
	t, err := nft.OpenTables()
	if err != nil {
		return err
	}
	defer func() { _ = t.Close() }()
	return t.Replace(nft.Table{Name: "clusterd-doctor", Family: nft.Bridge, Chains: []nft.Chain{
		{Name: "ports", Type: "filter", Hook: "prerouting", Priority: -300},
	}})
}

// hasFileSystem: it is known to the kernel, or a module of it could be loaded.
func hasFileSystem(name string) error {
	known := func() bool {
		b, err := os.ReadFile("/proc/filesystems")
		return err == nil && slices.Contains(strings.Fields(string(b)), name)
	}
	if known() {
		return nil
	}
	// Asking for the file system makes the kernel load its module.
	err := unix.Mount("none", "/proc/self/fd", name, 0, "")
	if known() {
		return nil
	}
	return fmt.Errorf("mount %s: %w", name, err)
}

// ask reaches a member's API without a login: what counts is that it answers,
// and its clock. Who it is, the join token says later.
func ask(ctx context.Context, addr string) Server {
	s := Server{Addr: addr}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+addr+"/version", nil)
	if err != nil {
		s.Err = err
		return s
	}
	client := http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		s.Err = err
		return s
	}
	_ = resp.Body.Close()
	if date, err := http.ParseTime(resp.Header.Get("Date")); err == nil {
		s.Ahead = time.Until(date)
	}
	return s
}

func firstLine(path string) string {
	b, err := os.ReadFile(path)
	if err != nil {
		return ""
	}
	line, _, _ := strings.Cut(string(b), "\n")
	return strings.TrimSpace(line)
}
