#!/usr/bin/env bash
# Builds clusterd, clusterctl, podmon and imageworker for another architecture into bin/ARCH.
# podmon is linked with C: by Debian's cross compiler, with the libseccomp of that
# architecture, which is unpacked beside and not installed. make cross calls it;
# with FAULTPOINTS=1 it makes the podmon of test-vm, too.
set -euo pipefail
cd "$(dirname "$0")/.."
arch=$ARCH GO=${GO:-go}
case $arch in
amd64) gnu=x86_64-linux-gnu ;;
arm64) gnu=aarch64-linux-gnu ;;
*)
	echo "ARCH=$arch: clusterd is built for amd64 and arm64" >&2
	exit 1
	;;
esac
out=$PWD/bin/$arch sysroot=$PWD/bin/$arch/sysroot
if ! command -v "$gnu-gcc" >/dev/null; then
	echo "missing: run: apt-get install -y --no-install-recommends gcc-${gnu/_/-} libc6-dev-$arch-cross" >&2
	exit 1
fi
if [ ! -e "$sysroot/usr/include/seccomp.h" ]; then
	debs=$(mktemp -d)
	trap 'rm -rf "$debs"' EXIT
	(cd "$debs" && "$OLDPWD/hack/aptarch.sh" "$arch" apt-get -qq -o APT::Sandbox::User=root download libseccomp-dev)
	mkdir -p "$sysroot"
	dpkg-deb -x "$debs"/libseccomp-dev_*.deb "$sysroot"
fi

export GOARCH=$arch GOOS=linux
podmon() {
	CC=$gnu-gcc CGO_ENABLED=1 PKG_CONFIG_SYSROOT_DIR=$sysroot PKG_CONFIG_LIBDIR=$sysroot/usr/lib/$gnu/pkgconfig \
		CGO_CFLAGS=-I$sysroot/usr/include CGO_LDFLAGS=-L$sysroot/usr/lib/$gnu \
		"$GO" build -tags "$PODMON_TAGS${2:+ $2}" -ldflags "$PODMON_LDFLAGS" -o "$1" ./cmd/podmon
}
podmon "$out/podmon"
[ -z "${FAULTPOINTS:-}" ] || podmon "$out/vm/podmon" faultpoints
CGO_ENABLED=0 "$GO" build -ldflags '-s -w' -o "$out/imageworker" ./cmd/imageworker
# clusterd carries these programs instead of those of this machine.
printf '{"Replace": {"%s": "%s", "%s": "%s"}}\n' "$PWD/agent/runtime/podmonbin/podmon" "$out/podmon" \
	"$PWD/agent/image/imageworkerbin/imageworker" "$out/imageworker" >"$out/overlay.json"
CGO_ENABLED=0 "$GO" build -overlay "$out/overlay.json" -ldflags "$LDFLAGS" -o "$out/" ./cmd/clusterd ./cmd/clusterctl
