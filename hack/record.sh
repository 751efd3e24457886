#!/usr/bin/env bash
# Makes docs/demo.svg anew: what `sudo make demo` prints once everything is
# built, in its own time. Needs root; the demo is taken down again.
set -euo pipefail
cd "$(dirname "$0")/.."
GO=${GO:-go}
bin=$(mktemp -d)
trap '"$bin/demo" down >/dev/null; rm -rf "$bin"' EXIT
"$GO" build -o "$bin/demo" ./e2e/demo
"$GO" run ./hack/record -o docs/demo.svg -title 'sudo make demo' -until 'Go on:' -columns 110 "$bin/demo" up
