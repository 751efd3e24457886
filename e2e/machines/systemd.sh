#!/usr/bin/env bash
# `clusterctl upgrade`, and a shutdown, under a real systemd: make systemd-test
#
# systemd is the first process of namespaces of its own (processes, mounts, network,
# cgroups, names) with Debian's files, as in a container: it is no virtual machine, and
# the kernel is this one's. run.sh has machines, which take longer. When this ends,
# however it ends, all of it is gone. Kept are Debian's files and the log, in bin/machines.
set -euo pipefail
began=$SECONDS
say() { printf '%4d s  %s\n' $((SECONDS - began)) "$*"; }
address=192.0.2.11

# inside runs in the namespaces, and becomes systemd.
inside() {
	local root=$1 name options target
	mount --bind "$root" "$root"
	mount -t proc proc "$root/proc"
	mount -t sysfs sys "$root/sys"
	mount -t tmpfs -o mode=755 dev "$root/dev"
	mkdir -p "$root"/dev/{pts,shm}
	mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts "$root/dev/pts"
	ln -s pts/ptmx "$root/dev/ptmx"
	ln -s /proc/self/fd "$root/dev/fd"
	while read -r name options; do mknod -m 666 "$root/dev/$name" c $options; done <<-NODES
		null 1 3
		zero 1 5
		full 1 7
		random 1 8
		urandom 1 9
		tty 5 0
		kmsg 1 11
		fuse 10 229
	NODES
	if [ "$(stat -fc %T /sys/fs/cgroup)" = cgroup2fs ]; then
		mount -t cgroup2 cgroup "$root/sys/fs/cgroup"
	else
		mount -t tmpfs -o mode=755 cgroup "$root/sys/fs/cgroup"
		while read -r _ target name options _; do
			case $target:$name in /sys/fs/cgroup/*:cgroup*) ;; *) continue ;; esac
			mkdir "$root$target"
			options=${options#rw,} options=${options#*relatime} options=${options#,}
			case $options in name=*) options=none,$options ;; esac
			mount -t "$name" ${options:+-o "$options"} cgroup "$root$target"
		done </proc/mounts
	fi
	ip link set lo up
	ip link add eth0 type veth peer name wire # a network without anybody else
	ip addr add "$address/24" dev eth0
	ip link set wire up
	ip link set eth0 up
	ip route add default via 192.0.2.1
	echo n1 >/proc/sys/kernel/hostname
	cd "$root"
	mkdir -p .before
	pivot_root . .before
	exec /bin/sh -c 'umount -l /.before && exec env -i container=clusterd PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin /lib/systemd/systemd' </dev/null
}
if [ "${1:-}" = inside ]; then
	inside "$2"
fi

cd "$(dirname "$0")/../.."
cache=$PWD/bin/machines
fail() {
	say "FAILED: $*"
	[ -z "${init:-}" ] || { on n1 systemctl --no-pager -l status clusterd; on n1 journalctl --no-pager -n 60 -o short-monotonic -u clusterd; on n1 systemctl --failed --no-pager; } || true
	exit 1
}
[ "$(id -u)" -eq 0 ] || fail "needs root, for the namespaces: sudo make systemd-test"
command -v debootstrap >/dev/null || fail "missing: run: apt-get install -y --no-install-recommends debootstrap"
package=$(ls -t dist/clusterd_*.deb 2>/dev/null | head -1)
[ -n "$package" ] || fail "dist/ holds no package: run: make deb"

files=$cache/debian
if [ ! -e "$files/done" ]; then
	say "Debian's files (kept in bin/machines)"
	rm -rf --one-file-system "$files"
	mkdir -p "$cache"
	debootstrap --variant=minbase --include=systemd,systemd-sysv,dbus,iproute2,procps,kmod,ca-certificates bookworm "$files" "${DEBIAN_MIRROR:-http://deb.debian.org/debian}" >"$cache/debootstrap.log" 2>&1 || { tail -20 "$cache/debootstrap.log"; fail "debootstrap"; }
	rm -rf "$files"/var/cache/apt/archives/*.deb "$files"/var/lib/apt/lists/*
	: >"$files/done"
fi
WORK=$(mktemp -d -p "$cache" systemd.XXXXXX)
RELEASES=$cache/releases
cgroup=clusterd-systemd-$$
# each_cgroup DO…: once for each hierarchy of cgroups, with its folder.
each_cgroup() {
	local dir
	if [ "$(stat -fc %T /sys/fs/cgroup)" = cgroup2fs ]; then "$@" /sys/fs/cgroup; return; fi
	while read -r _ dir type _; do
		case $dir:$type in /sys/fs/cgroup/*:cgroup*) "$@" "$dir" ;; esac
	done </proc/mounts
}
enter() { # DIR PID
	mkdir -p "$1/$cgroup"
	for f in cpuset.cpus cpuset.mems; do # of version 1, where those of a new one are empty
		[ ! -e "$1/$f" ] || cat "$1/$f" >"$1/$cgroup/$f"
	done
	[ ! -e "$1/cgroup.clone_children" ] || echo 1 >"$1/$cgroup/cgroup.clone_children"
	echo "$2" >"$1/$cgroup/cgroup.procs"
}
leave() { [ ! -d "$1/$cgroup" ] || find "$1/$cgroup" -depth -type d -exec rmdir {} + 2>/dev/null; }
finish() {
	[ -z "${init:-}" ] || kill -KILL "$init" 2>/dev/null || true
	[ -z "${outer:-}" ] || wait "$outer" 2>/dev/null || true
	for _ in $(seq 50); do each_cgroup leave && break; sleep 0.2; done
	rm -rf --one-file-system "$WORK"
}
trap 'finished=$?; [ $finished -eq 0 ] || say "ended with $finished"; finish' EXIT

if [ ! bin/clusterd -ot "$RELEASES/idles.tar.gz" ] 2>/dev/null; then
	say "building the releases"
	e2e/machines/releases.sh "$RELEASES"
fi
cp -a "$files" "$WORK/root"
root=$WORK/root
tr -d - </proc/sys/kernel/random/uuid >"$root/etc/machine-id"
echo n1 >"$root/etc/hostname"
printf '127.0.0.1 localhost\n%s n1\n' "$address" >"$root/etc/hosts"
# What is the machine's: devices, the kernel's switches, terminals.
for mask in systemd-udevd.service systemd-udev-trigger.service systemd-udevd-kernel.socket systemd-udevd-control.socket systemd-sysctl.service systemd-modules-load.service console-getty.service getty.target dev-hugepages.mount sys-kernel-debug.mount sys-kernel-tracing.mount apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer dpkg-db-backup.timer; do
	ln -sf /dev/null "$root/etc/systemd/system/$mask"
done
mkfifo "$WORK/go"
(
	read -r _ <"$WORK/go" # in its cgroups by then
	exec unshare --pid --mount --net --uts --ipc --cgroup --fork --kill-child=SIGKILL --propagation private "$0" inside "$root"
) >"$WORK/console" 2>&1 &
outer=$!
# It goes on in cgroups of its own, which its namespace has for roots.
enter_all() { enter "$1" "$outer"; }
each_cgroup enter_all
echo go >"$WORK/go"
for _ in $(seq 100); do init=$(pgrep -P "$outer" || true); [ -z "$init" ] || break; sleep 0.1; done
[ -n "$init" ] || { cat "$WORK/console"; fail "the namespaces are not there"; }

on() { shift; nsenter -t "$init" -m -u -i -n -p -r -w env -i HOME=/root PATH=/usr/sbin:/usr/bin:/sbin:/bin "$@"; }
put() { cp "$2" "$root$3"; }
# until_true SECONDS WHAT COMMAND…: a level, waited for.
until_true() {
	local limit=$1 what=$2 end; shift 2; end=$((SECONDS + limit))
	until "$@" >"$WORK/last" 2>&1; do
		[ $SECONDS -lt $end ] || { cat "$WORK/last"; fail "$what"; }
		sleep 1
	done
	say "$what"
}
booted() { case $(on n1 systemctl is-system-running 2>&1) in running | degraded) ;; *) cat "$WORK/console"; return 1 ;; esac; }
until_true 120 "systemd is up" booted
on n1 systemctl --version | head -n 1
put n1 "$package" /root/clusterd.deb
put n1 bin/hello.tar /root/hello.tar
put n1 examples/hello.yaml /root/hello.yaml
on n1 dpkg -i /root/clusterd.deb >/dev/null
on n1 clusterd init --prepare --name n1 --advertise "$address"
on n1 systemctl enable -q --now clusterd # returns when the API answers
say "clusterd is active, as $(on n1 systemctl show -p Type --value clusterd) and $(on n1 systemctl show -p KillMode --value clusterd)"
ready() { on n1 clusterctl get nodes --no-headers | grep -w Ready; }
until_true 300 "the node is Ready" ready
on n1 clusterctl image load /root/hello.tar
on n1 clusterctl apply -f /root/hello.yaml >/dev/null
until_true 300 "hello.yaml is rolled out" on n1 clusterctl -n hello rollout status deployment/hello --timeout=5s

. e2e/machines/upgrade.sh
[ "$(on n1 systemctl is-failed clusterd || true)" = active ] || fail "the unit has failed"
gone() { ! kill -0 "$init" 2>/dev/null; }
. e2e/machines/shutdown.sh
init=
say "passed"
