#!/usr/bin/env bash
# Builds the releases that upgrade.sh rolls out: releases.sh FOLDER
# next is this tree's clusterd by another version; exits, gone and idles are none.
set -euo pipefail
out=$(realpath -m "$1")
cd "$(dirname "$0")/../.."
mkdir -p "$out"
go=${GO:-go}
export CGO_ENABLED=0
flags=${CLUSTERD_LDFLAGS:-}
[[ $flags == *"-X main.release="* ]] || { echo "CLUSTERD_LDFLAGS is \"$flags\": it must be bin/clusterd's linker flags, as make gives them" >&2; exit 1; }
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
mkdir -p "$stage/usr/bin"
pack() { # NAME PACKAGE FLAGS
	"$go" build -ldflags "$3" -o "$stage/usr/bin/clusterd" "$2"
	tar -C "$stage" --owner=0 --group=0 -czf "$out/$1.tar.gz" .
}
pack next ./cmd/clusterd "$(sed -E 's/-X main\.release=[^ ]+/-X main.release=v0.1.0-next/' <<<"$flags")"
for how in exits gone idles; do
	pack "$how" ./e2e/testdata/brokenrelease "-s -w -X main.version=v0.1.0-$how -X main.how=$how"
done
