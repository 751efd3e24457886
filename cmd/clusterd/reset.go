package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"golang.org/x/term"

	"github.com/clusterd/clusterd/agent/csi"
	"github.com/clusterd/clusterd/agent/image"
	"github.com/clusterd/clusterd/agent/plugin"
	"github.com/clusterd/clusterd/agent/pod"
	"github.com/clusterd/clusterd/agent/podnetwork"
	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/netsetup/loopback"
)

// shutdownTimeout bounds how long podmon may take to kill every container.
const shutdownTimeout = 30 * time.Second

// reset undoes all that clusterd did on this machine for one data directory. It
// can be called again after it failed half-way.
func reset(ctx context.Context, cfg Config, out io.Writer) error {
	dir := nodedir.Dir(cfg.Data)
	if _, err := os.Stat(cfg.Data); errors.Is(err, fs.ErrNotExist) {
		fmt.Fprintf(out, "%s does not exist: nothing to reset.\n", cfg.Data)
		return nil
	}
	lock, err := dir.Lock()
	if errors.Is(err, nodedir.ErrInUse) {
		return fmt.Errorf("%w: stop it first (`systemctl stop clusterd`, or end the process)", err)
	}
	if err != nil {
		return err
	}
	defer lock.Close()
	recorded, err := readHostDirs(dir)
	if err != nil {
		fmt.Fprintf(out, "%v: only the folders that the configuration and flags name are put right outside of the data folder.\n", err)
	}
	outside := recorded.with(cfg)
	return finishReset(out, cfg.Data, []resetStep{
		{"containers", func() error { return stopContainers(cfg) }},
		{"services", func() error { return removeServices(dir, cfg.Advertise) }},
		{"network", func() error { return podnetwork.CleanUp(ctx, podnetwork.Config{Dir: dir.Path("network")}) }},
		{"network policies", removePolicies},
		{"address of DNS", func() error { return removeDNS(cfg) }},
		{"mounts", func() error { return errors.Join(image.CleanUp(dir.Path("images")), unmountBelow(cfg.Data)) }},
		{"volumes of CSI drivers and links to logs", func() error { return resetOutside(outside, cfg.Data) }},
		{"cgroups", func() error { return removeCgroups(cfg.CgroupRoot) }},
		{"releases", func() error { return removeReleases(cfg.Data) }},
		{"keys in memory", dir.DropInClear},
		{"the copy of the kubeconfig", func() error { return removeRegular(personKubeconfig(cfg.Data)) }},
	})
}

// confirmReset asks whoever sits at a terminal; scripts are not asked.
func confirmReset(yes bool, data string, in io.Reader, out io.Writer) error {
	f, ok := in.(*os.File)
	if yes || !ok || !term.IsTerminal(int(f.Fd())) || !nodedir.Dir(data).Exists() {
		return nil
	}
	fmt.Fprintf(out, "The pods of this machine end, and %s goes, with this node's keys and its copy of the cluster's state.\n", data)
	if volumes := nodedir.Dir(data).Volumes(); len(volumes) > 0 {
		fmt.Fprintf(out, "Data of %d volumes in it go as well, which are nowhere else: %s (clusterctl get pv).\n", len(volumes), strings.Join(volumes, ", "))
	}
	fmt.Fprint(out, "Go on? [y/N] ")
	var answer string
	fmt.Fscanln(in, &answer)
	if answer = strings.ToLower(answer); answer != "y" && answer != "yes" {
		return errors.New("nothing was changed")
	}
	return nil
}

type resetStep struct {
	what string
	do   func() error
}

// resetOutside undoes what was made outside of the data directory.
func resetOutside(f hostDirs, data string) error {
	return errors.Join(each(f.KubeletRoots, removeDriven), each(f.LogLinks, func(links string) error {
		return pod.LogLinks(links).RemoveAll(filepath.Clean(data))
	}))
}

// finishReset takes all steps, and removes the data directory if none has failed.
func finishReset(out io.Writer, data string, steps []resetStep) error {
	var errs []error
	for _, s := range steps {
		if err := s.do(); err != nil {
			errs = append(errs, fmt.Errorf("remove %s: %w", s.what, err))
		}
	}
	// The directory says what else there is to undo, and volumes may still be mounted in
	// it: it goes only once all else has gone.
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("%w\n%s stays as it is: put right what failed and run `clusterd reset` again", err, data)
	}
	if err := removeDir(data); err != nil {
		return fmt.Errorf("remove data folder: %w", err)
	}
	fmt.Fprintf(out, "This machine runs nothing of clusterd in %s any more.\n", data)
	return nil
}

// removeRegular removes a file, and nothing else that bears its name.
func removeRegular(path string) error {
	st, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !st.Mode().IsRegular() {
		return nil
	}
	if err != nil {
		return err
	}
	return os.Remove(path)
}

// each does it with all of a list.
func each(list []string, do func(string) error) error {
	var errs []error
	for _, item := range list {
		errs = append(errs, do(item))
	}
	return errors.Join(errs...)
}

// removeDNS takes the addresses away at which the node answered names.
func removeDNS(cfg Config) error {
	addrs := cfg.nodeDNS()
	if len(addrs) == 0 {
		return nil
	}
	lo, err := loopback.Open()
	if err != nil {
		return err
	}
	defer lo.Close()
	var errs []error
	for _, addr := range addrs {
		errs = append(errs, lo.Remove(addr))
	}
	return errors.Join(errs...)
}

// stopContainers ends every container of the data directory, and podmon.
func stopContainers(cfg Config) error {
	dir := nodedir.Dir(cfg.Data).Path("podmon")
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), shutdownTimeout)
	defer cancel()
	// One that was killed is started again: it adopts what it left behind.
	containers, err := startRuntime(ctx, cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	defer containers.Close()
	return containers.Shutdown(ctx, true)
}

// removeDriven removes what drivers have mounted outside of the data directory, and
// what is on record of it. Drivers' own directories stay, and so does all that is another
// node's: this one does not run.
func removeDriven(root string) error {
	if plugin.InUse(root) {
		return nil
	}
	return each(csi.Owned(root), func(dir string) error {
		if err := unmountBelow(dir); err != nil {
			return err
		}
		return removeDir(dir)
	})
}

// removeDir removes a directory with all that is in it, and the link that names it,
// if one does. One that is a file system of its own stays, empty. What is mounted
// in it is others' data: then nothing is removed.
func removeDir(path string) error {
	real, err := filepath.EvalSymlinks(path)
	if errors.Is(err, fs.ErrNotExist) {
		return os.RemoveAll(path)
	}
	if err != nil {
		return err
	}
	mounts, err := mountsBelow(real)
	if err != nil {
		return err
	}
	if len(mounts) > 0 {
		return fmt.Errorf("%s stays: %s is mounted in it", real, mounts[0].Mountpoint)
	}
	err = os.RemoveAll(real)
	if errors.Is(err, unix.EBUSY) {
		if left, readErr := os.ReadDir(real); readErr == nil && len(left) == 0 {
			err = nil
		}
	}
	if err == nil && real != filepath.Clean(path) {
		if info, statErr := os.Lstat(path); statErr == nil && info.Mode()&fs.ModeSymlink != 0 {
			err = os.Remove(path)
		}
	}
	return err
}

// mountsBelow are the mounts in a directory, in the order of mounting. The directory is
// named without links, as the kernel names them, and may be a mount point of its own.
func mountsBelow(folder string) ([]*mountinfo.Info, error) {
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return !strings.HasPrefix(m.Mountpoint, folder+"/"), false
	})
	if err != nil {
		return nil, fmt.Errorf("read the mounts below %s: %w", folder, err)
	}
	return mounts, nil
}

// unmountBelow detaches every mount in the directory, the deepest first. Mounts
// that something still uses go when it ends (MNT_DETACH, umount2(2)).
func unmountBelow(folder string) error {
	folder, err := filepath.EvalSymlinks(folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	mounts, err := mountsBelow(folder)
	if err != nil {
		return err
	}
	var errs []error
	for _, m := range slices.Backward(mounts) {
		if err := unix.Unmount(m.Mountpoint, unix.MNT_DETACH); err != nil && err != unix.EINVAL && err != unix.ENOENT {
			errs = append(errs, fmt.Errorf("unmount %s: %w", m.Mountpoint, err))
		}
	}
	return errors.Join(errs...)
}

// removeCgroups removes our tree from every hierarchy of cgroup v1 and from
// v2. A cgroup with a process in it stays, and is an error.
func removeCgroups(root string) error {
	var errs []error
	bases := []string{"/sys/fs/cgroup"}
	entries, err := os.ReadDir("/sys/fs/cgroup")
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			bases = append(bases, filepath.Join("/sys/fs/cgroup", e.Name()))
		}
	}
	deadline := time.Now().Add(5 * time.Second) // for all of them
	for _, base := range bases {
		top := filepath.Join(base, root)
		var dirs []string
		filepath.WalkDir(top, func(path string, e fs.DirEntry, err error) error {
			if err == nil && e.IsDir() {
				dirs = append(dirs, path)
			}
			return nil
		})
		for _, d := range slices.Backward(dirs) {
			if err := removeCgroup(d, deadline); err != nil {
				errs = append(errs, err)
			}
		}
	}
	return errors.Join(errs...)
}

// removeCgroup retries until the deadline while the kernel still counts processes
// that have been killed.
func removeCgroup(path string, deadline time.Time) error {
	for {
		err := os.Remove(path)
		if err == nil || errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		if !errors.Is(err, unix.EBUSY) || time.Now().After(deadline) {
			return err
		}
		time.Sleep(20 * time.Millisecond)
	}
}
