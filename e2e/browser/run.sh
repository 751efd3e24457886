#!/usr/bin/env bash
# Three nodes with real pods, some of them hostile, and a headless Chromium that
# looks at their page. Screenshots stay in bin/ui. Takes about a minute.
set -euo pipefail
cd "$(dirname "$0")/../.."
GO=${GO:-go}
[ "$(id -u)" -eq 0 ] || { echo "needs root, for the nodes: sudo make ui-test" >&2; exit 1; }
command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null ||
	{ echo "needs Chromium: apt-get install chromium fonts-dejavu-core" >&2; exit 1; }
dir=$(mktemp -d)
demo() { "$GO" run ./e2e/demo -dir "$dir/demo" -bridge clusterd-ui -subnet 10.91.0.0/24 "$@"; }
repo=$PWD
# What still holds mounts is not removed: they lead out of the folder.
down() { cd "$repo" && demo down >"$dir/down.log" 2>&1 && rm -rf --one-file-system "$dir" || { cat "$dir/down.log"; echo "left behind: $dir" >&2; }; }
trap down EXIT
demo up
printf '#!/bin/sh\nexec %s --kubeconfig %s "$@"\n' "$PWD/bin/clusterctl" "$dir/demo/n1/admin.kubeconfig" >"$dir/ctl"
chmod +x "$dir/ctl"
"$dir/ctl" apply -f e2e/browser/testdata/hostile.yaml
rm -rf bin/ui && mkdir -p bin/ui
CLUSTERD_UI=https://10.91.0.2:6443/ui/ CLUSTERD_CTL=$dir/ctl CLUSTERD_UI_SHOTS=$repo/bin/ui "$GO" test -tags chromium -count=1 -v ${RUN:+-run "$RUN"} ./e2e/browser
