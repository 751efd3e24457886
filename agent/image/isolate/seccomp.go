//go:build amd64 || arm64

package isolate

import (
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// refused are system calls that fail whatever the capabilities: what changes mounts,
// namespaces, the machine or other processes, what runs programs, and doors of the
// kernel that a decoder has no use for.
var refused = []uint32{
	unix.SYS_EXECVE, unix.SYS_EXECVEAT,
	unix.SYS_PTRACE, unix.SYS_PROCESS_VM_READV, unix.SYS_PROCESS_VM_WRITEV, unix.SYS_KCMP,
	unix.SYS_PIDFD_OPEN, unix.SYS_PIDFD_GETFD, unix.SYS_PIDFD_SEND_SIGNAL, unix.SYS_PROCESS_MADVISE,
	unix.SYS_MOUNT, unix.SYS_UMOUNT2, unix.SYS_PIVOT_ROOT, unix.SYS_CHROOT, unix.SYS_MOVE_MOUNT, unix.SYS_OPEN_TREE,
	unix.SYS_FSOPEN, unix.SYS_FSCONFIG, unix.SYS_FSMOUNT, unix.SYS_FSPICK, unix.SYS_MOUNT_SETATTR,
	unix.SYS_SETNS, unix.SYS_UNSHARE, unix.SYS_CLONE3,
	unix.SYS_NAME_TO_HANDLE_AT, unix.SYS_OPEN_BY_HANDLE_AT,
	unix.SYS_QUOTACTL, unix.SYS_QUOTACTL_FD, unix.SYS_SWAPON, unix.SYS_SWAPOFF,
	unix.SYS_REBOOT, unix.SYS_KEXEC_LOAD, unix.SYS_KEXEC_FILE_LOAD,
	unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_DELETE_MODULE,
	unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_USERFAULTFD,
	unix.SYS_IO_URING_SETUP, unix.SYS_IO_URING_ENTER, unix.SYS_IO_URING_REGISTER,
	unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY, unix.SYS_KEYCTL,
	unix.SYS_ACCT, unix.SYS_SYSLOG, unix.SYS_PERSONALITY, unix.SYS_VHANGUP,
	unix.SYS_SETTIMEOFDAY, unix.SYS_CLOCK_SETTIME, unix.SYS_CLOCK_ADJTIME, unix.SYS_ADJTIMEX,
	unix.SYS_SETHOSTNAME, unix.SYS_SETDOMAINNAME, unix.SYS_IOPRIO_SET,
	unix.SYS_FANOTIFY_INIT, unix.SYS_FANOTIFY_MARK, unix.SYS_INOTIFY_INIT1,
	unix.SYS_MEMFD_CREATE, unix.SYS_MEMFD_SECRET, unix.SYS_MIGRATE_PAGES, unix.SYS_MOVE_PAGES,
	unix.SYS_SHMGET, unix.SYS_SEMGET, unix.SYS_MSGGET, unix.SYS_MQ_OPEN,
	unix.SYS_IOCTL, // of file systems, for root: freeze, resize, subvolumes
	unix.SYS_SOCKETPAIR, unix.SYS_LISTEN, unix.SYS_ACCEPT, unix.SYS_ACCEPT4,
}

// lastKnown is the last system call of Linux 6.6: what came later is answered as by a
// kernel that does not have it.
const lastKnown = unix.SYS_FCHMODAT2

// newNamespaces are the flags of clone(2) that make namespaces.
const newNamespaces = unix.CLONE_NEWNS | unix.CLONE_NEWCGROUP | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC | unix.CLONE_NEWUSER | unix.CLONE_NEWPID | unix.CLONE_NEWNET

// softOffline is MADV_SOFT_OFFLINE of madvise(2).
const softOffline = 101

// Offsets in struct seccomp_data.
const (
	atNumber = 0
	atArch   = 4
	atArg0   = 16 // the lower halves, little-endian
	atArg2   = 32
)

func load(at uint32) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: at}
}

func jump(test uint16, k uint32, yes, no uint8) unix.SockFilter {
	return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_K | test, Jt: yes, Jf: no, K: k}
}

func answer(k uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: k} }

// program is the filter.
func program(network bool) []unix.SockFilter {
	fail := func(errno uint32) unix.SockFilter { return answer(unix.SECCOMP_RET_ERRNO | errno) }
	p := []unix.SockFilter{
		load(atArch),
		jump(unix.BPF_JEQ, auditArch, 1, 0),
		answer(unix.SECCOMP_RET_KILL_PROCESS),
		load(atNumber),
		jump(unix.BPF_JGT, lastKnown, 0, 1),
		fail(uint32(unix.ENOSYS)),
	}
	no := slices.Concat(refused, refusedHere)
	if !network {
		no = append(no, unix.SYS_SOCKET, unix.SYS_CONNECT, unix.SYS_BIND)
	}
	for _, nr := range no {
		p = append(p, jump(unix.BPF_JEQ, nr, 0, 1), fail(uint32(unix.EPERM)))
	}
	p = append(p,
		jump(unix.BPF_JEQ, unix.SYS_CLONE, 0, 4),
		load(atArg0),
		jump(unix.BPF_JSET, newNamespaces, 0, 1),
		fail(uint32(unix.EPERM)),
		answer(unix.SECCOMP_RET_ALLOW),
		// With CAP_SYS_ADMIN these take pages from the machine until it boots again.
		jump(unix.BPF_JEQ, unix.SYS_MADVISE, 0, 5),
		load(atArg2),
		jump(unix.BPF_JEQ, unix.MADV_HWPOISON, 1, 0),
		jump(unix.BPF_JEQ, softOffline, 0, 1),
		fail(uint32(unix.EPERM)),
		answer(unix.SECCOMP_RET_ALLOW),
		// It ends with its parent.
		jump(unix.BPF_JEQ, unix.SYS_PRCTL, 0, 4),
		load(atArg0),
		jump(unix.BPF_JEQ, unix.PR_SET_PDEATHSIG, 0, 1),
		fail(uint32(unix.EPERM)),
		answer(unix.SECCOMP_RET_ALLOW),
		jump(unix.BPF_JEQ, unix.SYS_SOCKET, 0, 4),
		load(atArg0),
		jump(unix.BPF_JEQ, unix.AF_INET, 2, 0),
		jump(unix.BPF_JEQ, unix.AF_INET6, 1, 0),
		fail(uint32(unix.EAFNOSUPPORT)),
		answer(unix.SECCOMP_RET_ALLOW),
	)
	return p
}

// filter puts the filter on all threads.
func filter(network bool) error {
	p := program(network)
	prog := unix.SockFprog{Len: uint16(len(p)), Filter: &p[0]}
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&prog)))
	if errno != 0 {
		return errno
	}
	return nil
}
