package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"

	"golang.org/x/sys/unix"
)

// check looks for what the demo needs before it makes anything, so that a
// failure names its reason and not its consequence.
func check(o options) error {
	if os.Geteuid() != 0 {
		return &hint{errors.New("network namespaces, mounts and cgroups need root"), "sudo make demo"}
	}
	for _, f := range []string{o.bin + "/clusterd", o.bin + "/clusterctl", o.image, o.manifest, o.gateway} {
		if _, err := os.Stat(f); err != nil {
			return &hint{fmt.Errorf("%s is missing", f), "make build image"}
		}
	}
	if _, err := exec.LookPath("nsenter"); err != nil {
		return &hint{errors.New("the program nsenter is missing"), "apt-get install util-linux"}
	}
	known, err := os.ReadFile("/proc/filesystems")
	if err != nil {
		return err
	}
	if !strings.Contains(string(known), "\toverlay\n") {
		return &hint{errors.New("this kernel has no overlayfs"), "modprobe overlay, or use another kernel"}
	}
	if _, err := os.ReadDir("/sys/fs/cgroup"); err != nil {
		return &hint{errors.New("no cgroups at /sys/fs/cgroup"), "mount them, or run outside of this container"}
	}
	return checkNamespaces()
}

// checkNamespaces tries what a container or a hardened kernel may forbid.
func checkNamespaces() error {
	cmd := exec.Command("/proc/self/exe", "-h")
	cmd.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS | unix.CLONE_NEWPID}
	if err := cmd.Start(); err != nil {
		return &hint{fmt.Errorf("namespaces cannot be made here: %w", err), "run it on a machine or VM, or in a privileged container"}
	}
	_ = cmd.Wait() // it only prints its usage
	return nil
}
