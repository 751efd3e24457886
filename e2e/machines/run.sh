#!/usr/bin/env bash
# The package on real systemd, by the repository's own Vagrantfile: machines with
# cgroup v2 alone under qemu, without hardware virtualization.
#
#   e2e/machines/run.sh      NODES machines, default 1; MACHINES_SECONDS bounds the run (default 3600)
#
# libvirtd and all machines live in namespaces of their own (network, mounts,
# processes) with folders of their own: when this ends, however it ends, they
# are gone. Kept are the box and the log, in bin/machines.
set -euo pipefail
cd "$(dirname "$0")/../.."
repo=$PWD cache=$PWD/bin/machines
export NODES=${NODES:-1}
fail() { echo "machines: $*" >&2; exit 1; }

[ "$(id -u)" -eq 0 ] || fail "needs root, for the namespaces and the box: sudo make vagrant-test"
missing=()
for need in vagrant:vagrant libvirtd:libvirt-daemon-system virsh:libvirt-clients qemu-system-x86_64:qemu-system-x86 qemu-img:qemu-utils dnsmasq:dnsmasq-base debootstrap:debootstrap iptables:iptables ssh:openssh-client; do
	command -v "${need%:*}" >/dev/null || missing+=("${need#*:}")
done
dpkg -s vagrant-libvirt >/dev/null 2>&1 || missing+=(vagrant-libvirt)
[ ${#missing[@]} -eq 0 ] || fail "missing: run: apt-get install -y --no-install-recommends ${missing[*]}"
package=$(ls -t dist/clusterd_*.deb 2>/dev/null | head -1)
[ -n "$package" ] || fail "dist/ holds no package: run: make deb"

mkdir -p "$cache"
box=$cache/clusterd.box
if [ ! -e "$box" ] || [ e2e/machines/box.sh -nt "$box" ]; then
	echo "building the box (some minutes, kept in bin/machines)"
	e2e/machines/box.sh "$box"
fi
work=$(mktemp -d -p "$cache" run.XXXXXX)
trap 'rm -rf --one-file-system "$work"' EXIT
[ "$NODES" != 1 ] || e2e/machines/releases.sh "$work/releases"
log=$cache/log.txt
echo "log: $log"
timeout --foreground "${MACHINES_SECONDS:-3600}" \
	unshare --net --mount --pid --fork --kill-child=SIGKILL --mount-proc --propagation private \
	env BOX_FILE="$box" WORK="$work" RELEASES="$work/releases" REPO="$repo" bash e2e/machines/inside.sh 2>&1 | tee "$log"
