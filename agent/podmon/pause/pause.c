// The pause process of a pod, and the process that makes them. Both run before
// the Go runtime exists: a constructor of the same program, so there is no
// second file to install.
//
// The maker is started by podmon once:
//
//   podmon pause-maker PADDING          (3: a socket to podmon, 4: a mount namespace)
//
// Each message on its socket asks for one pause, which it makes by fork alone.
// A program that is executed anew costs milliseconds and more memory each time.
// The message is the clone(2) flags (4 bytes) and strings, each ended by a zero
// byte: NAMESPACE/NAME, HOSTNAME, SYSCTLFILE=VALUE...; with it come one or two
// descriptors: the pause's socket to podmon, the network namespace to join. The
// answer is the pause's pid, or an errno below zero (4 bytes). The maker ends
// with podmon: when the socket is closed. Pauses are podmon's children, not the
// maker's.
//
// A pause starts in fresh ipc and uts (and pid) namespaces. It joins the network
// namespace, sets host name and sysctls, joins the empty mount namespace, drops
// every right, writes "ok" to its socket and waits for one byte from there:
// podmon has it on record then. If the socket is closed instead, podmon was
// killed before it had, and the pause ends: nobody would ever look for it. With
// the byte it waits for SIGTERM or SIGINT. On failure it writes what went wrong
// and ends.

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define CONTROL_FD 3
#define NOWHERE_FD 4
#define NOBODY 65535

static int link_fd; // a pause's socket to podmon

static void fail(const char *what, const char *which)
{
	dprintf(link_fd, "%s %s: %s", what, which, strerror(errno));
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

// The room that the maker's own arguments take, which a pause uses to say in
// `ps` whose it is.
static char *title;
static size_t title_size;

static void set_title(const char *pod)
{
	static const char prefix[] = "podmon\0pause"; // its last zero byte counts
	memset(title, 0, title_size);
	if (title_size <= sizeof prefix + 1)
		return;
	memcpy(title, prefix, sizeof prefix);
	strncpy(title + sizeof prefix, pod, title_size - sizeof prefix - 1);
}

// next gives the next string of a message; NULL after the last.
static char *next(char **at, const char *end)
{
	char *s = *at;
	if (s >= end)
		return NULL;
	*at = s + strlen(s) + 1;
	return s;
}

static void become_pause(char *at, const char *end, int net)
{
	char *pod = next(&at, end), *hostname = next(&at, end);
	if (!pod || !hostname) {
		errno = EINVAL;
		fail("read", "request");
	}
	// As process 1 of a shared pid namespace it inherits orphans: with
	// SIGCHLD ignored the kernel reaps them.
	handle(SIGCHLD, SIG_IGN, SA_NOCLDWAIT);
	handle(SIGTERM, quit, 0);
	handle(SIGINT, quit, 0);
	prctl(PR_SET_NAME, "pause", 0, 0, 0);
	set_title(pod);
	setsid();

	if (net >= 0 && setns(net, CLONE_NEWNET))
		fail("join", "network namespace");
	if (hostname[0] && sethostname(hostname, strlen(hostname)))
		fail("set host name", hostname);
	for (char *s; (s = next(&at, end));)
		set_sysctl(s);
	// The namespace's root is an empty read-only directory: a container that
	// sees this process (shared pid namespace) finds nothing behind
	// /proc/1/root.
	if (setns(NOWHERE_FD, CLONE_NEWNS))
		fail("join", "empty mount namespace");
	if (setgroups(0, NULL) || setresgid(NOBODY, NOBODY, NOBODY) ||
	    setresuid(NOBODY, NOBODY, NOBODY))
		fail("drop", "user");
	prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	if (write(link_fd, "ok", 2) != 2)
		_exit(1);
	char kept;
	ssize_t n;
	do
		n = read(link_fd, &kept, 1);
	while (n < 0 && errno == EINTR);
	if (n != 1)
		_exit(1);
	if (syscall(SYS_close_range, 0, ~0U, 0))
		for (int fd = 0; fd < 16; fd++)
			close(fd);
	for (;;)
		pause();
}

// receive reads one message and up to two descriptors. It gives the message's
// length, 0 at the end.
static ssize_t receive(char *buf, size_t size, int fds[2])
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(2 * sizeof(int))];
	} control;
	struct iovec iov = { buf, size };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control };
	ssize_t n;
	do
		n = recvmsg(CONTROL_FD, &msg, MSG_CMSG_CLOEXEC);
	while (n < 0 && errno == EINTR);
	fds[0] = fds[1] = -1;
	if (n <= 0)
		return n;
	struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
	if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS)
		memcpy(fds, CMSG_DATA(c), c->cmsg_len - CMSG_LEN(0));
	return n;
}

__attribute__((constructor(101))) static void pause_maker(int argc, char **argv)
{
	if (argc != 3 || strcmp(argv[1], "pause-maker") != 0)
		return;
	title = argv[0]; // the kernel lays arguments out one behind the other
	title_size = argv[2] + strlen(argv[2]) + 1 - title;
	prctl(PR_SET_NAME, "pause-maker", 0, 0, 0);
	static char message[64 << 10];
	for (;;) {
		int fds[2];
		ssize_t n = receive(message, sizeof message - 1, fds);
		if (n <= 0)
			_exit(0); // podmon has ended
		uint32_t flags = 0;
		int32_t pid = -EINVAL;
		if (n > (ssize_t)sizeof flags && fds[0] >= 0) {
			message[n] = '\0';
			memcpy(&flags, message, sizeof flags);
			pid = syscall(SYS_clone, (unsigned long)flags | CLONE_PARENT | SIGCHLD, NULL, NULL, NULL, NULL);
			if (pid < 0)
				pid = -errno;
		}
		if (pid == 0) {
			close(CONTROL_FD);
			link_fd = fds[0];
			become_pause(message + sizeof flags, message + n, fds[1]);
		}
		for (int i = 0; i < 2; i++)
			if (fds[i] >= 0)
				close(fds[i]);
		if (write(CONTROL_FD, &pid, sizeof pid) != sizeof pid)
			_exit(1);
	}
}
