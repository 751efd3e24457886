#!/usr/bin/env bash
# Checks what building and running clusterd needs, says what is missing and
# installs it with apt-get when it may.
#
#   hack/deps.sh [deb|go]   deb: with what the package needs; go: Go alone
set -euo pipefail

missing=()
command -v gcc >/dev/null || missing+=(gcc libc6-dev)
[ -e /usr/include/seccomp.h ] || missing+=(libseccomp-dev)
command -v ip >/dev/null || missing+=(iproute2)
command -v nsenter >/dev/null || missing+=(util-linux)

if [ "${1:-}" = deb ]; then # what only the package needs
	command -v help2man >/dev/null || missing+=(help2man)
	command -v dpkg-deb >/dev/null || missing+=(dpkg)
fi

if ! command -v "${GO:-go}" >/dev/null; then
	echo "go is missing: install Go 1.26 or newer (https://go.dev/dl) and run this again" >&2
	exit 1
fi
want=$(sed -n 's/^go \([0-9.]*\)$/\1/p' go.mod)
have=$("${GO:-go}" env GOVERSION 2>/dev/null | sed 's/^go//; s/[^0-9.].*//')
if [ "$(printf '%s\n' "$want" "$have" | sort -V | head -1)" != "$want" ]; then
	echo "go is ${have:-of an unknown version}, and $want or newer is needed: install it from https://go.dev/dl, or name another with make GO=/usr/local/go/bin/go" >&2
	exit 1
fi
if [ ${#missing[@]} -eq 0 ] || [ "${1:-}" = go ]; then # go: that alone is asked
	exit 0
fi
if ! command -v apt-get >/dev/null; then
	echo "missing: ${missing[*]} (Debian's names); install them and run this again" >&2
	exit 1
fi
if [ "$(id -u)" -ne 0 ]; then
	echo "missing: ${missing[*]}; run: sudo apt-get install -y ${missing[*]}" >&2
	exit 1
fi
echo "installing Debian packages: ${missing[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null 2>&1 || {
	apt-get update -qq
	apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}
