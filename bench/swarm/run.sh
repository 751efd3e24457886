#!/usr/bin/env bash
# One node of clusterd beside one node of Docker's swarm mode, in one run on one
# machine: the time until the node takes work, memory at rest, and the time until
# three replicas of the same image run. Prints JSON lines; a side is named for the
# programs that it includes. Needs root and Debian's docker.io; both sides have
# network and mount namespaces of their own, and leave nothing.
#
#   make bench-swarm        REST=30: seconds of rest before memory is read
set -euo pipefail
cd "$(dirname "$0")/../.."
root=$PWD rest=${REST:-30}

if [ "${1:-}" != inside ]; then
	for f in bin/clusterd bin/clusterctl bin/hello.tar; do [ -e "$f" ] || { echo "$f is missing: run: make build image" >&2; exit 1; }; done
	command -v dockerd >/dev/null || { echo "dockerd is missing: run: apt-get install -y --no-install-recommends docker.io" >&2; exit 1; }
	for side in clusterd swarm; do
		work=$(mktemp -d)
		code=0
		unshare --net --mount "$0" inside "$side" "$work" || code=$?
		rm -rf "$work"
		[ "$code" -eq 0 ] || exit "$code"
	done
	exit
fi

side=$2 work=$3
ip link set lo up
ip addr add 192.0.2.1/24 dev lo
now() { date +%s.%N; }
since() { awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.2f", b - a }'; }
# until_ok COMMAND… runs it until it succeeds, a minute long.
until_ok() {
	local tries
	for tries in $(seq 1200); do
		if "$@" >/dev/null 2>&1; then return; fi
		sleep 0.05
	done
	echo "$side: waited a minute for: $*" >&2
	exit 1
}
# line CASE UNIT VALUE
line() { printf '{"bench":"swarm","side":"%s","case":"%s","%s":%s}\n' "$names" "$1" "$2" "$3"; }
# rss PID… is what they have resident, together.
rss() { for p in "$@"; do awk '/^VmRSS/ {print $2}' "/proc/$p/status"; done | awk '{s += $1} END {printf "%.0f", s / 1024}'; }

case $side in
clusterd)
	names="clusterd (API, store, scheduler, controllers, agent, DNS) and podmon"
	began=$(now)
	"$root/bin/clusterd" dev --data "$work/data" --cgroup-root /clusterd-bench --advertise 192.0.2.1 --kubelet-port 0 >"$work/log" 2>&1 &
	pid=$!
	ctl() { "$root/bin/clusterctl" --kubeconfig "$work/data/admin.kubeconfig" "$@"; }
	takes_work() { [ "$(ctl get nodes -o 'jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}')" = True ]; }
	until_ok takes_work
	line "start to a node that takes work" seconds "$(since "$began")"
	sleep "$rest"
	line "at rest, no containers" rss_mib "$(rss "$pid" $(pgrep -f "podmon .*$work/data" || pgrep -P "$pid"))"
	ctl image load "$root/bin/hello.tar" >/dev/null
	began=$(now)
	ctl create deployment hello --image clusterd.local/hello:1 --replicas 3 >/dev/null
	run() { [ "$(ctl get pods -o 'jsonpath={.items[*].status.phase}')" = "Running Running Running" ]; }
	until_ok run
	line "create to three replicas running" seconds "$(since "$began")"
	kill "$pid"
	wait "$pid" || true
	;;
swarm)
	names="dockerd $(dockerd --version | awk '{print $3}' | tr -d ,) in swarm mode and containerd"
	began=$(now)
	dockerd --data-root "$work/data" --exec-root "$work/exec" -H "unix://$work/sock" --pidfile "$work/pid" --iptables=false --storage-driver vfs >"$work/log" 2>&1 &
	pid=$!
	d() { docker -H "unix://$work/sock" "$@"; }
	until_ok d version
	d swarm init --advertise-addr 192.0.2.1 >/dev/null
	line "start to a node that takes work" seconds "$(since "$began")"
	sleep "$rest"
	line "at rest, no containers" rss_mib "$(rss "$pid" $(pgrep -P "$pid"))"
	d load -q -i "$root/bin/hello.tar" >/dev/null
	began=$(now)
	d service create --detach --quiet --name hello --replicas 3 clusterd.local/hello:1 >/dev/null 2>&1
	run() { [ "$(d ps -q --filter status=running | wc -l)" -eq 3 ]; }
	until_ok run
	line "create to three replicas running" seconds "$(since "$began")"
	d service rm hello >/dev/null
	gone() { [ -z "$(d ps -q)" ]; }
	until_ok gone
	kill "$pid"
	wait "$pid" || true
	;;
esac
