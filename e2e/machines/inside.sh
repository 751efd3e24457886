#!/usr/bin/env bash
# What run.sh does inside its namespaces: a libvirtd of its own, the machines,
# and what is asked of them. It is the first process there: when it ends, the
# kernel ends all others.
set -euo pipefail
began=$SECONDS
say() { printf '%4d s  %s\n' $((SECONDS - began)) "$*"; }
fail() {
	say "FAILED: $*"
	tail -n 30 "$WORK"/log/libvirt/libvirtd.log 2>/dev/null || true
	tail -n 15 "$WORK"/log/libvirt/qemu/*.log 2>/dev/null || true
	exit 1
}

# Folders of its own in place of the machine's.
mkdir -p "$WORK"/{etc,run,lib,log,cache,home,tmp}
mkdir -p /etc/libvirt
mount --bind "$WORK/etc" /etc/libvirt
mount --bind "$WORK/run" /run
for d in lib log cache; do mount --bind "$WORK/$d" "/var/$d/libvirt" 2>/dev/null || { mkdir -p "/var/$d/libvirt" && mount --bind "$WORK/$d" "/var/$d/libvirt"; }; done
mkdir -p /run/libvirt /run/lock /var/lib/libvirt/{images,dnsmasq,qemu} /var/log/libvirt/qemu
# A device that cannot be used is worse than none: an empty file is no device.
if [ -e /dev/kvm ]; then
	: >"$WORK/no-kvm"
	mount --bind "$WORK/no-kvm" /dev/kvm
	mount -o remount,bind,ro /dev/kvm
fi
ip link set lo up
cat >/etc/libvirt/libvirtd.conf <<-CONF
	unix_sock_group = "root"
	auth_unix_ro = "none"
	auth_unix_rw = "none"
	log_outputs = "2:file:/var/log/libvirt/libvirtd.log"
CONF
cat >/etc/libvirt/qemu.conf <<-CONF
	user = "root"
	group = "root"
	security_driver = "none"
	cgroup_controllers = []
	namespaces = []
	remember_owner = 0
	stdio_handler = "file"
CONF
libvirtd >"$WORK/libvirtd.out" 2>&1 &
for _ in $(seq 100); do virsh -c qemu:///system version >/dev/null 2>&1 && break; sleep 0.3; done
virsh -c qemu:///system version >/dev/null || fail "libvirtd does not answer: $(cat "$WORK/libvirtd.out")"
say "libvirtd answers"

export HOME=$WORK/home TMPDIR=$WORK/tmp VAGRANT_HOME=$WORK/home/vagrant VAGRANT_CWD=$REPO VAGRANT_DOTFILE_PATH=$WORK/home/dot
export VAGRANT_DEFAULT_PROVIDER=libvirt VAGRANT_CHECKPOINT_DISABLE=1 BOX=clusterd-debian
cd "$REPO"
vagrant box add --name "$BOX" "$BOX_FILE" >/dev/null
vagrant up --no-color || fail "vagrant up"
say "$NODES machines are up"

# One connection a machine, shared: `vagrant ssh -c` takes ten seconds a call.
vagrant ssh-config >"$WORK/ssh"
on() { local n=$1; shift; ssh -F "$WORK/ssh" -o ControlMaster=auto -o ControlPath="$WORK/c-%h-%p" -o ControlPersist=yes -o LogLevel=ERROR "$n" sudo "$@"; }
# until_true SECONDS WHAT COMMAND…: a level, waited for.
until_true() {
	local limit=$1 what=$2 end; shift 2; end=$((SECONDS + limit))
	until "$@" >"$WORK/last" 2>&1; do
		[ $SECONDS -lt $end ] || { cat "$WORK/last"; fail "$what"; }
		sleep 2
	done
	say "$what"
}
last=n$NODES
ready() { [ "$(on n1 clusterctl get nodes --no-headers | grep -cw Ready)" = "$NODES" ] && ! on n1 clusterctl get nodes --no-headers | grep -qw NotReady; }
until_true 300 "every node is Ready" ready
on n1 clusterctl get nodes -o wide
for i in $(seq "$NODES"); do
	state=$(on "n$i" systemctl is-system-running || true)
	[ "$state" = running ] || { on "n$i" systemctl --failed; fail "systemd on n$i is $state"; }
	on "n$i" systemd-analyze verify --man=no clusterd.service || fail "the unit has faults"
	on "n$i" clusterd doctor || fail "the doctor finds problems on n$i"
done
on n1 clusterctl members
say "systemd runs on every machine, and the doctor finds no problem"

ssh -F "$WORK/ssh" -o LogLevel=ERROR n1 'cat >/tmp/hello.tar' <bin/hello.tar
ssh -F "$WORK/ssh" -o LogLevel=ERROR n1 'cat >/tmp/hello.yaml' <examples/hello.yaml
on n1 clusterctl image load /tmp/hello.tar
on n1 clusterctl apply -f /tmp/hello.yaml
until_true 300 "hello.yaml is rolled out" on n1 clusterctl -n hello rollout status deployment/hello --timeout=5s
on n1 clusterctl -n hello get pods -o wide

# A page from each pod to each other one.
pods() { on n1 clusterctl -n hello get pods -l app=hello -o 'jsonpath={range\ .items[*]}{.metadata.name}\ {.status.podIP}\ {.spec.nodeName}{\"\\n\"}{end}'; }
pages() {
	local name ip node other page
	pods >"$WORK/pods"
	while read -r name ip node <&3; do
		while read -r other _ <&4; do
			page=$(on n1 clusterctl -n hello exec "$other" -- /hello fetch "http://$ip:8080/" </dev/null) || return 1
			case $page in *"I am pod $name on node $node"*) ;; *) echo "$page"; return 1 ;; esac
		done 4<"$WORK/pods"
	done 3<"$WORK/pods"
}
until_true 120 "each pod answers each" pages

halted() { on n1 clusterctl get node "$last" --no-headers | grep -qw NotReady; }
if [ "$NODES" -gt 1 ]; then
	vagrant halt --no-color "$last"
	until_true 180 "$last is halted and NotReady" halted
fi
vagrant reload --no-color --no-provision "$last" || fail "$last does not come back"
vagrant ssh-config >"$WORK/ssh"
rm -f "$WORK"/c-*
until_true 400 "$last is back" ready
until_true 300 "its pods are back" on n1 clusterctl -n hello rollout status deployment/hello --timeout=5s
until_true 120 "each pod answers each again" pages

# The package once more, machine by machine: what an upgrade does to a node.
restarts() { on n1 clusterctl -n hello get pods -o 'jsonpath={range\ .items[*]}{.metadata.name}\ {.status.containerStatuses[0].containerID}\ {.status.containerStatuses[0].restartCount}{\"\\n\"}{end}' | sort; }
before=$(restarts)
for i in $(seq "$NODES"); do
	was=$(on "n$i" systemctl show -p MainPID --value clusterd)
	on "n$i" dpkg -i /tmp/clusterd.deb >/dev/null 2>&1 || on "n$i" test -e /tmp/clusterd.deb || { ssh -F "$WORK/ssh" -o LogLevel=ERROR "n$i" 'cat >/tmp/clusterd.deb' <"$(ls -t dist/clusterd_*.deb | head -1)"; on "n$i" dpkg -i /tmp/clusterd.deb >/dev/null; }
	replaced() { local now; now=$(on "n$i" systemctl show -p MainPID --value clusterd); [ "$now" != "$was" ] && on "n$i" systemctl is-active -q clusterd; }
	until_true 200 "clusterd on n$i is replaced" replaced
	until_true 200 "every node is Ready" ready
done
[ "$(restarts)" = "$before" ] || fail "containers were restarted by the upgrade: before $before, after $(restarts)"
say "no container was restarted"
until_true 120 "each pod answers each after the upgrade" pages
for i in $(seq "$NODES"); do
	printf 'n%s: clusterd uses %s kB, the machine %s MB\n' "$i" "$(on "n$i" sh -c "'grep VmRSS /proc/\$(systemctl show -p MainPID --value clusterd)/status'" | tr -dc 0-9)" "$(on "n$i" free -m | awk '/Mem:/ {print $3}')"
done

# Another program by `clusterctl upgrade`, and back.
if [ "$NODES" = 1 ]; then
	put() { ssh -F "$WORK/ssh" -o LogLevel=ERROR "$1" "cat >'$3'" <"$2"; }
	. e2e/machines/upgrade.sh
fi

vagrant destroy -f --no-color
[ -z "$(virsh -c qemu:///system list --all --name | tr -d '\n')" ] || fail "machines are left"
say "passed: $NODES machines"
