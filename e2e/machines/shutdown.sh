# A shutdown of the machine under systemd with the package's unit: logind holds it up
# until the pods have ended in their order. It is sourced last, after upgrade.sh; the
# caller has what that needs, and
#
#   gone             says whether the machine is down
#   root             the folder of the machine's files, which outlives it
delay() { on n1 busctl get-property org.freedesktop.login1 /org/freedesktop/login1 org.freedesktop.login1.Manager InhibitDelayMaxUSec; }
locked() { on n1 systemd-inhibit --list --no-pager | grep -w clusterd; }
waits() { [ "$(delay)" = "t ${1}000000" ] && locked; }
until_true 60 "logind waits 30 s for clusterd" waits 30
# Long enough for a machine that has much else to do.
echo CLUSTERD_SHUTDOWN_GRACE_PERIOD=4m >>"$root/etc/default/clusterd"
on n1 systemctl restart clusterd
until_true 120 "logind waits 4 min for clusterd" waits 240
until_true 120 "the node is Ready" well

last_pod() { # NAME FIELD [HOOK]: one whose hook writes a file of its name, or another hook
	cat <<-YAML
		---
		apiVersion: v1
		kind: Pod
		metadata: {name: $1, namespace: hello}
		spec:
		  securityContext: {runAsUser: 0} # the folder of the notes is root's
		  $2
		  containers:
		  - name: app
		    image: clusterd.local/hello:1
		    args: [sleep]
		    volumeMounts: [{name: notes, mountPath: /notes}]
		    lifecycle: {preStop: ${3:-{exec: {command: [/hello, write, /notes/$1, ended]\}\}}}
		  volumes: [{name: notes, hostPath: {path: /var/notes, type: DirectoryOrCreate}}]
	YAML
}
{
	last_pod plain ''
	last_pod critical 'priorityClassName: system-node-critical'
	last_pod slow 'terminationGracePeriodSeconds: 120' '{sleep: {seconds: 60}}'
} >"$WORK/last.yaml"
last_pod late 'nodeName: n1' >"$WORK/late.yaml"
put n1 "$WORK/late.yaml" /root/late.yaml
put n1 "$WORK/last.yaml" /root/last.yaml
on n1 clusterctl apply -f /root/last.yaml >/dev/null
until_true 120 "the pods with hooks are Ready" on n1 clusterctl -n hello wait --for=condition=Ready pod/plain pod/critical pod/slow --timeout=5s
rm -f "$root/var/notes/plain" "$root/var/notes/critical"
on n1 systemctl poweroff || true
# The pod "slow" holds the machine up for this, and for the critical pods.
refusing() { on n1 clusterctl get node n1 -o "jsonpath={.status.conditions[?(@.type==\"Ready\")].message}" | grep "node is shutting down"; }
until_true 50 "the node is not ready" refusing
on n1 clusterctl apply -f /root/late.yaml >/dev/null || fail "a pod could not be made while the node goes down"
refused() { on n1 clusterctl -n hello get pod late -o "jsonpath={.status.phase}/{.status.reason}" | grep Failed/NodeShutdown; }
until_true 50 "a new pod is refused" refused
[ ! -e "$root/var/notes/critical" ] || fail "the critical pod ended before the slow one"
until_true 300 "the machine is down" gone
for p in plain critical; do [ -e "$root/var/notes/$p" ] || { ls -l "$root/var/notes"; fail "the hook of pod $p did not run"; }; done
[ "$root/var/notes/critical" -nt "$root/var/notes/plain" ] || fail "the critical pod ended before the other one"
say "hooks have run, the critical pod's last"
