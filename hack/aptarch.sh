#!/usr/bin/env bash
# Runs an apt command as on a machine of another architecture, with lists of its
# own in bin/apt: nothing of this machine's packages changes, no root is needed.
#
#   hack/aptarch.sh arm64 apt-get download libseccomp-dev
set -euo pipefail
arch=$1
shift
[ "$arch" != "$(dpkg --print-architecture)" ] || exec "$@"

state=$(dirname "$(readlink -f "$0")")/../bin/apt/$arch
mkdir -p "$state"/{lists,cache/archives}/partial
touch "$state/status"
cat >"$state/apt.conf" <<CONF
APT::Architecture "$arch";
APT::Architectures { "$arch"; };
APT::Sandbox::User "root";
Dir::State "$state";
Dir::State::status "$state/status";
Dir::Cache "$state/cache";
CONF
export APT_CONFIG=$state/apt.conf
# The lists of a day ago may name files that are gone.
if [ -z "$(find "$state/lists" -maxdepth 1 -name '*_Packages*' -mtime -1)" ]; then
	apt-get -qq update >&2
	touch "$state"/lists/*_Packages*
fi
exec "$@"
