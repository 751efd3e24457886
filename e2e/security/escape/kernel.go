package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// text is a string as the kernel reads it.
func text(s string) uintptr {
	b, err := unix.BytePtrFromString(s)
	if err != nil {
		panic(err)
	}
	kept = append(kept, b)
	return uintptr(unsafe.Pointer(b))
}

// kept holds what text has handed out.
var kept []*byte

func mounts() []way {
	const at = "/tmp/m"
	_ = os.MkdirAll(at, 0o755)
	mount := func(name, source, kind string, flags uintptr) way {
		return way{name: "mount " + name, try: func() (bool, string) {
			err := unix.Mount(source, at, kind, flags, "")
			if err == nil {
				_ = unix.Unmount(at, unix.MNT_DETACH)
			}
			return errno(err)
		}}
	}
	return []way{
		mount("proc", "proc", "proc", 0),
		mount("sysfs", "sysfs", "sysfs", 0),
		mount("tmpfs", "tmpfs", "tmpfs", 0),
		mount("devtmpfs", "devtmpfs", "devtmpfs", 0),
		mount("cgroup v1", "none", "cgroup", 0),
		mount("cgroup v2", "none", "cgroup2", 0),
		mount("debugfs", "none", "debugfs", 0),
		mount("bpf", "none", "bpf", 0),
		mount("the root elsewhere", "/", "", unix.MS_BIND|unix.MS_REC),
		mount("an overlay", "overlay", "overlay", 0),
		{name: "mount /proc/sys for writing", try: func() (bool, string) {
			return errno(unix.Mount("", "/proc/sys", "", unix.MS_REMOUNT|unix.MS_BIND, ""))
		}},
		{name: "mount /sys for writing", try: func() (bool, string) { return errno(unix.Mount("", "/sys", "", unix.MS_REMOUNT, "")) }},
		{name: "mount the root shared", try: func() (bool, string) { return errno(unix.Mount("", "/", "", unix.MS_SHARED|unix.MS_REC, "")) }},
		{name: "unmount a masked file", try: func() (bool, string) { return errno(unix.Unmount("/proc/kcore", unix.MNT_DETACH)) }},
		{name: "unmount /proc", try: func() (bool, string) { return errno(unix.Unmount("/proc/nothing", unix.MNT_DETACH)) }},
		call("fsopen", unix.SYS_FSOPEN, text("proc"), 0),
		call("open_tree", unix.SYS_OPEN_TREE, ^uintptr(99), text("/"), unix.OPEN_TREE_CLONE),
		call("move_mount", unix.SYS_MOVE_MOUNT, ^uintptr(0), text("/"), ^uintptr(0), text("/tmp")),
		call("fspick", unix.SYS_FSPICK, ^uintptr(99), text("/proc")),
		call("mount_setattr", unix.SYS_MOUNT_SETATTR, ^uintptr(99), text("/proc"), 0, 0, 32),
		call("pivot_root", unix.SYS_PIVOT_ROOT, text(at), text(at)),
		call("swapon", unix.SYS_SWAPON, text("/nothing"), 0),
		call("swapoff", unix.SYS_SWAPOFF, text("/nothing")),
		call("quotactl", unix.SYS_QUOTACTL, 0x800007<<8, text("/dev/nothing"), 0, 0),
	}
}

func namespaces() []way {
	unshare := func(name string, flag int) way {
		return way{name: "unshare " + name, try: func() (open bool, said string) {
			done := make(chan struct{})
			go func() { // on a thread of its own, which ends with it
				defer close(done)
				runtime.LockOSThread()
				open, said = errno(unix.Unshare(flag))
			}()
			<-done
			return open, said
		}}
	}
	return []way{
		unshare("mounts", unix.CLONE_NEWNS), unshare("processes", unix.CLONE_NEWPID), unshare("network", unix.CLONE_NEWNET),
		unshare("IPC", unix.CLONE_NEWIPC), unshare("names", unix.CLONE_NEWUTS), unshare("cgroups", unix.CLONE_NEWCGROUP),
		{name: "unshare users", try: func() (bool, string) { return cloned(unix.CLONE_NEWUSER) }},
		{name: "clone with users and mounts", try: func() (bool, string) { return cloned(unix.CLONE_NEWUSER | unix.CLONE_NEWNS) }},
		{name: "clone with a network", try: func() (bool, string) { return cloned(unix.CLONE_NEWNET) }},
		{name: "clone3 with users", try: func() (bool, string) {
			args := [11]uint64{0: unix.CLONE_NEWUSER, 4: uint64(unix.SIGCHLD)}
			pid, _, e := unix.RawSyscall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(&args)), unsafe.Sizeof(args), 0)
			return child(pid, e)
		}},
		{name: "setns to the first process's mounts", try: func() (bool, string) { return setns("/proc/1/ns/mnt", unix.CLONE_NEWNS) }},
		{name: "setns to the first process's network", try: func() (bool, string) { return setns("/proc/1/ns/net", unix.CLONE_NEWNET) }},
	}
}

// cloned makes a process with namespaces of its own, which ends at once.
func cloned(flags uintptr) (bool, string) {
	pid, _, e := unix.RawSyscall6(unix.SYS_CLONE, flags|uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	return child(pid, e)
}

func child(pid uintptr, e unix.Errno) (bool, string) {
	if e != 0 {
		return errno(e)
	}
	if pid == 0 {
		for {
			unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
		}
	}
	_, _ = unix.Wait4(int(pid), nil, 0, nil)
	return true, "a process was made"
}

func setns(file string, kind int) (open bool, said string) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		fd, err := unix.Open(file, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			open, said = false, err.Error()
			return
		}
		defer unix.Close(fd)
		open, said = errno(unix.Setns(fd, kind))
	}()
	<-done
	return open, said
}

func kernelFiles() []way {
	var out []way
	for _, file := range []string{
		"/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hotplug", "/proc/sys/kernel/sysrq", "/proc/sys/kernel/panic",
		"/proc/sys/kernel/randomize_va_space", "/proc/sys/kernel/ns_last_pid", "/proc/sys/vm/panic_on_oom", "/proc/sys/vm/drop_caches", "/proc/sys/fs/file-max",
		"/proc/sys/fs/suid_dumpable", "/proc/sys/fs/protected_symlinks", "/proc/sys/fs/binfmt_misc/register", "/proc/sys/net/ipv4/ip_forward",
		"/proc/sys/net/ipv4/conf/all/route_localnet", "/proc/sys/user/max_user_namespaces", "/proc/sysrq-trigger", "/proc/irq/default_smp_affinity", "/proc/bus/pci/00/00.0",
		"/proc/fs/ext4", "/proc/mtrr", "/proc/acpi/wakeup", "/sys/kernel/uevent_helper", "/sys/kernel/mm/transparent_hugepage/enabled", "/sys/power/state",
		"/sys/module/nf_conntrack/parameters/hashsize", "/sys/class/net/lo/mtu", "/sys/devices/system/cpu/cpu1/online", "/sys/bus/pci/rescan",
		"/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/pids/pids.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes",
		"/sys/fs/cgroup/devices/devices.allow", "/sys/fs/cgroup/rdma/release_agent", "/sys/fs/cgroup/memory/release_agent",
	} {
		out = append(out, writes(file))
	}
	for _, file := range []string{
		"/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/latency_stats", "/proc/sched_debug", "/proc/scsi/scsi", "/proc/kmsg", "/dev/kmsg", "/dev/mem", "/dev/port",
		"/sys/firmware/dmi/tables/DMI", "/sys/kernel/debug/tracing/trace", "/sys/kernel/security/lsm", "/sys/kernel/tracing/trace",
		"/sys/devices/virtual/powercap/intel-rapl/uevent", "/proc/interrupts",
	} {
		out = append(out, reads(file))
	}
	out = append(out, fails("make a cgroup", func() error {
		found, err := filepath.Glob("/sys/fs/cgroup/*")
		if err != nil {
			return err
		}
		last := errors.New("no cgroup is seen")
		for _, dir := range append(found, "/sys/fs/cgroup") {
			if last = os.Mkdir(filepath.Join(dir, "made"), 0o755); last == nil {
				return os.Remove(filepath.Join(dir, "made"))
			}
		}
		return last
	}), fails("be spared when memory ends", func() error {
		return os.WriteFile("/proc/self/oom_score_adj", []byte("-999"), 0)
	}))
	return out
}

func systemCalls() []way {
	var one uint64 = 1
	p := uintptr(unsafe.Pointer(&one))
	// A time zone that there cannot be: one that can be would move the node's clock.
	zone := [2]int32{1 << 20, 1 << 20}
	return append([]way{
		call("add_key", unix.SYS_ADD_KEY, text("user"), text("x"), p, 8, ^uintptr(2)),
		call("keyctl", unix.SYS_KEYCTL, 0, ^uintptr(2), 1),
		call("request_key", unix.SYS_REQUEST_KEY, text("user"), text("x"), 0, 0),
		call("kexec_load", unix.SYS_KEXEC_LOAD, 0, 0, 0, 0xffff),
		call("init_module", unix.SYS_INIT_MODULE, p, 8, text("")),
		call("finit_module", unix.SYS_FINIT_MODULE, ^uintptr(0), text(""), 0),
		call("delete_module", unix.SYS_DELETE_MODULE, text("no_such_module"), unix.O_NONBLOCK),
		call("bpf", unix.SYS_BPF, 0, p, 8),
		call("perf_event_open", unix.SYS_PERF_EVENT_OPEN, p, 0, 0, ^uintptr(0), 0),
		call("userfaultfd", unix.SYS_USERFAULTFD, 0),
		call("open_by_handle_at", unix.SYS_OPEN_BY_HANDLE_AT, 0, p, 0),
		call("reboot", unix.SYS_REBOOT, 0, 0, 0),
		call("settimeofday", unix.SYS_SETTIMEOFDAY, 0, uintptr(unsafe.Pointer(&zone))),
		call("clock_settime", unix.SYS_CLOCK_SETTIME, 99, p),
		call("sethostname", unix.SYS_SETHOSTNAME, p, 1<<20),
		call("setdomainname", unix.SYS_SETDOMAINNAME, p, 1<<20),
		call("acct", unix.SYS_ACCT, text("/nothing")),
		call("fanotify_init", unix.SYS_FANOTIFY_INIT, 0, 0),
		call("io_uring_setup", unix.SYS_IO_URING_SETUP, 1, 0),
		call("vhangup", unix.SYS_VHANGUP),
		call("syslog", unix.SYS_SYSLOG, 3, p, 8),
		call("move_pages of another", unix.SYS_MOVE_PAGES, 1, 0, 0, 0, 0, 0x80),
		call("setns to nothing", unix.SYS_SETNS, ^uintptr(0), unix.CLONE_NEWNS),
		call("lookup_dcookie", unix.SYS_LOOKUP_DCOOKIE, 0, p, 8),
		call("nfsservctl", unix.SYS_NFSSERVCTL, 0, 0, 0),
		{name: "raise CAP_SYS_ADMIN", try: func() (bool, string) {
			head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
			var data [2]unix.CapUserData
			if err := unix.Capget(&head, &data[0]); err != nil {
				return true, err.Error()
			}
			data[0].Permitted |= 1 << unix.CAP_SYS_ADMIN
			data[0].Effective |= 1 << unix.CAP_SYS_ADMIN
			return errno(unix.Capset(&head, &data[0]))
		}},
		{name: "a socket of the hypervisor", try: func() (bool, string) { return socket(unix.AF_VSOCK, unix.SOCK_STREAM) }},
		{name: "run before all others", try: func() (bool, string) { return errno(unix.Setpriority(unix.PRIO_PROCESS, 0, -20)) }},
		{name: "more open files than the limit", try: func() (bool, string) {
			var l unix.Rlimit
			if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &l); err != nil {
				return true, err.Error()
			}
			l.Cur, l.Max = l.Max+1, l.Max+1
			return errno(unix.Setrlimit(unix.RLIMIT_NOFILE, &l))
		}},
		{name: "see processes of the node", try: func() (bool, string) {
			found, err := filepath.Glob("/proc/[0-9]*/cmdline")
			if err != nil {
				return true, err.Error()
			}
			for _, file := range found {
				b, err := os.ReadFile(file)
				if err == nil && len(b) > 0 && string(b[:min(7, len(b))]) != "/escape" {
					return true, fmt.Sprintf("%s: %.60q", file, b)
				}
			}
			return false, fmt.Sprintf("%d processes, all of the container", len(found))
		}},
		// Heavy, since it would stop what runs containers.
		{name: "trace the first process's parent", heavy: true, try: func() (bool, string) {
			if os.Getppid() == 0 && os.Getpid() == 1 {
				return false, "there is none to see"
			}
			return errno(unix.PtraceAttach(os.Getppid()))
		}},
	}, machineCalls()...)
}

func socket(family, kind int) (bool, string) {
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return false, err.Error()
	}
	_ = unix.Close(fd)
	return true, "it was made"
}

// numbers are devices that a container must not open.
var numbers = []struct {
	name         string
	block        bool
	major, minor uint32
}{
	{"sda", true, 8, 0}, {"loop0", true, 7, 0}, {"vda", true, 254, 0}, {"vda of old", true, 253, 0}, {"nvme0n1", true, 259, 0}, {"xvda", true, 202, 0}, {"md0", true, 9, 0}, {"sr0", true, 11, 0},
	{"mem", false, 1, 1}, {"kmem", false, 1, 2}, {"port", false, 1, 4}, {"kmsg", false, 1, 11}, {"console", false, 5, 1}, {"tty0", false, 4, 0}, {"fuse", false, 10, 229}, {"kvm", false, 10, 232},
	{"tun", false, 10, 200}, {"loop-control", false, 10, 237}, {"vhost-net", false, 10, 238}, {"device mapper", false, 10, 236}, {"uinput", false, 10, 223}, {"autofs", false, 10, 235},
	{"btrfs-control", false, 10, 234}, {"vfio", false, 10, 196}, {"vhost-vsock", false, 10, 241}, {"dri", false, 226, 0}, {"sg0", false, 21, 0}, {"nvidia", false, 195, 0}, {"snapshot", false, 10, 231},
}

func devices() []way {
	var out []way
	for _, d := range numbers {
		out = append(out, fails("open the device "+d.name, func() error {
			file := filepath.Join("/tmp", fmt.Sprintf("dev-%v-%d-%d", d.block, d.major, d.minor))
			mode := uint32(unix.S_IFCHR | 0o600)
			if d.block {
				mode = unix.S_IFBLK | 0o600
			}
			if err := unix.Mknod(file, mode, int(unix.Mkdev(d.major, d.minor))); err != nil {
				return err
			}
			defer os.Remove(file)
			fd, err := unix.Open(file, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
			if err != nil {
				return err
			}
			return unix.Close(fd)
		}))
	}
	return out
}
