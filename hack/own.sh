#!/usr/bin/env bash
# Gives what `sudo make …` has built to who typed sudo, so that a later make without
# sudo can write there. Run in the repository; without sudo it does nothing.
set -euo pipefail

if [ "$(id -u)" -ne 0 ] || [ "${SUDO_UID:-0}" -eq 0 ] || [ -z "${SUDO_GID:-}" ]; then
	exit 0
fi
for built in bin dist agent/runtime/podmonbin agent/image/imageworkerbin sched/gateway/crds/crds.json.gz; do
	if [ -e "$built" ]; then
		chown -R --no-dereference "$SUDO_UID:$SUDO_GID" "$built"
	fi
done
