#!/usr/bin/env bash
# Packs bin/ as a Debian package and a tarball, into dist/.
set -euo pipefail
cd "$(dirname "$0")/.."

arch=$(dpkg --print-architecture)
version=0.1.0~$(git show -s --format=%cd --date=format:%Y%m%d HEAD 2>/dev/null || date +%Y%m%d)
stage=$(mktemp -d)
chmod 0755 "$stage"
trap 'rm -rf "$stage"' EXIT

install -D -m 0755 bin/clusterd bin/clusterctl -t "$stage/usr/bin"
install -D -m 0644 packaging/clusterd.service -t "$stage/lib/systemd/system"
install -D -m 0644 README.md -t "$stage/usr/share/doc/clusterd"
bin/clusterctl completion bash >"$stage/clusterctl.bash"
install -D -m 0644 "$stage/clusterctl.bash" "$stage/usr/share/bash-completion/completions/clusterctl"
rm "$stage/clusterctl.bash"

mkdir -p dist
tar -C "$stage" --owner=0 --group=0 --sort=name -czf "dist/clusterd_${version}_${arch}.tar.gz" .

mkdir "$stage/DEBIAN"
cat >"$stage/DEBIAN/control" <<CONTROL
Package: clusterd
Version: $version
Architecture: $arch
Maintainer: The clusterd authors <maintainers@clusterd.invalid>
Section: admin
Priority: optional
Installed-Size: $(du -sk --exclude=DEBIAN "$stage" | cut -f1)
Description: machines that each run one program form one computer
 clusterd joins machines by gossip, keeps one truth in a Raft-replicated store
 and makes pods itself. It speaks Kubernetes' API.
CONTROL
cat >"$stage/DEBIAN/postinst" <<'POSTINST'
#!/bin/sh
set -e
if [ -d /run/systemd/system ]; then
	systemctl daemon-reload
	# An upgrade: containers keep running while clusterd is replaced.
	if systemctl is-active --quiet clusterd; then systemctl restart clusterd; fi
fi
POSTINST
cat >"$stage/DEBIAN/prerm" <<'PRERM'
#!/bin/sh
set -e
if [ "$1" = remove ] && [ -d /run/systemd/system ]; then systemctl disable --now clusterd || true; fi
PRERM
chmod 0755 "$stage/DEBIAN/postinst" "$stage/DEBIAN/prerm"
dpkg-deb --root-owner-group --build "$stage" "dist/clusterd_${version}_${arch}.deb" >/dev/null
ls -l dist
