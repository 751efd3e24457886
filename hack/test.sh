#!/usr/bin/env bash
# Runs every tier of tests that can run on this machine and says what ran and
# what could not. CLUSTERD_TEST_ALL=1: what cannot run is a failure.
# TIERS="unit e2e" hack/test.sh runs just those.
set -uo pipefail
cd "$(dirname "$0")/.." || exit

TIERS=${TIERS:-lint build unit race root e2e}
GO=${GO:-go}
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
rows=() failed=0
# Tests that show rows of docs/FEATURES.md write them down here.
export CLUSTERD_FEATURES=${CLUSTERD_FEATURES:-$logs/features}

# Packages without Kubernetes' libraries: cheap to build with the race detector.
RACE_PACKAGES="./gossip/... ./raftstore ./raftstore/mvcc/... ./raftstore/wire/... ./raftstore/watch/... ./netsetup/... ./member/pki ./member/transport ./raftstore/backup ./agent/cpu ./agent/users"

lint() {
	local bad
	bad=$(gofmt -l $(git ls-files '*.go' 2>/dev/null || find . -name '*.go')) || return 1
	if [ -n "$bad" ]; then
		echo "not formatted: $bad"
		return 1
	fi
	$GO vet ./...
}
build() { make --no-print-directory build image; }
unit() { $GO test -shuffle=on -timeout 25m ./...; }
race() { CGO_ENABLED=1 $GO test -race -timeout 25m $RACE_PACKAGES; }
root() {
	CLUSTERD_ROOT=1 $GO test -p 1 -count=1 -run Root $(packages_with 'func TestRoot')
}
vm() { make --no-print-directory test-vm; }
e2e() {
	local kubectl
	if kubectl=$(command -v kubectl); then
		echo "kubectl: $kubectl, $("$kubectl" version --client 2>&1 | tr '\n' ' ')"
	else
		echo "kubectl: none on this machine; clusterctl, built on the same packages, stands in"
	fi
	CLUSTERD_E2E=netns $GO test -p 1 -count=1 -timeout 20m ./e2e/...
}

# packages_with lists the packages whose tests hold a text.
packages_with() { grep -rl --include='*_test.go' "$1" . | xargs -n 1 dirname | sort -u; }

needs_root() { case $1 in root | e2e | vm) return 0 ;; esac; return 1; }

for tier in $TIERS; do
	if needs_root "$tier" && [ "$(id -u)" -ne 0 ]; then
		rows+=("$tier|did not run|needs root: sudo make test")
		[ -n "${CLUSTERD_TEST_ALL:-}" ] && failed=1
		continue
	fi
	echo "── $tier ─────────────────────────────────────────"
	began=$SECONDS
	if "$tier" 2>&1 | tee "$logs/$tier" | grep -v '\[no test files\]'; [ "${PIPESTATUS[0]}" -eq 0 ]; then
		result=passed
	else
		result=FAILED
		failed=1
	fi
	ok=$(grep -c '^ok ' "$logs/$tier")
	rows+=("$tier|$result|$((SECONDS - began)) s$([ "$ok" -gt 0 ] && echo ", $ok packages")")
done

case " $TIERS " in *" vm "*) ;; *) rows+=("vm|did not run|is run when asked for: TIERS=vm") ;; esac

echo "── summary ───────────────────────────────────────"
for row in "${rows[@]}"; do
	IFS='|' read -r tier result note <<<"$row"
	printf '%-6s  %-11s  %s\n' "$tier" "$result" "$note"
done
if [ -s "$CLUSTERD_FEATURES" ]; then
	printf '\n%s (make features lists them)\n' "$($GO run ./e2e/features/report -from "$CLUSTERD_FEATURES" | grep -m 1 '^rows shown')"
fi
exit $failed
