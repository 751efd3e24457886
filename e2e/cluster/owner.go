package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// owner is who made a cluster. It is written into the alias of the cluster's
// bridge before the bridge gets its name, see makeBridge.
type owner struct {
	Pid     int    `json:"pid"`
	Start   string `json:"start"`             // of the process, see startTime
	Lasting bool   `json:"lasting,omitempty"` // the cluster outlives the process that made it
	Dir     string `json:"dir"`               // of the cluster
}

const aliasPrefix = "clusterd-cluster "

// maxAlias is IFALIASZ-1 of linux/if.h.
const maxAlias = 255

func (o owner) alias() (string, error) {
	b, err := json.Marshal(o)
	if err != nil {
		return "", err
	}
	if alias := aliasPrefix + string(b); len(alias) <= maxAlias {
		return alias, nil
	}
	return "", fmt.Errorf("the folder's name is too long for an interface's alias (%d bytes): %s", maxAlias, o.Dir)
}

// parseOwner reads an alias; ok is false when it is none of ours.
func parseOwner(alias string) (o owner, ok bool) {
	text, ok := strings.CutPrefix(alias, aliasPrefix)
	if !ok || json.Unmarshal([]byte(text), &o) != nil || o.Pid <= 0 || !filepath.IsAbs(o.Dir) {
		return owner{}, false
	}
	return o, true
}

// self is this process as the owner of a cluster.
func self(cfg Config) (owner, error) {
	start, err := startTime(os.Getpid())
	return owner{Pid: os.Getpid(), Start: start, Lasting: cfg.Lasting, Dir: cfg.Dir}, err
}

func (o owner) alive() bool {
	if o.Pid == 0 {
		return false
	}
	start, err := startTime(o.Pid)
	return err == nil && start == o.Start
}

// claim is what Up does about a bridge that is there already.
type claim int

const (
	refuseClaim claim = iota // it belongs to another run permanently
	awaitOwner               // its owner lives and will remove it
	takeOver                 // its owner is dead: remove what is left
)

// claimOn decides about a bridge of the wanted name that belongs to was.
func claimOn(was, me owner, alive bool) claim {
	switch {
	case was.Lasting:
		// Such a cluster has a state file, which Up has looked for already: the
		// process that made it ended before it wrote one.
		if was.Dir == me.Dir && !alive {
			return takeOver
		}
		return refuseClaim
	case !alive:
		return takeOver
	case was.Pid == me.Pid || me.Lasting:
		return refuseClaim
	}
	return awaitOwner
}

// ownerTimeout is how long Up waits for a cluster whose owner lives.
const ownerTimeout = 15 * time.Minute

// claimBridge makes the bridge. What a dead owner left is removed before; one
// that lives is waited for.
func (c *Netns) claimBridge(ctx context.Context) error {
	me, err := self(c.cfg)
	if err != nil {
		return err
	}
	alias, err := me.alias()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, ownerTimeout)
	defer cancel()
	for {
		taken := c.makeBridge(alias)
		if !errors.Is(taken, ErrTaken) {
			return taken
		}
		link, err := netlink.LinkByName(c.state.Bridge)
		if err != nil {
			var gone netlink.LinkNotFoundError
			if errors.As(err, &gone) {
				continue // meanwhile
			}
			return err
		}
		was, ok := c.ownerOf(link)
		if !ok {
			return taken
		}
		switch claimOn(was, me, was.alive()) {
		case refuseClaim:
			return fmt.Errorf("%w: it belongs to the cluster in %s", taken, was.Dir)
		case takeOver:
			c.cfg.Progress("removing what a killed run left of " + was.Dir)
			if err := removeRemains(ctx, c.state.Bridge, was.Dir); err != nil {
				return fmt.Errorf("remove what a killed run left of %s: %w", was.Dir, err)
			}
			continue
		}
		c.cfg.Progress(fmt.Sprintf("waiting for process %d, which uses the same bridge", was.Pid))
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: process %d uses it for %s: %w", taken, was.Pid, was.Dir, ctx.Err())
		case <-time.After(250 * time.Millisecond):
		}
	}
}

// ownerOf is who owns a bridge; ok is false when that is none of ours.
func (c *Netns) ownerOf(bridge netlink.Link) (was owner, ok bool) {
	if was, ok := parseOwner(bridge.Attrs().Alias); ok {
		return was, true
	}
	// Clusters made before there were aliases: one with the address that this
	// one would have, and machines in a directory that says so. Its maker is not
	// known, and counts as dead.
	if c.cfg.Lasting || bridge.Type() != "bridge" || bridge.Attrs().Alias != "" {
		return owner{}, false
	}
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("nsfs"))
	if err != nil {
		return owner{}, false
	}
	for _, m := range mounts {
		dir := filepath.Dir(filepath.Dir(m.Mountpoint)) // DIR/netns/n1
		if old, err := Open(dir); err == nil && old.state.Bridge == c.state.Bridge && old.state.Subnet == c.state.Subnet {
			return owner{Dir: dir}, true
		}
	}
	return owner{}, false
}

// removeRemains removes all that a cluster of a dead process left on this
// machine. It asks no program for help: that of the dead may be gone, or may be
// what hung. The bridge goes last: as long as it is there the next Up finds it.
func removeRemains(ctx context.Context, bridge, dir string) error {
	if err := killRemains(ctx, bridge, dir); err != nil {
		return err
	}
	if err := unmountBelow(dir); err != nil {
		return err
	}
	if err := retryBusy(ctx, func() error { return removeCgroupDirs("/" + bridge) }); err != nil {
		return err
	}
	// Only a directory that holds a cluster's state is one that Up made.
	if _, err := os.Stat(filepath.Join(dir, stateFile)); err == nil {
		if err := os.RemoveAll(dir); err != nil {
			return err
		}
	}
	link, err := netlink.LinkByName(bridge)
	if err != nil {
		return nil // it is gone
	}
	links, err := listLinks()
	if err != nil {
		return err
	}
	for _, l := range links {
		if l.Attrs().MasterIndex == link.Attrs().Index {
			if err := removeLink(l.Attrs().Name); err != nil {
				return err
			}
		}
	}
	return removeLink(bridge)
}

// killRemains ends every process of the cluster: those in its machines'
// networks, in its cgroups, or with its directory on their command line.
func killRemains(ctx context.Context, bridge, dir string) error {
	for {
		networks, err := pinnedNetworks(dir)
		if err != nil {
			return err
		}
		var left []int
		err = eachPid(func(pid int) {
			if pid != os.Getpid() && belongs(pid, bridge, dir, networks) {
				left = append(left, pid)
			}
		})
		if err != nil {
			return err
		}
		if len(left) == 0 {
			return nil
		}
		for _, pid := range left {
			if err := unix.Kill(pid, unix.SIGKILL); err != nil && err != unix.ESRCH {
				return fmt.Errorf("kill %d: %w", pid, err)
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("processes %v do not end: %w", left, ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

type inode struct{ dev, ino uint64 }

// pinnedNetworks are the network namespaces that are mounted in the directory.
func pinnedNetworks(dir string) (map[inode]bool, error) {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil {
		return nil, err
	}
	networks := map[inode]bool{}
	for _, m := range mounts {
		var st unix.Stat_t
		if m.FSType == "nsfs" && unix.Stat(m.Mountpoint, &st) == nil {
			networks[inode{st.Dev, st.Ino}] = true
		}
	}
	return networks, nil
}

func belongs(pid int, bridge, dir string, networks map[inode]bool) bool {
	proc := fmt.Sprintf("/proc/%d/", pid)
	var st unix.Stat_t
	if unix.Stat(proc+"ns/net", &st) == nil && networks[inode{st.Dev, st.Ino}] {
		return true
	}
	groups, _ := os.ReadFile(proc + "cgroup")
	if strings.Contains(string(groups), ":/"+bridge+"/") {
		return true
	}
	command, _ := os.ReadFile(proc + "cmdline")
	for arg := range strings.SplitSeq(string(command), "\x00") {
		if strings.HasPrefix(arg, dir+"/") {
			return true
		}
	}
	return false
}

// unmountBelow detaches every mount in the directory, the last made first.
func unmountBelow(dir string) error {
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	if err != nil {
		return err
	}
	var errs []error
	for i := range mounts {
		point := mounts[len(mounts)-1-i].Mountpoint
		if err := unix.Unmount(point, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && err != unix.EINVAL && err != unix.ENOENT {
			errs = append(errs, fmt.Errorf("unmount %s: %w", point, err))
		}
	}
	return errors.Join(errs...)
}

// retryBusy repeats fn while the kernel still counts what has ended.
func retryBusy(ctx context.Context, fn func() error) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for {
		err := fn()
		if err == nil || !errors.Is(err, unix.EBUSY) && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(20 * time.Millisecond):
		}
	}
}
