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
// byte: NAMESPACE/NAME, HOSTNAME, SYSCTLFILE=VALUE... (below /proc); with it come one to three
// descriptors: the pause's socket to podmon, the network namespace to join, the
// user namespace to join. The answer is the pause's pid, or an errno below zero
// (4 bytes). The maker ends with podmon: when the socket is closed. Pauses are
// podmon's children, not the maker's.
//
// A pause starts in fresh ipc and uts (and pid) namespaces. It joins the network
// namespace and the empty mount namespace, sets host name and sysctls, drops
// every right, writes "ok" to its socket and waits for one byte from there:
// podmon has it on record then. If the socket is closed instead, podmon was
// killed before it had, and the pause ends: nobody would ever look for it. With
// the byte it waits for SIGTERM or SIGINT. On failure it writes what went wrong
// and ends.
//
// Fresh namespaces belong to the user namespace of who makes them. So for a pod
// with a user namespace there is a go-between: a child of the maker that joins
// all there is to join, the user namespace last, makes the pause and ends, by
// which the pause becomes podmon's (prctl(2), PR_SET_CHILD_SUBREAPER).

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
#include <sys/wait.h>
#include <unistd.h>

#define CONTROL_FD 3
#define NOWHERE_FD 4
#define NOBODY 65535

enum { LINK, NET, USER, FDS }; // what may come with a request, in this order

static int link_fd; // a pause's socket to podmon
static int proc_fd; // /proc, which the empty mount namespace does not have

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
	int fd = openat(proc_fd, assignment, O_WRONLY | O_CLOEXEC);
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

// enter joins what the pause does not make itself; it needs the host's root.
static void enter(int net)
{
	if (net >= 0 && setns(net, CLONE_NEWNET))
		fail("join", "network namespace");
	// The namespace's root is an empty read-only directory: a container that
	// sees the pause (shared pid namespace) finds nothing behind /proc/1/root.
	if (setns(NOWHERE_FD, CLONE_NEWNS))
		fail("join", "empty mount namespace");
}

static void become_pause(char *at, const char *end)
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

	if (hostname[0] && sethostname(hostname, strlen(hostname)))
		fail("set host name", hostname);
	for (char *s; (s = next(&at, end));)
		set_sysctl(s);
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

// make clones with flags, as a child of its caller's parent where those say so.
static pid_t make(unsigned long flags)
{
	pid_t pid = syscall(SYS_clone, flags | SIGCHLD, NULL, NULL, NULL, NULL);
	return pid < 0 ? -errno : pid;
}

// go_between makes a pause in a user namespace and writes its pid, or an errno
// below zero, to out.
static void go_between(uint32_t flags, char *at, const char *end, const int fds[FDS], int out)
{
	link_fd = fds[LINK];
	enter(fds[NET]);
	if (setns(fds[USER], CLONE_NEWUSER))
		fail("join", "user namespace");
	// Sysctls of the ipc namespace may be set by its root alone.
	if (setgroups(0, NULL) || setresgid(0, 0, 0) || setresuid(0, 0, 0))
		fail("become", "root of the user namespace");
	int32_t pid = make(flags);
	if (pid == 0) {
		close(out);
		become_pause(at, end);
	}
	_exit(write(out, &pid, sizeof pid) != sizeof pid);
}

// make_inside has a go-between make a pause, and waits until that has ended. It
// gives the pause's pid, or an errno below zero.
static int32_t make_inside(uint32_t flags, char *at, const char *end, const int fds[FDS])
{
	int32_t pause = -EIO; // the go-between's socket tells of what went wrong
	int said[2];
	if (pipe2(said, O_CLOEXEC))
		return -errno;
	pid_t pid = make(0);
	if (pid == 0) {
		close(CONTROL_FD);
		close(said[0]);
		go_between(flags, at, end, fds, said[1]);
	}
	close(said[1]);
	if (pid < 0)
		pause = pid;
	else if (read(said[0], &pause, sizeof pause) != sizeof pause)
		pause = -EIO;
	close(said[0]);
	if (pid > 0)
		while (waitpid(pid, NULL, 0) < 0 && errno == EINTR)
			;
	return pause;
}

// receive reads one message and up to FDS descriptors. It gives the message's
// length, 0 at the end.
static ssize_t receive(char *buf, size_t size, int fds[FDS])
{
	union {
		struct cmsghdr head;
		char room[CMSG_SPACE(FDS * sizeof(int))];
	} control;
	struct iovec iov = { buf, size };
	struct msghdr msg = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control };
	ssize_t n;
	do
		n = recvmsg(CONTROL_FD, &msg, MSG_CMSG_CLOEXEC);
	while (n < 0 && errno == EINTR);
	for (int i = 0; i < FDS; i++)
		fds[i] = -1;
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
	proc_fd = open("/proc", O_PATH | O_DIRECTORY | O_CLOEXEC);
	static char message[64 << 10];
	for (;;) {
		int fds[FDS];
		ssize_t n = receive(message, sizeof message - 1, fds);
		if (n <= 0)
			_exit(0); // podmon has ended
		uint32_t flags = 0;
		int32_t pid = -EINVAL;
		if (n > (ssize_t)sizeof flags && fds[LINK] >= 0) {
			char *at = message + sizeof flags;
			message[n] = '\0';
			memcpy(&flags, message, sizeof flags);
			if (fds[USER] >= 0)
				pid = make_inside(flags, at, message + n, fds);
			else
				pid = make(flags | CLONE_PARENT);
			if (pid == 0) {
				close(CONTROL_FD);
				link_fd = fds[LINK];
				enter(fds[NET]);
				become_pause(at, message + n);
			}
		}
		for (int i = 0; i < FDS; i++)
			if (fds[i] >= 0)
				close(fds[i]);
		if (write(CONTROL_FD, &pid, sizeof pid) != sizeof pid)
			_exit(1);
	}
}
