package podmon

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"

	"github.com/clusterd/clusterd/agent/podmon/api"
)

// defaultStartLimit is how long a container's start may take. What takes longer
// hangs in the kernel: on a mount whose server does not answer.
const defaultStartLimit = 45 * time.Second

// killTimeout is how long killed processes of a start may take to end.
const killTimeout = 5 * time.Second

func (s *Supervisor) startLimit() time.Duration { return cmp.Or(s.cfg.StartLimit, defaultStartLimit) }

// launchInTime starts a container within the limit. One that hangs is killed,
// and the reason says where. One that cannot even be killed stays "starting",
// with its record, until the kernel lets go of it: it cannot be removed before.
func (s *Supervisor) launchInTime(ctx context.Context, c *container, sb *sandbox) error {
	done := make(chan struct{})
	// A start goes on when its client is gone.
	limit, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.startLimit())
	defer cancel()
	s.wg.Go(func() {
		defer close(done)
		s.recordStart(c, s.launch(ctx, limit, c, sb))
	})
	select {
	case <-done:
		return nil
	case <-limit.Done():
	}
	m, err := s.containerCgroup(c)
	if err != nil {
		return err
	}
	pids, _ := processesOf(m)
	s.mu.Lock()
	mounts := c.status.Container.Mounts
	s.mu.Unlock()
	why := "start took too long" + whereStuck(pids, mounts)
	s.mu.Lock()
	c.gaveUp = why
	s.mu.Unlock()
	s.log.Warn("container's start hangs", "id", c.id, "name", c.status.Container.Name, "err", why)
	if err := killCgroup(m); err != nil {
		s.log.Warn("a start that hangs cannot be killed", "id", c.id, "err", err)
	}
	select {
	case <-done:
		return nil
	case <-time.After(killTimeout):
		return errorf(api.CodeBusy, "%s; it cannot be killed", why)
	}
}

// whereStuck says for people in which call the processes wait, and which mounts
// may be why.
func whereStuck(pids []int, mounts []api.Mount) string {
	var b strings.Builder
	for _, pid := range pids {
		call, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/syscall")
		if err != nil {
			continue
		}
		number, _, _ := strings.Cut(string(call), " ")
		wait, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/wchan")
		fmt.Fprintf(&b, ": process %d waits in the kernel (system call %s, %s)", pid, strings.TrimSpace(number), cmp.Or(string(wait), "-"))
		break // the others wait for this one
	}
	table := readMountTable()
	for _, m := range mounts {
		if m.Type != "" && m.Type != "bind" {
			continue
		}
		if fstype := table.typeAt(m.Source); remoteType(fstype) {
			fmt.Fprintf(&b, "; %s is %s, on a file system of type %s", m.Destination, m.Source, fstype)
		}
	}
	return b.String()
}

// remoteType reports whether a file system depends on another process's answer.
func remoteType(fstype string) bool {
	kind, _, _ := strings.Cut(fstype, ".") // fuse.sshfs
	switch kind {
	case "nfs", "nfs4", "cifs", "smb3", "fuse", "fuseblk", "9p", "ceph", "virtiofs", "glusterfs", "lustre", "afs", "autofs":
		return true
	}
	return false
}

// mountTable is file system types by mount point. Unlike statfs(2), looking it
// up never waits for a server.
type mountTable map[string]string

func readMountTable() mountTable {
	t := mountTable{}
	mounts, err := mountinfo.GetMounts(nil)
	if err != nil {
		return t // a reason less
	}
	for _, m := range mounts {
		t[m.Mountpoint] = m.FSType
	}
	return t
}

func (t mountTable) typeAt(p string) string {
	for p = filepath.Clean(p); ; p = path.Dir(p) {
		if kind, ok := t[p]; ok || p == "/" || p == "." {
			return kind
		}
	}
}
