# `clusterctl upgrade` under systemd with the package's unit, on a machine n1 that is a
# cluster of one with running pods in the namespace hello. It is sourced; the caller has
#
#   on MACHINE COMMAND…    run as root there, words without spaces
#   put MACHINE FILE PATH  copies a file there
#   say, fail, until_true  as in inside.sh
#   $RELEASES              what releases.sh has built
#   $WORK                  a folder for this run
unit() { on n1 systemctl show -p "$1" --value clusterd; }
runs() { on n1 "/proc/$(unit MainPID)/exe" version; } # the process itself, whatever is installed
containers() { on n1 clusterctl -n hello get pods -o json | grep -oE '"(containerID|restartCount)": [^,]*' | sort; }
well() { [ "$(unit ActiveState)/$(unit SubState)" = active/running ] && on n1 clusterctl get nodes --no-headers | grep -w Ready | grep -qvw NotReady; }
guarded() { on n1 pgrep -f "upgrade-guar[d]" >/dev/null; } # not the question itself
unguarded() { ! guarded; }
on_trial() { on n1 test -e /var/lib/clusterd/upgrade/trial.json; }
journal() { on n1 journalctl -u clusterd -o cat --no-pager; }
runs_well() { [ "$(runs)" = "$1" ] && well; }
# same WHAT: the containers are those that ran before.
same() { [ "$(containers)" = "$kept" ] || fail "$1: the containers are others: before $kept, now $(containers)"; }
# back_at WHAT: the node runs the version before, unguarded.
back_at() {
	until_true 300 "$1: the unit is active with $old, and the node Ready" runs_well "$old"
	until_true 60 "$1: the guard has ended" unguarded
	on_trial && fail "$1: the trial goes on"
	same "$1"
}

for r in next exits gone idles; do put n1 "$RELEASES/$r.tar.gz" "/tmp/$r.tar.gz"; done
on n1 clusterctl upgrade key /root/release.key >/dev/null
on n1 clusterctl upgrade trust /root/release.key.pub
for r in next exits gone idles; do on n1 clusterctl upgrade sign "/tmp/$r.tar.gz" --key /root/release.key; done
old=$(runs) kept=$(containers)
[ -n "$kept" ] || fail "no container runs"
restarts=$(unit NRestarts)

# Releases that fail. The unit starts the program before, and where it does not, the guard does.
for how in exits gone idles; do
	was=$(unit MainPID)
	on n1 clusterctl upgrade --to "/tmp/$how.tar.gz" --start-timeout "${START_TIMEOUT:-25s}" >"$WORK/said" 2>&1 && { cat "$WORK/said"; fail "release $how was rolled out"; }
	tail -n 1 "$WORK/said"
	want="it ended by itself"
	[ $how != idles ] || want="it was not up within"
	grep -q "$want" "$WORK/said" || { cat "$WORK/said"; fail "release $how: it is not said that $want"; }
	back_at "release $how"
	[ "$(unit MainPID)" != "$was" ] || fail "release $how: the process is the same"
done
journal | grep "systemd does not start unit clusterd.service again (exit-code)" || fail "nothing is said of the exit code that is not started again"
[ "$(unit NRestarts)" -ge "$restarts" ] || fail "systemd counts $(unit NRestarts) starts"

# A roll-out whose command was killed: stopped and started in order the trial goes on,
# and the way back that somebody asks for is one of the same process.
on n1 systemd-run -q --collect --unit=roll -E HOME=/root clusterctl upgrade --to /tmp/next.tar.gz --start-timeout 5m
until_true 120 "next is on trial" on_trial
on n1 systemctl kill -s KILL roll
until_true 300 "it runs, and the node is Ready" runs_well "clusterd v0.1.0-next"
guarded || fail "the trial is not guarded"
on n1 systemctl stop clusterd
until_true 60 "stopped by somebody, the guard has ended" unguarded
sleep 3 # longer than RestartSec: that nothing starts it
[ "$(unit ActiveState)" = inactive ] || fail "a unit that was stopped is $(unit ActiveState)"
on n1 systemctl start clusterd
until_true 300 "started by somebody, it runs on trial again" runs_well "clusterd v0.1.0-next"
on_trial && guarded || fail "the trial is over, or not guarded"
was=$(unit MainPID)
echo '{"version":"v0.1.0-next","why":"a test said so"}' >"$WORK/back.json"
put n1 "$WORK/back.json" /tmp/back.json
on n1 clusterctl create --raw /clusterd/v1/upgrade/nodes/n1/back -f /tmp/back.json >/dev/null
back_at "taken back on request"
[ "$(unit MainPID)" = "$was" ] || fail "taken back on request: process $was is now $(unit MainPID)"

# A release that is good: systemd follows the process, and sees nothing end.
was=$(unit MainPID) restarts=$(unit NRestarts) since=$(unit ActiveEnterTimestampMonotonic)
on n1 clusterctl upgrade --to /tmp/next.tar.gz --start-timeout 5m || fail "next was not rolled out"
until_true 60 "next runs, and the node is Ready" runs_well "clusterd v0.1.0-next"
until_true 60 "the guard has ended" unguarded
[ "$(unit MainPID)" = "$was" ] || fail "process $was is now $(unit MainPID)"
[ "$(unit NRestarts)/$(unit ActiveEnterTimestampMonotonic)" = "$restarts/$since" ] || fail "the unit was not active all the time"
on_trial && fail "it is on trial still"
same "next"
say "the main process $was has become the new version; containers and unit are the same ones"
