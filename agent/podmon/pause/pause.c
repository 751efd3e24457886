//go:build cgo

// The pause: a process that holds a pod's namespaces and does nothing else.
// It runs as a constructor, before the Go runtime exists, so that it costs a
// few pages of memory instead of megabytes.
//
//   podmon pause NAMESPACE/NAME NETFD MNTFD HOSTNAME [SYSCTLFILE=VALUE ...]
//
// It starts in fresh ipc and uts (and pid) namespaces. It joins the network
// namespace NETFD (-1: stay), sets host name and sysctls, joins the empty mount
// namespace MNTFD, drops every right, writes "ok" to descriptor 3 and waits for
// one byte from there: podmon has it on record then. If descriptor 3 is closed
// instead, podmon was killed before it had, and the pause ends: nobody would
// ever look for it. With the byte it waits for SIGTERM or SIGINT.
// On failure it writes what went wrong and ends.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define STATUS_FD 3
#define NOBODY 65535

static void fail(const char *what, const char *which)
{
	dprintf(STATUS_FD, "%s %s: %s", what, which, strerror(errno));
	_exit(1);
}

static void quit(int sig)
{
	(void)sig;
	_exit(0);
}

static void set_sysctl(char *assignment)
{
	char *value = strchr(assignment, '=');
	if (!value) {
		errno = EINVAL;
		fail("set sysctl", assignment);
	}
	*value++ = '\0';
	size_t len = strlen(value);
	int fd = open(assignment, O_WRONLY | O_CLOEXEC);
	if (fd < 0 || write(fd, value, len) != (ssize_t)len)
		fail("set sysctl", assignment);
	close(fd);
}

static void handle(int sig, void (*handler)(int), int flags)
{
	struct sigaction sa;
	memset(&sa, 0, sizeof sa);
	sa.sa_handler = handler;
	sa.sa_flags = flags;
	sigaction(sig, &sa, NULL);
}

__attribute__((constructor(101))) static void pause_main(int argc, char **argv)
{
	if (argc < 6 || strcmp(argv[1], "pause") != 0)
		return;
	int net = atoi(argv[3]), mnt = atoi(argv[4]);
	const char *hostname = argv[5];

	// As process 1 of a shared pid namespace it inherits orphans: with
	// SIGCHLD ignored the kernel reaps them.
	handle(SIGCHLD, SIG_IGN, SA_NOCLDWAIT);
	handle(SIGTERM, quit, 0);
	handle(SIGINT, quit, 0);
	prctl(PR_SET_NAME, "pause", 0, 0, 0);

	if (net >= 0 && setns(net, CLONE_NEWNET))
		fail("join", "network namespace");
	if (hostname[0] && sethostname(hostname, strlen(hostname)))
		fail("set host name", hostname);
	for (int i = 6; i < argc; i++)
		set_sysctl(argv[i]);
	// The namespace's root is an empty read-only directory: a container that
	// sees this process (shared pid namespace) finds nothing behind
	// /proc/1/root.
	if (setns(mnt, CLONE_NEWNS))
		fail("join", "empty mount namespace");
	if (setgroups(0, NULL) || setresgid(NOBODY, NOBODY, NOBODY) ||
	    setresuid(NOBODY, NOBODY, NOBODY))
		fail("drop", "user");
	prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	if (write(STATUS_FD, "ok", 2) != 2)
		_exit(1);
	char kept;
	ssize_t n;
	do
		n = read(STATUS_FD, &kept, 1);
	while (n < 0 && errno == EINTR);
	if (n != 1)
		_exit(1);
	if (syscall(SYS_close_range, 0, ~0U, 0))
		for (int fd = 0; fd < 16; fd++)
			close(fd);
	for (;;)
		pause();
}
