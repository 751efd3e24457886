#!/usr/bin/env bash
# Puts what a user of the package reads into a folder: README, the pages, the examples
# and what monitoring needs, at the same places as in the repository, with each file
# that they link to, so that their links lead somewhere.
#
#   packaging/docs.sh FOLDER
set -euo pipefail
cd "$(dirname "$0")/.."
to=$1

put() { install -D -m 0644 "$1" "$to/$1"; }
pages=(README.md docs/*.md examples/README.md)
for file in "${pages[@]}" docs/*.svg examples/*.yaml examples/apps/*.yaml packaging/monitoring/*; do
	put "$file"
done
# [words](path#place), of files of this repository.
for page in "${pages[@]}"; do
	{ grep -o '](\([^)#:]*\)' "$page" || true; } | sed 's/^](//' | sort -u | while read -r link; do
		file=$(realpath --relative-to=. "$(dirname "$page")/$link")
		if [ -f "$file" ]; then put "$file"; fi
	done
done
