#!/usr/bin/env bash
# Makes one Vagrant machine a member: provision.sh NAME ADDRESS FIRST
# The first machine begins the cluster and serves the join line on its private
# address for the others; a lab's shortcut, since the machines share nothing
# else. On real machines a person copies the line.
set -euo pipefail
name=$1 address=$2 first=$3

dpkg -i /tmp/clusterd.deb
if [ -e /var/lib/clusterd/pki/node.crt ]; then
	systemctl enable --now clusterd
	exit 0
fi
if [ "$address" = "$first" ]; then
	clusterd init --prepare --name "$name" --advertise "$address"
	systemctl enable --now clusterd
	for _ in $(seq 60); do
		clusterctl token create --ttl 1h --uses 2 -o json >/tmp/join.json 2>/dev/null && break
		sleep 1
	done
	mkdir -p /srv/join && mv /tmp/join.json /srv/join/join.json
	apt-get install -y -qq python3-minimal >/dev/null
	systemd-run --unit clusterd-join-line --property=RuntimeMaxSec=1h \
		python3 -m http.server --bind "$address" --directory /srv/join 8000
else
	for _ in $(seq 120); do
		token=$(wget -qO- "http://$first:8000/join.json" | sed -n 's/.*"token": *"\([^"]*\)".*/\1/p') && [ -n "$token" ] && break
		sleep 1
	done
	printf %s "$token" | clusterd join "$first:6443" --token-file - --prepare --name "$name" --advertise "$address"
	systemctl enable --now clusterd
fi
