#!/usr/bin/env bash
# Packs bin/ as a Debian package and a tarball, into dist/. For another ARCH the
# programs are those of the folder that is given; bin/ prints their manual pages.
#
#   packaging/build.sh
#   ARCH=arm64 packaging/build.sh bin/arm64
set -euo pipefail
cd "$(dirname "$0")/.."

# Versions order by the number of commits, which a shallow clone does not know: its
# packages would count as older than those that are installed.
if [ "$(git rev-parse --is-shallow-repository 2>/dev/null)" = true ]; then
	echo "this clone is shallow, and the package's version is the number of commits: run git fetch --unshallow" >&2
	exit 1
fi
arch=${ARCH:-$(dpkg --print-architecture)} programs=${1:-bin}
commits=$(git rev-list --count HEAD 2>/dev/null || echo 0)
date=$(git log -1 --format=%cD 2>/dev/null || date -R)
version=0.1.0~$commits.$(git rev-parse --short=7 HEAD 2>/dev/null || echo unversioned)
# Files of the package bear the commit's time: two builds of one commit are equal.
SOURCE_DATE_EPOCH=$(date -d "$date" +%s)
export SOURCE_DATE_EPOCH
umask 022
stage=$(mktemp -d)
chmod 0755 "$stage"
trap 'rm -rf "$stage"' EXIT
doc=$stage/usr/share/doc/clusterd

install -D -m 0755 "$programs/clusterd" "$programs/clusterctl" -t "$stage/usr/bin"
install -D -m 0644 packaging/clusterd.service -t "$stage/usr/lib/systemd/system"
install -D -m 0644 packaging/copyright -t "$doc"
packaging/docs.sh "$doc"
install -D -m 0644 packaging/lintian-overrides "$stage/usr/share/lintian/overrides/clusterd"
for shell in bash:usr/share/bash-completion/completions/PROG zsh:usr/share/zsh/vendor-completions/_PROG fish:usr/share/fish/vendor_completions.d/PROG.fish; do
	for prog in clusterd clusterctl; do
		file=$stage/${shell#*:}
		file=${file/PROG/$prog}
		mkdir -p "$(dirname "$file")"
		"bin/$prog" completion "${shell%%:*}" >"$file"
		chmod 0644 "$file"
	done
done
command -v help2man >/dev/null || {
	echo "help2man is missing, which writes the manual pages: run hack/deps.sh deb as root, or: sudo apt-get install help2man" >&2
	exit 1
}
for page in "clusterd 8 node of a cluster" "clusterctl 1 command line of a cluster"; do
	read -r prog section summary <<<"$page"
	mkdir -p "$stage/usr/share/man/man$section"
	LC_ALL=C.UTF-8 help2man --no-info --section "$section" --name "$summary" --version-string "$version" --source "clusterd $version" "bin/$prog" |
		gzip -9n >"$stage/usr/share/man/man$section/$prog.$section.gz"
done
printf 'clusterd (%s) unstable; urgency=medium\n\n  * Built from commit %.12s.\n\n -- The clusterd authors <maintainers@clusterd.invalid>  %s\n' \
	"$version" "$(git rev-parse HEAD 2>/dev/null || echo unknown)" "$date" | gzip -9n >"$doc/changelog.gz"

mkdir -p dist
# Files alone: a folder in the archive would take the place of a link to a folder, or change
# the mode of one, where it is unpacked over a system.
tarball=$PWD/dist/clusterd_${version}_${arch}.tar.gz
(cd "$stage" && find . -type f -printf '%P\0' | LC_ALL=C sort -z |
	tar --null --no-recursion --owner=0 --group=0 --mtime="@$SOURCE_DATE_EPOCH" -czf "$tarball" -T -)

mkdir "$stage/DEBIAN"
cat >"$stage/DEBIAN/control" <<CONTROL
Package: clusterd
Version: $version
Architecture: $arch
Maintainer: The clusterd authors <maintainers@clusterd.invalid>
Section: admin
Priority: optional
Recommends: nfs-common
Homepage: https://github.com/clusterd/clusterd
Installed-Size: $(du -sk --exclude=DEBIAN "$stage" | cut -f1)
Description: Kubernetes-compatible cluster in one program
 clusterd makes a cluster of the machines it runs on. Machines find each other
 by gossip, keep their state in a Raft-replicated store, and run pods without
 a container runtime, network plugins or an etcd beside them.
 .
 clusterctl is its command line; kubectl and helm work as well.
CONTROL
install -m 0755 packaging/postinst packaging/prerm packaging/postrm "$stage/DEBIAN"
find "$stage" -exec touch --no-dereference --date="@$SOURCE_DATE_EPOCH" {} +
dpkg-deb --root-owner-group --build "$stage" "dist/clusterd_${version}_${arch}.deb" >/dev/null
ls -l dist
