package seccomp

// allowedSyscalls may be used by any container. Left out is what reaches past
// the container's own resources: mounting, modules, clocks, keys, namespaces,
// tracing of the kernel, swap, reboot.
var allowedSyscalls = [][]string{
	{ // files and directories
		"access", "chdir", "chmod", "chown", "close", "close_range", "copy_file_range", "creat",
		"dup", "dup2", "dup3", "faccessat", "faccessat2", "fadvise64", "fallocate", "fchdir",
		"fchmod", "fchmodat", "fchmodat2", "fchown", "fchownat", "fcntl", "fdatasync", "flock",
		"fstat", "fstatfs", "fsync", "ftruncate", "futimesat", "getcwd", "getdents", "getdents64",
		"ioctl", "lchown", "link", "linkat", "lseek", "lstat", "mkdir", "mkdirat", "mknod", "mknodat",
		"newfstatat", "open", "openat", "openat2", "pread64", "preadv", "preadv2", "pwrite64",
		"pwritev", "pwritev2", "read", "readahead", "readlink", "readlinkat", "readv", "rename",
		"renameat", "renameat2", "rmdir", "sendfile", "splice", "stat", "statfs", "statx",
		"symlink", "symlinkat", "sync", "sync_file_range", "syncfs", "tee", "truncate", "umask",
		"unlink", "unlinkat", "utime", "utimensat", "utimes", "vmsplice", "write", "writev",
		"cachestat", "name_to_handle_at", "statmount", "listmount",
	},
	{ // extended attributes
		"fgetxattr", "flistxattr", "fremovexattr", "fsetxattr", "getxattr", "getxattrat", "lgetxattr",
		"listxattr", "listxattrat", "llistxattr", "lremovexattr", "lsetxattr", "removexattr",
		"removexattrat", "setxattr", "setxattrat",
	},
	{ // waiting for files
		"epoll_create", "epoll_create1", "epoll_ctl", "epoll_ctl_old", "epoll_pwait", "epoll_pwait2",
		"epoll_wait", "epoll_wait_old", "eventfd", "eventfd2", "inotify_add_watch", "inotify_init",
		"inotify_init1", "inotify_rm_watch", "pipe", "pipe2", "poll", "ppoll", "pselect6", "select",
		"signalfd", "signalfd4", "timerfd_create", "timerfd_gettime", "timerfd_settime",
		"io_cancel", "io_destroy", "io_getevents", "io_pgetevents", "io_setup", "io_submit",
	},
	{ // memory
		"brk", "get_mempolicy", "madvise", "map_shadow_stack", "membarrier", "memfd_create", "memfd_secret",
		"mincore", "mlock", "mlock2", "mlockall", "mmap", "mprotect", "mremap", "mseal", "msync",
		"munlock", "munlockall", "munmap", "pkey_alloc", "pkey_free", "pkey_mprotect",
		"process_madvise", "process_mrelease", "remap_file_pages",
	},
	{ // processes and threads
		"capget", "capset", "execve", "execveat", "exit", "exit_group", "fork", "get_robust_list",
		"get_thread_area", "getcpu", "getpgid", "getpgrp", "getpid", "getppid", "getpriority",
		"getrlimit", "getrusage", "getsid", "gettid", "ioprio_get", "ioprio_set", "kcmp",
		"landlock_add_rule", "landlock_create_ruleset", "landlock_restrict_self", "lsm_get_self_attr",
		"lsm_list_modules", "lsm_set_self_attr", "pidfd_getfd", "pidfd_open", "pidfd_send_signal",
		"prctl", "prlimit64", "process_vm_readv", "process_vm_writev", "ptrace", "rseq",
		"sched_get_priority_max", "sched_get_priority_min", "sched_getaffinity", "sched_getattr",
		"sched_getparam", "sched_getscheduler", "sched_rr_get_interval", "sched_setaffinity",
		"sched_setattr", "sched_setparam", "sched_setscheduler", "sched_yield", "seccomp",
		"set_robust_list", "set_thread_area", "set_tid_address", "setpgid", "setpriority",
		"setrlimit", "setsid", "sysinfo", "times", "uname", "vfork", "wait4", "waitid",
	},
	{ // locks between threads
		"futex", "futex_requeue", "futex_wait", "futex_waitv", "futex_wake",
	},
	{ // users and groups
		"getegid", "geteuid", "getgid", "getgroups", "getresgid", "getresuid", "getuid", "setfsgid",
		"setfsuid", "setgid", "setgroups", "setregid", "setresgid", "setresuid", "setreuid", "setuid",
	},
	{ // signals
		"alarm", "kill", "pause", "restart_syscall", "rt_sigaction", "rt_sigpending", "rt_sigprocmask",
		"rt_sigqueueinfo", "rt_sigreturn", "rt_sigsuspend", "rt_sigtimedwait", "rt_tgsigqueueinfo",
		"sigaltstack", "tgkill", "tkill",
	},
	{ // time
		"adjtimex", "clock_adjtime", "clock_getres", "clock_gettime", "clock_nanosleep", "getitimer",
		"gettimeofday", "nanosleep", "setitimer", "time", "timer_create", "timer_delete",
		"timer_getoverrun", "timer_gettime", "timer_settime",
	},
	{ // sockets ("socket" itself has a condition)
		"accept", "accept4", "bind", "connect", "getpeername", "getsockname", "getsockopt", "listen",
		"recvfrom", "recvmmsg", "recvmsg", "sendmmsg", "sendmsg", "sendto", "setsockopt", "shutdown",
		"socketpair",
	},
	{ // between processes
		"mq_getsetattr", "mq_notify", "mq_open", "mq_timedreceive", "mq_timedsend", "mq_unlink",
		"msgctl", "msgget", "msgrcv", "msgsnd", "semctl", "semget", "semop", "semtimedop",
		"shmat", "shmctl", "shmdt", "shmget",
	},
	{ // chance
		"getrandom",
	},
}

// archSyscalls exist on one architecture alone.
var archSyscalls = map[string][]string{
	"amd64": {"arch_prctl", "modify_ldt", "uretprobe"},
}

// capabilitySyscalls are allowed to a container that was given the capability
// the kernel asks for anyway.
var capabilitySyscalls = []struct {
	capability string
	names      []string
}{
	{"CAP_BPF", []string{"bpf"}},
	{"CAP_DAC_READ_SEARCH", []string{"open_by_handle_at"}},
	{"CAP_PERFMON", []string{"perf_event_open"}},
	{"CAP_SYS_ADMIN", []string{
		"bpf", "clone", "clone3", "fanotify_init", "fanotify_mark", "fsconfig", "fsmount", "fsopen", "fspick",
		"lookup_dcookie", "mount", "mount_setattr", "move_mount", "open_tree", "open_tree_attr",
		"perf_event_open", "quotactl", "quotactl_fd", "setdomainname", "sethostname", "setns", "syslog",
		"umount2", "unshare",
	}},
	{"CAP_SYS_BOOT", []string{"reboot"}},
	{"CAP_SYS_CHROOT", []string{"chroot"}},
	{"CAP_SYS_MODULE", []string{"delete_module", "finit_module", "init_module"}},
	{"CAP_SYS_NICE", []string{"mbind", "set_mempolicy", "set_mempolicy_home_node"}},
	{"CAP_SYS_PACCT", []string{"acct"}},
	{"CAP_SYS_RAWIO", []string{"ioperm", "iopl"}},
	{"CAP_SYS_TIME", []string{"clock_settime", "settimeofday"}},
	{"CAP_SYS_TTY_CONFIG", []string{"vhangup"}},
	{"CAP_SYSLOG", []string{"syslog"}},
}
