#!/usr/bin/env bash
# Builds the programs of another commit into bin/old: previous.sh [COMMIT]
# COMMIT is the last tag unless given, or the commit before this one where there
# is no tag.
set -euo pipefail
cd "$(dirname "$0")/.."
ref=${1:-$(git describe --tags --abbrev=0 2>/dev/null || echo HEAD~1)}
commit=$(git rev-parse --verify "$ref^{commit}")
if [ "$(cat bin/old/commit 2>/dev/null)" = "$commit" ]; then
	echo "bin/old is of $commit already"
	exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
git archive "$commit" | tar -C "$work" -xf -
make -C "$work" --no-print-directory build VERSION="$(git describe --tags --always "$commit")" COMMIT="$commit" >&2
mkdir -p bin/old
cp "$work"/bin/{clusterd,clusterctl} bin/old/
echo "$commit" >bin/old/commit
