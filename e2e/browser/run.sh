#!/usr/bin/env bash
# The demo's five nodes with real pods, some of them hostile, and a headless Chromium that
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
space=clusterd-ui-$$ # of the browser
# What still holds mounts is not removed: they lead out of the folder.
down() { cd "$repo" && { ip netns delete "$space" 2>/dev/null || true; } && demo down >"$dir/down.log" 2>&1 && rm -rf --one-file-system "$dir" || { cat "$dir/down.log"; echo "left behind: $dir" >&2; }; }
trap down EXIT
demo up
printf '#!/bin/sh\nexec %s --kubeconfig %s "$@"\n' "$PWD/bin/clusterctl" "$dir/demo/n1/admin.kubeconfig" >"$dir/ctl"
chmod +x "$dir/ctl"
"$dir/ctl" apply -f e2e/browser/testdata/hostile.yaml
rm -rf bin/ui && mkdir -p bin/ui
# Chromium gives up what it loads when an interface of the machine comes or goes, as
# other clusters' do: it has a network of its own, with a wire to the nodes.
"$GO" test -tags chromium -c -o "$dir/browser.test" ./e2e/browser
ip netns add "$space"
ip link add eth0 netns "$space" type veth peer name "cdui$$"
ip link set "cdui$$" master clusterd-ui up
ip -n "$space" link set lo up
ip -n "$space" address add 10.91.0.100/24 dev eth0 # none of the demo's pool
ip -n "$space" link set eth0 up
export CLUSTERD_UI=https://10.91.0.2:6443/ui/ CLUSTERD_CTL=$dir/ctl CLUSTERD_UI_SHOTS=$repo/bin/ui
cd e2e/browser && nsenter --net=/run/netns/"$space" "$dir/browser.test" -test.v ${RUN:+-test.run "$RUN"}
