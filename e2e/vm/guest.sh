#!/bin/sh
# The emulated machine's own work: mounts as a system with cgroup v2 alone has
# them, then the tests, then off.
export PATH=/bin:/sbin HOME=/ TMPDIR=/tmp
case $1 in
mounts)
	mount -t proc proc /proc
	mount -t sysfs sys /sys
	mkdir -p /dev/pts /dev/shm
	mount -t devpts devpts /dev/pts
	mount -t tmpfs shm /dev/shm
	mount -t tmpfs run /run
	mount -t cgroup2 -o nsdelegate,memory_recursiveprot cgroup2 /sys/fs/cgroup
	ip link set lo up
	hostname vm
	echo 16 >/proc/sys/vm/nr_hugepages
	modprobe overlay
	;;
checks)
	export CLUSTERD_VM=1 CLUSTERD_FEATURES=/run/features
	echo "VM: Linux $(uname -r), $(nproc) processors, up $(cut -d' ' -f1 /proc/uptime) s"
	pattern=$(cat /etc/pattern) code=0
	# has PROGRAM: some of its tests match.
	has() { env -u CLUSTERD_VM "$1" -test.list "$pattern" | grep -q '^Test'; }
	if has podmon.test; then
		CLUSTERD_ROOT=1 CLUSTERD_TEST_PROGRAMS=/programs podmon.test -test.v -test.run "$pattern" -test.timeout 30m || code=1
	fi
	if has netsetup.test; then
		netsetup.test -test.v -test.run "$pattern" -test.skip '^TestRoot' -test.timeout 10m || code=1
	fi
	if has claim.test; then
		claim.test -test.v -test.run "$pattern" -test.timeout 10m || code=1
	fi
	if has e2e.test; then
		CLUSTERD_E2E=netns CLUSTERD_BIN=/bin e2e.test -test.v -test.run "$pattern" -test.timeout 20m || code=1
	fi
	if has vm.test; then
		vm.test -test.v -test.run "$pattern" -test.timeout 30m || code=1
	fi
	[ ! -e /run/features ] || sed 's/^/FEATURE /' /run/features
	echo "VM-RESULT $code"
	sync
	poweroff -f
	;;
esac
