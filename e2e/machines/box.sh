#!/usr/bin/env bash
# Builds a Vagrant box for libvirt from Debian packages alone: box.sh FILE
# The machine has systemd, sshd and nothing else; the kernel is started
# directly, without a boot loader. Needs root and a Debian mirror.
set -euo pipefail
out=$(realpath -m "$1")
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
suite=bookworm
keys=$(dirname "$(dpkg -L vagrant | grep -m 1 '/keys/vagrant.pub$')")
mkdir -p "$(dirname "$out")"
work=$(mktemp -d -p "$(dirname "$out")")
trap 'rm -rf --one-file-system "$work"' EXIT
root=$work/root

debootstrap --variant=minbase --include=linux-image-cloud-amd64,systemd,systemd-sysv,systemd-resolved,udev,dbus,openssh-server,sudo,iproute2,procps,kmod,ca-certificates "$suite" "$root" "$mirror" >"$work/log" 2>&1 ||
	{ tail -20 "$work/log" >&2; exit 1; }
# What debootstrap may have left mounted for the packages' scripts.
for m in proc sys dev/pts dev; do umount -q "$root/$m" 2>/dev/null || true; done

# The user that Vagrant logs in as, with the key that everybody knows; the
# machine's network reaches its host only.
chroot "$root" useradd -m -s /bin/bash vagrant
install -d -m 0700 "$root/home/vagrant/.ssh"
install -m 0600 "$keys/vagrant.pub" "$root/home/vagrant/.ssh/authorized_keys"
chroot "$root" chown -R vagrant:vagrant /home/vagrant/.ssh
echo 'vagrant ALL=(ALL) NOPASSWD: ALL' >"$root/etc/sudoers.d/vagrant"
printf 'UseDNS no\n' >"$root/etc/ssh/sshd_config.d/box.conf"
# systemd-networkd: with ifupdown a machine ends "degraded". It asks by its MAC:
# by its machine-id, which machines of one box may share, all get one address.
printf '[Match]\nName=eth0\n[Network]\nDHCP=ipv4\n[DHCPv4]\nClientIdentifier=mac\n' >"$root/etc/systemd/network/10-eth0.network"
chroot "$root" systemctl -q enable systemd-networkd
chroot "$root" systemctl -q mask systemd-networkd-wait-online.service apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer e2scrub_reap.service fstrim.timer
echo '/dev/vda / ext4 defaults 0 1' >"$root/etc/fstab"
echo clusterd-box >"$root/etc/hostname"
: >"$root/etc/machine-id" # each machine makes its own
rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*

mkdir "$work/box"
cp "$root"/boot/vmlinuz-* "$work/box/vmlinuz"
cp "$root"/boot/initrd.img-* "$work/box/initrd"
rm -rf "$root"/boot/*
mke2fs -q -F -t ext4 -L root -d "$root" "$work/disk" 6G
qemu-img convert -O qcow2 "$work/disk" "$work/box/box.img"
printf '{"provider": "libvirt", "format": "qcow2", "virtual_size": 6}\n' >"$work/box/metadata.json"
cat >"$work/box/Vagrantfile" <<'RUBY'
# What this box is: emulated, as there may be no hardware virtualization; started
# from its kernel; reached over a network that leads nowhere else.
Vagrant.configure("2") do |config|
  config.vm.guest = :debian
  config.vm.boot_timeout = 600
  config.ssh.insert_key = false
  config.vm.provider :libvirt do |p|
    p.driver = "qemu"
    p.cpu_mode = "maximum"
    p.kernel = File.expand_path("vmlinuz", __dir__)
    p.initrd = File.expand_path("initrd", __dir__)
    p.cmd_line = "root=/dev/vda rw console=ttyS0 net.ifnames=0 quiet"
    p.graphics_type = "none"
    p.video_type = "none"
    p.management_network_mode = "none"
    p.disk_driver :cache => "unsafe" # a test's disk
    p.random :model => "random"
  end
end
RUBY
tar -C "$work/box" -czf "$out.new" metadata.json Vagrantfile box.img vmlinuz initrd
mv "$out.new" "$out"
