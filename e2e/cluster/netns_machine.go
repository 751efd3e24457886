package cluster

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/sysctl"
)

// makeBridge makes the switch that joins the machines. The kernel takes no
// alias with the request that makes an interface, so the bridge gets its name
// only after it has the alias: under its name it is never without an owner.
func (c *Netns) makeBridge(alias string) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = fmt.Sprintf("cdnew-%d", os.Getpid())
	bridge := &netlink.Bridge{LinkAttrs: attrs}
	if err := removeLink(attrs.Name); err != nil { // of a killed process with this pid
		return err
	}
	err := func() error {
		if err := netlink.LinkAdd(bridge); err != nil {
			return err
		}
		if err := netlink.LinkSetAlias(bridge, alias); err != nil {
			return err
		}
		return netlink.LinkSetName(bridge, c.state.Bridge)
	}()
	if err == nil {
		return nil
	}
	if errors.Is(err, unix.EEXIST) {
		err = ErrTaken
	}
	return errors.Join(fmt.Errorf("make bridge %s: %w", c.state.Bridge, err), removeLink(attrs.Name))
}

// addressBridge puts the host on the bridge.
func (c *Netns) addressBridge(host netip.Addr) error {
	bridge, err := netlink.LinkByName(c.state.Bridge)
	if err != nil {
		return err
	}
	if err := netlink.AddrAdd(bridge, atOnce(c.onSubnet(host))); err != nil {
		return fmt.Errorf("give bridge %s the address %s: %w", c.state.Bridge, host, err)
	}
	return netlink.LinkSetUp(bridge)
}

// removeIfEmpty removes a directory unless something is in it.
func removeIfEmpty(dir string) error {
	if err := os.Remove(dir); err != nil && !errors.Is(err, unix.ENOTEMPTY) {
		return err
	}
	return nil
}

// removeLink deletes an interface; one that is gone is no error.
func removeLink(name string) error {
	var notFound netlink.LinkNotFoundError
	link, err := netlink.LinkByName(name)
	if errors.As(err, &notFound) {
		return nil
	}
	if err == nil {
		err = netlink.LinkDel(link)
	}
	if err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("remove interface %s: %w", name, err)
	}
	return nil
}

// cable is the host's end of a machine's line.
func (c *Netns) cable(n Node) string { return fmt.Sprintf("%.10s-%s", c.state.Bridge, n.Name) }

// makeMachine makes a network namespace and lays its line to the bridge.
func (c *Netns) makeMachine(n Node) error {
	path, err := c.ns.Create(n.Name)
	if err != nil {
		return err
	}
	bridge, err := netlink.LinkByName(c.state.Bridge)
	if err != nil {
		return err
	}
	ns, err := os.Open(path)
	if err != nil {
		return err
	}
	defer ns.Close()
	attrs := netlink.NewLinkAttrs()
	attrs.Name = c.cable(n)
	attrs.MasterIndex = bridge.Attrs().Index
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: "eth0", PeerNamespace: netlink.NsFd(ns.Fd())}
	if err := netlink.LinkAdd(veth); err != nil {
		return fmt.Errorf("lay line %s: %w", attrs.Name, err)
	}
	if err := netlink.LinkSetUp(veth); err != nil {
		return err
	}
	return netns.Do(path, func() error {
		lo, err := netlink.LinkByName("lo")
		if err != nil {
			return err
		}
		if err := netlink.LinkSetUp(lo); err != nil {
			return err
		}
		eth, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		own := c.onSubnet(n.Addr)
		if n.Name == router {
			own = atOnce(own)
		}
		if err := netlink.AddrAdd(eth, own); err != nil {
			return err
		}
		if n.Addr6.IsValid() {
			six := &netlink.Addr{IPNet: &net.IPNet{IP: n.Addr6.AsSlice(), Mask: net.CIDRMask(64, 128)}, Flags: unix.IFA_F_NODAD}
			if err := netlink.AddrAdd(eth, six); err != nil {
				return err
			}
		}
		if err := netlink.LinkSetUp(eth); err != nil {
			return err
		}
		if c.cfg.Far == 0 || n.Name == router {
			return nil
		}
		if n.Addr.Is6() {
			// The router's redirects would lead past it.
			if err := sysctl.Set(map[string]string{"net.ipv6.conf.eth0.accept_redirects": "0"}); err != nil {
				return err
			}
		}
		return netlink.RouteAdd(&netlink.Route{LinkIndex: eth.Attrs().Index, Gw: routerOn(c.subnetOf(n.Addr)).AsSlice()})
	})
}

// router is the name of the machine between the segments.
const router = "gw" // short, as the interface bears it

// FarSubnet is the segment behind the router: the next one of the same size.
func FarSubnet(near netip.Prefix) netip.Prefix {
	b := near.Masked().Addr().AsSlice()
	var step big.Int
	step.Lsh(big.NewInt(1), uint(near.Addr().BitLen()-near.Bits())) //nolint:gosec // not negative
	next, _ := netip.AddrFromSlice(step.Add(&step, new(big.Int).SetBytes(b)).FillBytes(b))
	return netip.PrefixFrom(next, near.Bits())
}

// routerOn is the router's address in a segment: one that no machine gets.
func routerOn(subnet netip.Prefix) netip.Addr {
	addr := subnet.Addr()
	for range 250 {
		addr = addr.Next()
	}
	return addr
}

// subnetOf is the segment of an address.
func (c *Netns) subnetOf(a netip.Addr) netip.Prefix {
	return netip.PrefixFrom(a, c.state.Subnet.Bits()).Masked()
}

// makeRouter makes the machine between the segments, and puts the host on the
// far one too. Both segments share the switch: what keeps them apart is that no
// machine knows of the other segment's being there.
func (c *Netns) makeRouter(host netip.Addr) error {
	near := c.subnetOf(host)
	far := FarSubnet(near)
	if err := c.addressBridge(far.Addr().Next()); err != nil {
		return err
	}
	if err := c.makeMachine(Node{Name: router, Addr: routerOn(near)}); err != nil {
		return err
	}
	return c.Do(router, func() error {
		eth, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(eth, atOnce(c.onSubnet(routerOn(far)))); err != nil {
			return err
		}
		if far.Addr().Is6() {
			return sysctl.Set(sysctl.Router6())
		}
		return sysctl.Set(map[string]string{
			"net.ipv4.ip_forward": "1",
			// It sends no ICMP redirects.
			"net.ipv4.conf.all.send_redirects": "0", "net.ipv4.conf.eth0.send_redirects": "0",
		})
	})
}

// onSubnet is an address with the length of the machines' network.
func (c *Netns) onSubnet(a netip.Addr) *netlink.Addr {
	return &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(c.state.Subnet.Bits(), a.BitLen())}}
}

// atOnce has an address of IPv6 be of use before the kernel has made sure that no other
// machine has it.
func atOnce(a *netlink.Addr) *netlink.Addr {
	if a.IP.To4() == nil {
		a.Flags = unix.IFA_F_NODAD
	}
	return a
}

// readdress replaces a machine's address.
func (c *Netns) readdress(n Node, addr netip.Addr) error {
	return c.Do(n.Name, func() error {
		eth, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		// In this order: with its first address an interface loses the others.
		if err := netlink.AddrDel(eth, c.onSubnet(n.Addr)); err != nil {
			return err
		}
		return netlink.AddrAdd(eth, c.onSubnet(addr))
	})
}

// Exists says whether the machines are still there: a reboot takes the
// namespaces and lines and leaves the directory.
func (c *Netns) Exists() bool {
	for _, n := range c.state.Nodes {
		if _, err := netlink.LinkByName(c.cable(n)); err != nil {
			return false
		}
		if c.Do(n.Name, func() error { return nil }) != nil {
			return false
		}
	}
	return true
}

func (c *Netns) setLink(name string, up bool) error {
	n, err := c.node(name)
	if err != nil {
		return err
	}
	link, err := netlink.LinkByName(c.cable(n))
	if err != nil {
		return fmt.Errorf("line of %s: %w", name, err)
	}
	if up {
		return netlink.LinkSetUp(link)
	}
	return netlink.LinkSetDown(link)
}

// ErrNotRunning is returned when clusterd does not run on a node.
var ErrNotRunning = errors.New("clusterd does not run there")

// Pid implements Cluster.
func (c *Netns) Pid(name string) (int, error) {
	n, err := c.node(name)
	if err != nil {
		return 0, err
	}
	pid, err := readPid(c.pidPath(n))
	if errors.Is(err, ErrNotRunning) && c.state.OwnBin {
		pid, err = c.comeBack(n)
	}
	if err != nil {
		return 0, fmt.Errorf("%s: %w", name, err)
	}
	return pid, nil
}

// comeBack finds the clusterd of a machine that was started again by the guard of an
// upgrade, with another pid.
func (c *Netns) comeBack(n Node) (int, error) {
	pids, err := c.processes(n)
	if err != nil {
		return 0, err
	}
	for _, pid := range pids {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil {
			continue // it has ended
		}
		args := strings.Split(string(b), "\x00")
		if len(args) > 3 && args[1] == "run" && slices.Contains(args, n.Data) {
			return pid, writePid(c.pidPath(n), pid)
		}
	}
	return 0, ErrNotRunning
}

var joinLine = regexp.MustCompile(`(?m)^clusterd (join \S+ --token \S+)$`)

// joinLines waits for the lines that `clusterd init` prints: to add a server,
// and to add an agent.
func (c *Netns) joinLines(ctx context.Context, n Node) (server, agent []string, err error) {
	err = c.poll(ctx, n, "to begin the cluster", func() bool {
		b, err := os.ReadFile(c.outPath(n))
		if err != nil {
			return false
		}
		lines := joinLine.FindAllSubmatch(b, -1)
		if len(lines) < 2 {
			return false
		}
		unquote := strings.NewReplacer("'", "") // addresses of IPv6 are quoted, for shells
		server, agent = strings.Fields(unquote.Replace(string(lines[0][1]))), strings.Fields(unquote.Replace(string(lines[1][1])))
		return true
	})
	return server, agent, err
}

// clusterd is the program of a machine.
func (c *Netns) clusterd(n Node) (string, error) {
	shared := c.Bin("clusterd")
	if !c.state.OwnBin {
		return shared, nil
	}
	own := filepath.Join(c.cfg.Dir, n.Name+".bin", "clusterd")
	if _, err := os.Stat(own); err == nil {
		return own, nil
	}
	if err := os.MkdirAll(filepath.Dir(own), 0o755); err != nil {
		return "", err
	}
	b, err := os.ReadFile(shared)
	if err != nil {
		return "", err
	}
	return own, os.WriteFile(own, b, 0o755)
}

// A pid file holds the pid and the process's start time, so that a stranger
// with a pid used again is never taken for ours.
func writePid(path string, pid int) error {
	started, err := startTime(pid)
	if errors.Is(err, ErrNotRunning) {
		started, err = "ended", nil // already: nothing has this start
	}
	if err != nil {
		return err
	}
	return os.WriteFile(path, fmt.Appendf(nil, "%d %s\n", pid, started), 0o644)
}

func readPid(path string) (int, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return 0, ErrNotRunning
	}
	if err != nil {
		return 0, err
	}
	var pid int
	var started string
	if _, err := fmt.Sscan(string(b), &pid, &started); err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	if now, err := startTime(pid); err != nil || now != started {
		return 0, ErrNotRunning
	}
	return pid, nil
}

// startTime is field 22 of proc(5) stat; a zombie has ended.
func startTime(pid int) (string, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	_, rest, ok := strings.Cut(string(b), ") ")
	fields := strings.Fields(rest)
	if !ok || len(fields) < 20 || fields[0] == "Z" || fields[0] == "X" {
		return "", ErrNotRunning
	}
	return fields[19], nil
}

// stopped says whether every thread of a process is stopped by a signal.
func stopped(pid int) bool {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil {
		return false
	}
	for _, t := range threads {
		b, err := os.ReadFile(t)
		if err != nil {
			continue // it has ended
		}
		if _, state, _ := strings.Cut(string(b), ") "); !strings.HasPrefix(state, "T") {
			return false
		}
	}
	return true
}

func waitGone(ctx context.Context, pid int, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for {
		if _, err := startTime(pid); err != nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("process %d does not end", pid)
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// PowerOff implements Cluster: everything in the node's network and in its
// cgroups is killed, until nothing is left.
func (c *Netns) PowerOff(name string) error {
	n, err := c.node(name)
	if err != nil {
		return err
	}
	for deadline := time.Now().Add(nodeTimeout); ; {
		pids, err := c.processes(n)
		if err != nil {
			return err
		}
		// A process that is ending leaves its network before it is a zombie.
		if _, err := c.Pid(name); err != nil && len(pids) == 0 {
			return nil
		}
		for _, pid := range pids {
			if err := unix.Kill(pid, unix.SIGKILL); err != nil && err != unix.ESRCH {
				return fmt.Errorf("kill %d: %w", pid, err)
			}
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("processes %v of %s do not end", pids, name)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// Processes lists the node's processes: clusterd, podmon, pauses, containers.
func (c *Netns) Processes(name string) ([]int, error) {
	n, err := c.node(name)
	if err != nil {
		return nil, err
	}
	return c.processes(n)
}

// processes are those of a machine: in its network namespace, or below its
// cgroup (containers have namespaces of their own).
func (c *Netns) processes(n Node) ([]int, error) {
	var want unix.Stat_t
	if err := unix.Stat(c.ns.Path(n.Name), &want); err != nil {
		return nil, err
	}
	var pids []int
	err := eachPid(func(pid int) {
		var st unix.Stat_t
		if unix.Stat(fmt.Sprintf("/proc/%d/ns/net", pid), &st) == nil && st.Ino == want.Ino && st.Dev == want.Dev {
			pids = append(pids, pid)
			return
		}
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		if strings.Contains(string(b), ":"+n.CgroupRoot+"/") {
			pids = append(pids, pid)
		}
	})
	return pids, err
}

// eachPid calls see for every process that has not ended.
func eachPid(see func(pid int)) error {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		if _, err := startTime(pid); err == nil {
			see(pid)
		}
	}
	return nil
}

// removeCgroupDirs removes the empty cgroups below root in every hierarchy.
func removeCgroupDirs(root string) error {
	tops, err := filepath.Glob("/sys/fs/cgroup/*" + root)
	if err != nil {
		return err
	}
	var errs []error
	for _, top := range append(tops, "/sys/fs/cgroup"+root) {
		var dirs []string
		filepath.WalkDir(top, func(path string, e fs.DirEntry, err error) error {
			if err == nil && e.IsDir() {
				dirs = append(dirs, path)
			}
			return nil
		})
		for _, d := range slices.Backward(dirs) {
			if err := os.Remove(d); err != nil && !errors.Is(err, fs.ErrNotExist) {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}
