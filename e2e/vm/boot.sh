#!/bin/sh
# The first program of the emulated machine: finds the disk and goes there.
b=/bin/busybox
$b mount -t proc proc /proc
$b mount -t devtmpfs dev /dev
$b modprobe virtio_pci
$b modprobe virtio_blk
$b modprobe quota_v2
tries=0
until [ -b /dev/vda ]; do
	tries=$((tries + 1))
	[ $tries -lt 300 ] || { echo "there is no disk"; $b poweroff -f; }
	$b sleep 0.1
done
$b mount -t ext4 -o prjquota /dev/vda /new
$b mount --move /dev /new/dev
$b umount /proc
exec $b switch_root /new /sbin/init
