#!/usr/bin/env bash
# Boots Debian's cloud kernel in an emulated machine, where cgroup v2 is alone,
# and runs there podmon's suite (agent/runtime), netsetup's TestVM…, for which that
# kernel has WireGuard, and the TestVM… tests of this folder, which use `clusterd dev`.
# Needs no hardware virtualization and no root. `make test-vm` builds what it
# takes and calls it.
#
#   e2e/vm/run.sh [-k] [TEST]   TEST: a pattern as for go test -run; -k keeps the folder
#
# VM_SECONDS bounds the whole run (default 2400), VM_CPUS and VM_MEMORY size
# the machine (default 2, 2048 MiB), VM_KERNEL names another kernel package.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=$PWD/e2e/vm cache=$PWD/bin/vm
GO=${GO:-go}
keep=
[ "${1:-}" = -k ] && keep=1 && shift
pattern=${1:-TestRoot|TestVM}

fail() { echo "vm: $*" >&2; exit 1; }

missing=()
command -v qemu-system-x86_64 >/dev/null || missing+=(qemu-system-x86)
command -v mke2fs >/dev/null || missing+=(e2fsprogs)
command -v dpkg-deb >/dev/null || missing+=(dpkg)
[ ${#missing[@]} -eq 0 ] || fail "missing: run: apt-get install -y --no-install-recommends ${missing[*]}"
for f in clusterd clusterctl hello.tar vm/podmon; do
	[ -e "bin/$f" ] || fail "bin/$f is missing: run: make test-vm"
done

# The kernel and a shell, as Debian packages them; kept for the next run.
mkdir -p "$cache"
kernel=${VM_KERNEL:-$(apt-cache depends linux-image-cloud-amd64 | awk '/Depends: linux-image-/ {print $2; exit}')}
[ -n "$kernel" ] || fail "apt knows no linux-image-cloud-amd64: run apt-get update, or name a kernel package in VM_KERNEL"
for package in "$kernel" busybox-static; do
	compgen -G "$cache/${package}_*.deb" >/dev/null && continue
	(cd "$cache" && apt-get -qq -o APT::Sandbox::User=root download "$package") || fail "$package cannot be downloaded: run apt-get update and try again"
done

work=$(mktemp -d)
qemu=
cleanup() {
	[ -z "$qemu" ] || kill "$qemu" 2>/dev/null || true
	[ -n "$keep" ] && printf "vm: kept %s\\n" "$work" || rm -rf "$work"
}
trap cleanup EXIT
root=$work/root boot=$work/boot
mkdir -p "$root"/{bin,dev,etc,proc,run,sbin,sys,tmp,var/lib} "$boot"/{bin,dev,new,proc}
for deb in "$cache/${kernel}"_*.deb "$cache"/busybox-static_*.deb; do
	dpkg-deb -x "$deb" "$work/packages"
done
version=${kernel#linux-image-}
busybox=$work/packages/bin/busybox

# The root file system: the programs, the kernel's modules, the tests.
mkdir -p "$root/lib"
cp -a "$work/packages/lib/modules" "$root/lib/"
"$busybox" depmod -b "$root" "$version" 2>/dev/null
cp "$busybox" "$root/bin/"
for applet in $("$busybox" --list); do [ -e "$root/bin/$applet" ] || ln -s busybox "$root/bin/$applet"; done
ln -s /bin/busybox "$root/sbin/init"
ln -s /bin/busybox "$root/sbin/modprobe"
cp bin/clusterd bin/clusterctl bin/hello.tar "$root/bin/"
cp "$here/guest.sh" "$root/etc/guest"
printf '::sysinit:/etc/guest mounts\nttyS0::once:/etc/guest checks\n' >"$root/etc/inittab"
printf 'root:x:0:0:root:/:/bin/sh\n' >"$root/etc/passwd"
printf 'root:x:0:\n' >"$root/etc/group"
printf 'PRETTY_NAME="clusterd test machine"\n' >"$root/etc/os-release"
printf '%s\n' "$pattern" >"$root/etc/pattern"
: >"$root/etc/resolv.conf"
export CGO_ENABLED=0
$GO test -c -o "$root/bin/vm.test" ./e2e/vm
$GO test -c -o "$root/bin/podmon.test" ./agent/runtime
$GO test -c -o "$root/bin/netsetup.test" ./netsetup
mkdir "$root/programs"
cp bin/vm/podmon "$root/programs/"
$GO build -ldflags '-s -w' -o "$root/programs/box" ./agent/runtime/testdata/box
mke2fs -q -F -t ext4 -d "$root" -E lazy_itable_init=1 "$work/disk" 4G >/dev/null

# What leads to it: the disk's driver and a script.
cp "$busybox" "$boot/bin/"
ln -s busybox "$boot/bin/sh"
for part in modules.dep kernel/drivers/virtio kernel/drivers/block/virtio_blk.ko; do
	mkdir -p "$boot/lib/modules/$version/$(dirname $part)"
	cp -r "$root/lib/modules/$version/$part" "$boot/lib/modules/$version/$part"
done
cp "$here/boot.sh" "$boot/init"
(cd "$boot" && find . | "$busybox" cpio -o -H newc 2>/dev/null) | gzip -1 >"$work/initrd"

echo "vm: booting $kernel"
timeout --foreground "${VM_SECONDS:-2400}" qemu-system-x86_64 -accel tcg,thread=multi -cpu max \
	-smp "${VM_CPUS:-2}" -m "${VM_MEMORY:-2048}" -nodefaults -no-reboot -display none -serial file:"$work/console" \
	-drive file="$work/disk",if=virtio,format=raw,cache=unsafe \
	-kernel "$work/packages/boot/vmlinuz-$version" -initrd "$work/initrd" \
	-append "console=ttyS0 quiet panic=-1 cgroup_no_v1=all" &
qemu=$!
tail -n +1 -s 1 --pid "$qemu" -F "$work/console" 2>/dev/null &
shown=$!
code=0
wait "$qemu" || code=$?
qemu=
wait "$shown" || true
[ "$code" -ne 124 ] || fail "no end after ${VM_SECONDS:-2400} s"
if [ -n "${CLUSTERD_FEATURES:-}" ]; then
	sed -n 's/\r$//; s/^FEATURE //p' "$work/console" >>"$CLUSTERD_FEATURES"
fi
grep -q $'^VM-RESULT 0\r*$' "$work/console" || fail "FAILED"
echo "vm: passed"
