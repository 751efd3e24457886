#!/bin/sh
# hack/csi.sh DIR: Kubernetes' CSI sidecars, the hostpath driver and what it needs
# beside it as images in DIR, from their sources as published; with them their roles
# (DIR/rbac) and the kinds of snapshots (DIR/crds). Libraries that the product uses,
# too, have its versions, so that most of them are built already: each module by its
# own versions is an hour of two cores.
#
# CSI_SOURCES: a folder with checkouts of csi-driver-host-path, node-driver-registrar
# and livenessprobe at the versions below, for where the module proxy has none.
# Needs bin/pack and the Go tool. PACK, GO: other ones.
set -eu
out=$(mkdir -p "${1:?usage: hack/csi.sh DIR}" && cd "$1" && pwd)
here=$(cd "$(dirname "$0")/.." && pwd)
pack=${PACK:-$here/bin/pack}
go=${GO:-go}
csi=github.com/kubernetes-csi

attacher=external-attacher/v4@v4.13.0
provisioner=external-provisioner/v6@v6.4.0
resizer=external-resizer/v2@v2.3.0
snapshotter=external-snapshotter/v8@v8.7.0
snapshots=external-snapshotter/client/v8@v8.7.0
hostpath=csi-driver-host-path@v1.18.0
# Their tags of 2.x are none of a module without /v2 in its name: v2.17.0, v2.19.0.
registrar=node-driver-registrar@c5794c45f34ce9c62e47dfd5a2b073c3824f2c79
livenessprobe=livenessprobe@d2d15a5e8217cc9f8680821ee649b6a051b38d96

tmp=$(mktemp -d)
trap 'rm -rf "$tmp"' EXIT
(cd "$here" && $go list -m -f '{{if not .Main}}{{.Path}} {{.Version}}{{end}}' all) >"$tmp/product"
kubernetes=$(awk '$1 == "k8s.io/api" {print $2}' "$tmp/product")

# source MODULE@VERSION: the folder of its source.
source() {
	checkout=${CSI_SOURCES:-}/${1%@*}
	if [ -n "${CSI_SOURCES:-}" ] && [ -d "$checkout" ]; then
		echo "$checkout"
		return
	fi
	(cd "$tmp" && $go mod download -json "$csi/$1") >"$tmp/download" || {
		sed -n 's/.*"Error": "\(.*\)".*/hack\/csi.sh: \1/p' "$tmp/download" >&2
		echo "hack/csi.sh: no source of $1: name a folder with a checkout of it by CSI_SOURCES" >&2
		return 1
	}
	sed -n 's/^\t"Dir": "\(.*\)",*$/\1/p' "$tmp/download"
}

# pin FOLDER: its go.mod with the product's versions as $tmp/go.mod, but for CSI's own
# messages. A version that something else asks for is excluded until none is left.
# Parts of Kubernetes that the product does not use go with those that it does.
pin() {
	sed '/^replace (/,/^)/d; /^replace /d' "$1/go.mod" >"$tmp/go.mod"
	cat "$1/go.sum" "$here/go.sum" >"$tmp/go.sum"
	awk '$1 == "github.com/container-storage-interface/spec" {print $1, $2}' "$1/go.mod" >"$tmp/own"
	(
		cd "$1"
		# Kubernetes' own module asks for no version of its parts.
		whole=$(cd "$tmp" && $go list -m -f '{{.GoMod}}' "k8s.io/kubernetes@v1${kubernetes#v0}")
		# shellcheck disable=SC2046 # a word an argument, here and below
		$go mod edit $(awk '$2 == "v0.0.0" {print "-exclude=" $1 "@" $2}' "$whole") "$tmp/go.mod"
		set -- $(awk -v v="$kubernetes" -v client="$csi/${snapshots%@*}" -v published="${snapshots##*@}" '
			$1 ~ /^k8s.io\// && $2 ~ /^v0\.3/ {print "-require=" $1 "@" v}
			$1 == "k8s.io/kubernetes" {print "-require=" $1 "@v1" substr(v, 3)}
			$1 == client {print "-require=" $1 "@" published}' "$tmp/go.mod")
		while [ $# -gt 0 ]; do
			$go mod edit "$@" "$tmp/go.mod"
			GOFLAGS="-mod=mod -modfile=$tmp/go.mod" $go list -m -f '{{.Path}} {{.Version}}' all >"$tmp/all"
			set -- $(awk 'FILENAME != all {want[$1] = $2; next}
				NF == 2 && ($1 in want) && want[$1] != $2 {print "-exclude=" $1 "@" $2; print "-require=" $1 "@" want[$1]}' all="$tmp/all" "$tmp/product" "$tmp/own" "$tmp/all")
		done
	)
}

# image FOLDER PROGRAM VERSION: the program of the folder's module as an image.
image() {
	(cd "$1" && GOFLAGS="${GOFLAGS:-} -mod=mod -modfile=$tmp/go.mod" nice -n 19 "$pack" -src "./cmd/$2" -set "main.version=$3" -ref "clusterd.local/$2:upstream" -o "$out/$2.tar")
}

mkdir -p "$out/rbac" "$out/crds"
for module in $attacher:csi-attacher $provisioner:csi-provisioner $resizer:csi-resizer \
	$registrar:csi-node-driver-registrar $livenessprobe:livenessprobe $hostpath:hostpathplugin; do
	dir=$(source "${module%:*}")
	pin "$dir"
	version=${module##*@}
	image "$dir" "${module##*:}" "${version%:*}"
	if [ -f "$dir/deploy/kubernetes/rbac.yaml" ]; then
		install -m 0644 "$dir/deploy/kubernetes/rbac.yaml" "$out/rbac/${module##*:}.yaml"
	fi
done
dir=$(source $snapshotter)
pin "$dir"
for program in csi-snapshotter snapshot-controller; do
	image "$dir" $program "${snapshotter##*@}"
	install -m 0644 "$dir/deploy/kubernetes/$program/rbac-$program.yaml" "$out/rbac/$program.yaml"
done
client=$(source $snapshots)
for f in "$client"/config/crd/snapshot.storage.k8s.io_*.yaml; do
	install -m 0644 "$f" "$out/crds/"
done
