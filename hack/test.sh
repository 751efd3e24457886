#!/usr/bin/env bash
# Runs every tier of tests that can run on this machine and says what ran and
# what could not. CLUSTERD_TEST_ALL=1: what cannot run is a failure.
# TIERS="unit e2e" hack/test.sh runs just those.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

TIERS=${TIERS:-lint build unit race root e2e}
# As in the Makefile: what ships is built without cgo, and programs that tests start are their
# own, which change the privileges of all their threads as only such programs can.
export CGO_ENABLED=${CGO_ENABLED:-0}
export GO=${GO:-go}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
rows=() failed=0
# Tests that show rows of docs/FEATURES.md write them down here.
export CLUSTERD_FEATURES=${CLUSTERD_FEATURES:-$logs/features}

# kubectl of the API server's version, for every test that calls one.
export CLUSTERD_KUBECTL=$PWD/bin/kubectl

lint() {
	local bad
	bad=$(gofmt -l $(git ls-files '*.go' 2>/dev/null || find . -name '*.go')) || return 1
	if [ -n "$bad" ]; then
		echo "not formatted: $bad"
		return 1
	fi
	$GO vet ./...
}
build() { make --no-print-directory build image && (cd bench && $GO vet ./...); }
# The longest first; three packages at a time, since many of the tests wait.
unit() { gotest -p 3 -shuffle=on -timeout 25m ./raftstore ./apis/server ./sched/schedtest ./...; }
race() { CGO_ENABLED=1 gotest -race -timeout 25m ./raftstore $(race_packages | grep -v '/raftstore$'); } # the longest first
root() {
	CLUSTERD_ROOT=1 gotest -p 1 -count=1 -timeout 20m -run Root $(packages_with 'func TestRoot')
}
vm() { make --no-print-directory test-vm; }
tools() { make --no-print-directory tools-test; }
e2e() {
	local own dir
	export CLUSTERD_E2E=netns logs parts
	export -f e2e_part e2e_tests gotest events
	# Linked once for all parts; go test would link them for each.
	for dir in e2e/kubectl e2e; do
		$GO test -vet=off -c -ldflags '-s -w' -o "$logs/${dir##*/}.test" "./$dir" || return 1
	done
	# Four at a time, from one queue, the longest first: their clusters have bridges
	# of their own, and often wait.
	{ echo kubectl1 kubectl2 others && seq "$parts"; } | xargs -n 1 -P 4 bash -c 'e2e_part "$1"' _ || return 1
	# The machine's own kubectl, mostly of another version, goes on a short tour.
	if own=$(command -v kubectl); then
		echo "kubectl of this machine: $own, $("$own" version --client 2>&1 | tr '\n' ' ')"
		CLUSTERD_KUBECTL=$own gotest -count=1 -run Kubectl ./apis/server
	fi
}

# e2e_part runs half of package kubectl's tests, the other packages below e2e, or
# part N of package e2e's, which are as many as parts says.
parts=20
e2e_part() {
	case $1 in
	# Most of its tests wait: three go on at once on each of the two clusters.
	kubectl*) e2e_tests e2e/kubectl "${1#kubectl}" 2 -test.parallel=3 ;;
	others) gotest -p 1 -count=1 -timeout 40m $($GO list ./e2e/... | grep -v -e '/e2e$' -e '/e2e/kubectl$') ;;
	*) e2e_tests e2e "$1" "$parts" ;;
	esac
}

# e2e_tests runs part N of so many of the tests in a directory, by the program that is
# linked already, with further flags.
e2e_tests() {
	local dir=$1 part=$2 of=$3 tests pkg
	shift 3
	tests=$(grep -ho '^func Test[A-Za-z0-9]*' "$dir"/*_test.go | sed 's/^func //' | grep -vx TestMain | sort | awk -v part="$part" -v parts="$of" 'NR % parts == part % parts' | paste -sd '|')
	pkg=$($GO list "./$dir")
	CLUSTERD_E2E_LANE=$part events --raw-command -- env -C "$dir" "$GO" tool test2json -t -p "$pkg" \
		"$logs/${dir##*/}.test" -test.v=test2json -test.paniconexit0 -test.count=1 -test.timeout=40m "$@" -test.run="^($tests)\$" &&
		echo "ok  	$pkg, part $part of $of"
}

# gotest is go test. go vet is of the lint tier, whole; without tables for debuggers
# some 150 programs are linked in two thirds of the time.
gotest() { events -- -vet=off -ldflags '-s -w' "$@"; }

# events runs tests and keeps their events, to tell at the end what did not run.
events() { bin/tools/gotestsum --format standard-quiet --hide-summary skipped --jsonfile "$(mktemp -p "$logs" --suffix=.json)" "$@"; }

# race_packages lists the packages whose tests link nothing of Kubernetes': cheap
# to build with the race detector.
race_packages() {
	CGO_ENABLED=1 $GO list -test -f '{{if eq .Name "main"}}{{.ImportPath}} {{join .Deps " "}}{{end}}' ./... |
		grep '^[^ ]*\.test ' | grep -v ' k8s\.io/\(api\|apimachinery\|apiserver\|client-go\)/' | sed 's/\.test .*//'
}

# packages_with lists the packages whose tests hold a text.
packages_with() { grep -rl --include='*_test.go' "$1" . | xargs -n 1 dirname | sort -u; }

needs_root() { case $1 in root | e2e | vm | tools) return 0 ;; esac; return 1; }

make --no-print-directory bin/tools/gotestsum bin/kubectl || exit 1
echo "kubectl: $CLUSTERD_KUBECTL, $("$CLUSTERD_KUBECTL" version --client 2>&1 | tr '\n' ' ')"

# run runs a tier, and notes its result and time in a line of $logs/TIER.row.
run() {
	local tier=$1 began=$SECONDS result=passed ok
	echo "── $tier ─────────────────────────────────────────"
	"$tier" 2>&1 | tee "$logs/$tier" | grep -v '\[no test files\]'
	[ "${PIPESTATUS[0]}" -eq 0 ] || result=FAILED
	ok=$(grep -c '^ok ' "$logs/$tier")
	echo "$tier|$result|$((SECONDS - began)) s$([ "$ok" -gt 0 ] && echo ", $ok packages")" >"$logs/$tier.row"
}

# beside is a tier that runs beside root; its output is shown when both are done.
beside=
beside_done() {
	[ -n "$beside" ] || return 0
	wait
	cat "$logs/$beside.shown"
	beside=
}
for tier in $TIERS; do
	if needs_root "$tier" && [ "$(id -u)" -ne 0 ]; then
		echo "$tier|did not run|needs root: sudo make test" >"$logs/$tier.row"
		[ -n "${CLUSTERD_TEST_ALL:-}" ] && failed=1
		continue
	fi
	# The race detector computes while the tests of root mostly wait.
	if [ "$tier" = race ] && [[ " $TIERS " == *" root "* ]] && [ "$(id -u)" -eq 0 ]; then
		run race >"$logs/race.shown" 2>&1 &
		beside=race
		continue
	fi
	run "$tier"
	[ "$tier" = root ] && beside_done
done
beside_done
for tier in $TIERS; do
	row=$(cat "$logs/$tier.row" 2>/dev/null) || row="$tier|FAILED|ended without a result"
	rows+=("$row")
	[[ $row == *"|FAILED|"* ]] && failed=1
done

for tier in vm tools; do
	case " $TIERS " in *" $tier "*) ;; *) rows+=("$tier|did not run|is run when asked for: TIERS=$tier") ;; esac
done

echo "── summary ───────────────────────────────────────"
for row in "${rows[@]}"; do
	IFS='|' read -r tier result note <<<"$row"
	printf '%-6s  %-11s  %s\n' "$tier" "$result" "$note"
done
if compgen -G "$logs/*.json" >/dev/null; then
	echo
	$GO run ./hack/notrun "$logs"/*.json
fi
if [ -s "$CLUSTERD_FEATURES" ]; then
	printf '\n%s (make features lists them)\n' "$($GO run ./features/report -from "$CLUSTERD_FEATURES" | grep -m 1 '^rows shown')"
fi
exit $failed
