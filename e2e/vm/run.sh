#!/usr/bin/env bash
# Boots Debian's cloud kernel in an emulated machine, where cgroup v2 is alone,
# and runs there podmon's suite (agent/runtime), what needs a kernel with WireGuard
# (netsetup's TestVM…, e2e's TestE2EWireGuard), and the TestVM… tests of this folder,
# which use `clusterd dev`.
# Needs no hardware virtualization and no root. `make test-vm` builds what it
# takes and calls it.
#
#   e2e/vm/run.sh [-k] [TEST]   TEST: a pattern as for go test -run; -k keeps the folder
#
# VM_SECONDS bounds the whole run (default 2400), VM_CPUS and VM_MEMORY size
# the machine (default 2, 2048 MiB), VM_KERNEL names another kernel package, ARCH
# another architecture (amd64 or arm64), whose programs lie in bin/ARCH.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=$PWD/e2e/vm cache=$PWD/bin/vm apt=$PWD/hack/aptarch.sh
GO=${GO:-go}
host=$(dpkg --print-architecture)
arch=${ARCH:-$host} programs=bin
[ "$arch" = "$host" ] || programs=bin/$arch
keep=
[ "${1:-}" = -k ] && keep=1 && shift
pattern=${1:-TestRoot|TestVM|TestE2EWireGuard}

fail() { echo "vm: $*" >&2; exit 1; }

case $arch in
amd64) qemu=(qemu-system-x86_64 -cpu max) package=qemu-system-x86 console=ttyS0 ;;
arm64) qemu=(qemu-system-aarch64 -machine virt -cpu max,pauth-impdef=on) package=qemu-system-arm console=ttyAMA0 ;;
*) fail "ARCH=$arch: there are machines for amd64 and arm64" ;;
esac
missing=()
command -v "${qemu[0]}" >/dev/null || missing+=("$package")
command -v mke2fs >/dev/null || missing+=(e2fsprogs)
command -v dpkg-deb >/dev/null || missing+=(dpkg)
[ ${#missing[@]} -eq 0 ] || fail "missing: run: apt-get install -y --no-install-recommends ${missing[*]}"
for f in clusterd clusterctl hello.tar vm/podmon; do
	[ -e "$programs/$f" ] || fail "$programs/$f is missing: run: make test-vm"
done

# The kernel and a shell, as Debian packages them; kept for the next run.
mkdir -p "$cache"
kernel=${VM_KERNEL:-$("$apt" "$arch" apt-cache depends "linux-image-cloud-$arch" | awk '/Depends: linux-image-/ {print $2; exit}')}
[ -n "$kernel" ] || fail "apt knows no linux-image-cloud-$arch: run apt-get update, or name a kernel package in VM_KERNEL"
# unpack ARCH PACKAGE puts its files into $work/packages/ARCH.
unpack() {
	compgen -G "$cache/$2_*_$1.deb" >/dev/null ||
		(cd "$cache" && "$apt" "$1" apt-get -qq -o APT::Sandbox::User=root download "$2") || fail "$2 cannot be downloaded: run apt-get update and try again"
	mkdir -p "$work/packages"
	dpkg-deb -x "$(compgen -G "$cache/$2_*_$1.deb" | tail -1)" "$work/packages/$1"
}

work=$(mktemp -d)
machine=
cleanup() {
	[ -z "$machine" ] || kill "$machine" 2>/dev/null || true
	[ -n "$keep" ] && printf "vm: kept %s\\n" "$work" || rm -rf "$work"
}
trap cleanup EXIT
root=$work/root boot=$work/boot
mkdir -p "$root"/{bin,dev,etc,proc,run,sbin,sys,tmp,var/lib} "$boot"/{bin,dev,new,proc}
unpack "$arch" "$kernel"
unpack "$arch" busybox-static
unpack "$host" busybox-static
version=${kernel#linux-image-}
packages=$work/packages/$arch
busybox=$packages/bin/busybox own=$work/packages/$host/bin/busybox # the machine's, and the one that runs here

# The root file system: the programs, the kernel's modules, the tests.
mkdir -p "$root/lib"
cp -a "$packages/lib/modules" "$root/lib/"
"$own" depmod -b "$root" "$version" 2>/dev/null
cp "$busybox" "$root/bin/"
for applet in $("$own" --list); do [ -e "$root/bin/$applet" ] || ln -s busybox "$root/bin/$applet"; done
ln -s /bin/busybox "$root/sbin/init"
ln -s /bin/busybox "$root/sbin/modprobe"
cp "$programs"/{clusterd,clusterctl,hello.tar} "$root/bin/"
cp "$here/guest.sh" "$root/etc/guest"
printf '::sysinit:/etc/guest mounts\n%s::once:/etc/guest checks\n' "$console" >"$root/etc/inittab"
printf 'root:x:0:0:root:/:/bin/sh\n' >"$root/etc/passwd"
printf 'root:x:0:\n' >"$root/etc/group"
printf 'PRETTY_NAME="clusterd test machine"\n' >"$root/etc/os-release"
printf '%s\n' "$pattern" >"$root/etc/pattern"
: >"$root/etc/resolv.conf"
export CGO_ENABLED=0 GOARCH=$arch
$GO test -c -o "$root/bin/vm.test" ./e2e/vm
$GO test -c -o "$root/bin/podmon.test" ./agent/runtime
$GO test -c -o "$root/bin/netsetup.test" ./netsetup
$GO test -c -o "$root/bin/claim.test" ./agent/claim
$GO test -c -o "$root/bin/e2e.test" ./e2e
mkdir "$root/programs"
cp "$programs/vm/podmon" "$root/programs/"
$GO build -ldflags '-s -w' -o "$root/programs/box" ./agent/runtime/testdata/box
mke2fs -q -F -t ext4 -d "$root" -O quota,project -E lazy_itable_init=1,quotatype=prjquota "$work/disk" 4G >/dev/null

# What leads to it: the disk's driver and a script.
cp "$busybox" "$boot/bin/"
ln -s busybox "$boot/bin/sh"
for part in modules.dep kernel/drivers/virtio kernel/drivers/block/virtio_blk.ko kernel/fs/quota; do
	mkdir -p "$boot/lib/modules/$version/$(dirname $part)"
	cp -r "$root/lib/modules/$version/$part" "$boot/lib/modules/$version/$part"
done
cp "$here/boot.sh" "$boot/init"
(cd "$boot" && find . | "$own" cpio -o -H newc 2>/dev/null) | gzip -1 >"$work/initrd"

echo "vm: booting $kernel"
timeout --foreground "${VM_SECONDS:-2400}" "${qemu[@]}" -accel tcg,thread=multi \
	-smp "${VM_CPUS:-2}" -m "${VM_MEMORY:-2048}" -nodefaults -no-reboot -display none -serial file:"$work/console" \
	-drive file="$work/disk",if=virtio,format=raw,cache=unsafe \
	-kernel "$packages/boot/vmlinuz-$version" -initrd "$work/initrd" \
	-append "console=$console quiet panic=-1 cgroup_no_v1=all" &
machine=$!
tail -n +1 -s 1 --pid "$machine" -F "$work/console" 2>/dev/null &
shown=$!
code=0
wait "$machine" || code=$?
machine=
wait "$shown" || true
[ "$code" -ne 124 ] || fail "no end after ${VM_SECONDS:-2400} s"
if [ -n "${CLUSTERD_FEATURES:-}" ]; then
	sed -n 's/\r$//; s/^FEATURE //p' "$work/console" >>"$CLUSTERD_FEATURES"
fi
grep -q $'^VM-RESULT 0\r*$' "$work/console" || fail "FAILED"
echo "vm: passed"
