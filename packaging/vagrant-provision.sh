#!/usr/bin/env bash
# Installs clusterd on one Vagrant machine: provision.sh NAME ADDRESS FIRST
# The first machine begins the cluster. On the others a script is left that joins
# with the token in /tmp/join-token: Vagrant brings it over ssh once the machine
# is up, and calls the script.
set -euo pipefail
name=$1 address=$2 first=$3

dpkg -i /tmp/clusterd.deb
if [ -e /var/lib/clusterd/pki/node.crt ]; then
	systemctl enable --now clusterd
	exit 0
fi
if [ "$address" = "$first" ]; then
	clusterd init --prepare --name "$name" --advertise "$address"
	systemctl enable --now clusterd # returns when the API answers
	exit 0
fi
cat >/usr/local/sbin/clusterd-join-lab <<SCRIPT
#!/bin/sh
set -e
trap 'rm -f /tmp/join-token' EXIT
clusterd join $first:6443 --token-file /tmp/join-token --prepare --name $name --advertise $address
systemctl enable --now clusterd
SCRIPT
chmod 0755 /usr/local/sbin/clusterd-join-lab
