#!/usr/bin/env bash
# hack/conformance.sh DIR: Kubernetes' own conformance tests as DIR/e2e.test, DIR/ginkgo that
# runs them side by side, and the images that they name as DIR/images/*.tar.
#
# All of it comes from the Go module proxy and Debian's packages: no registry is asked. Programs
# are built from k8s.io/kubernetes in a module of its own below DIR, which nothing of clusterd
# imports. Where an image's base is another distribution's, Debian's programs stand in.
#
# Needs bin/layers, the Go tool, gcc, apt-get and dpkg-deb, and root: images have owners.
# PARTS="programs suite images": what is made.
set -euo pipefail
mkdir -p "${1:?usage: hack/conformance.sh DIR}"
out=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")/.." && pwd)
layers=${LAYERS:-$here/bin/layers}
go=${GO:-go}
version=$(cd "$here" && $go list -m -f '{{.Version}}' k8s.io/api)
kubernetes=v1${version#v0}
unset GOWORK
export CGO_ENABLED=0 GOFLAGS="-trimpath -buildvcs=false -mod=mod"
PARTS=${PARTS:-programs suite images}

if [ "$(id -u)" -ne 0 ]; then
	echo "hack/conformance.sh: needs root, for the owners of the images' files" >&2
	exit 1
fi

# The scratch module: Kubernetes' own versions, and the published modules for its staging ones.
src=$out/src
mkdir -p "$src" "$out/programs" "$out/images"
tree=$(cd "$src" && $go mod download -json "k8s.io/kubernetes@$kubernetes" | sed -n 's/^\t"Dir": "\(.*\)",*$/\1/p')
{
	echo "module conformance"
	sed -n '/^go /p; /^godebug /p' "$tree/go.mod"
	echo "require k8s.io/kubernetes $kubernetes"
	sed -n '/^require (/,/^)/p' "$tree/go.mod"
	echo "replace ("
	awk -v v="$version" '$1 ~ /^k8s.io\// && $2 == "v0.0.0" {print "\t" $1 " => " $1 " " v}' "$tree/go.mod"
	echo ")"
} >"$src/go.mod"
cat "$tree/go.sum" "$here/go.sum" | sort -u >"$src/go.sum"
etcd=$(awk '$1 == "go.etcd.io/etcd/client/v3" {print $2}' "$tree/go.mod")
image() { sed -n "s/.*configs\[$1\] = Config{list\.\([A-Za-z0-9]*\), \"\(.*\)\", \"\(.*\)\"}.*/\1 \2 \3/p" "$tree/test/utils/image/manifest.go"; }

# ref ID: the reference that the suite has for an image.
ref() {
	local list name tag registry
	read -r list name tag <<<"$(image "$1")"
	registry=$(sed -n "s/^\t\t$list: *\"\(.*\)\",/\1/p" "$tree/test/utils/image/manifest.go")
	echo "${registry:?no registry $list for image $1 in manifest.go}/${name:?}:${tag:?}"
}

# program PACKAGE NAME
program() { (cd "$src" && $go build -ldflags '-s -w' -o "$out/programs/$2" "$1"); }

programs() {
	program k8s.io/kubernetes/test/images/agnhost agnhost
	program k8s.io/kubernetes/test/images/nonewprivs nnp
	program k8s.io/sample-apiserver sample-apiserver
	# Its server is none of Kubernetes' modules.
	(cd "$src" && $go get "go.etcd.io/etcd/server/v3@$etcd" >/dev/null 2>&1)
	program go.etcd.io/etcd/server/v3 etcd
	gcc -Os -static -s -o "$out/programs/pause" "$tree/build/pause/linux/pause.c"
}

suite() {
	local at=k8s.io/component-base/version # some tests go by the version that theirs was built with
	(cd "$src" && $go build -ldflags '-s -w' -o "$out/ginkgo" github.com/onsi/ginkgo/v2/ginkgo &&
		$go test -vet=off -c -ldflags "-s -w -X $at.gitVersion=$kubernetes -X $at.gitMajor=1 -X $at.gitMinor=$(echo "$kubernetes" | cut -d. -f2)" \
			-o "$out/e2e.test" k8s.io/kubernetes/test/e2e)
}

# debian FOLDER PACKAGE...: a root file system of the packages and what they depend on, unpacked
# but not configured; what they lack of a system, by busybox.
debian() {
	local root=$1 f deb
	shift
	rm -rf "$out/debs"
	mkdir -p "$out/debs/partial"
	: >"$out/debs/status" # as if nothing were installed
	apt-get -qq -o Dir::State::status="$out/debs/status" -o Dir::Cache::archives="$out/debs" -o APT::Sandbox::User=root \
		-o APT::Keep-Downloaded-Packages=true --no-install-recommends --yes --download-only install "$@" busybox-static >/dev/null
	rm -rf "$root"
	mkdir -p "$root"/usr/{bin,sbin,lib,lib64} "$root"/{etc,proc,sys,dev,var/tmp,var/log,root}
	for f in bin sbin lib lib64; do ln -s "usr/$f" "$root/$f"; done
	mkdir -m 1777 "$root/tmp"
	for deb in "$out"/debs/*.deb; do
		case $deb in */base-files_* | */nginx-common_*) continue ;; esac
		dpkg-deb --fsys-tarfile "$deb" | tar -x --keep-directory-symlink -C "$root"
	done
	rm -rf "$root"/usr/share/{doc,man,locale,info,bug,lintian} "$root"/usr/lib/x86_64-linux-gnu/gconv
	accounts "$root"
	applets "$root"
}

# accounts FOLDER: the users that images of distributions have.
accounts() {
	mkdir -p "$1/etc"
	printf '%s\n' root:x:0:0:root:/root:/bin/sh daemon:x:1:1:daemon:/usr/sbin:/usr/sbin/nologin bin:x:2:2:bin:/bin:/usr/sbin/nologin \
		mail:x:8:8:mail:/var/mail:/usr/sbin/nologin www-data:x:33:33:www-data:/var/www:/usr/sbin/nologin nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin >"$1/etc/passwd"
	printf '%s\n' root:x:0: daemon:x:1: bin:x:2: mail:x:8: www-data:x:33: nogroup:x:65534: >"$1/etc/group"
}

# applets FOLDER: busybox under the names that are not taken.
applets() {
	local name
	for name in $("$1/bin/busybox" --list); do
		[ -e "$1/bin/$name" ] || [ -e "$1/usr/bin/$name" ] || [ -e "$1/sbin/$name" ] || [ -e "$1/usr/sbin/$name" ] || ln -s busybox "$1/bin/$name"
	done
}

# pack ID [FLAG...] FOLDER...: the image of that id in the suite.
pack() {
	local id=$1 name
	shift
	name=$(ref "$id")
	"$layers" -o "$out/images/$id.tar" -ref "$name" "$@"
	echo "$name"
}

images() {
	local root=$out/root f made
	# Those of the same programs by the same script are there already.
	made=$(cat "$here/hack/conformance.sh" "$layers" "$out"/programs/* "$tree/test/utils/image/manifest.go" | sha256sum)
	if [ "$made" = "$(cat "$out/images/made" 2>/dev/null)" ]; then
		return
	fi
	rm -rf "$root" "$out"/images/*
	mkdir -p "$root"
	debian "$root/tools" dash bash bash-static curl netcat-openbsd iproute2 iperf socat bind9-dnsutils libc-bin util-linux
	ln -sf dash "$root/tools/bin/sh"
	ln -sf nc.openbsd "$root/tools/bin/nc" # as Debian's alternatives would have it
	debian "$root/nginx-base" dash nginx curl
	ln -sf dash "$root/nginx-base/bin/sh"

	# busybox: one program under all of its names. Its shell in Debian is older than the image's
	# and keeps variables such as data-1 from programs: who calls it as sh gets another one, who
	# calls it as /bin/sh, and reads its messages, gets it.
	mkdir -p "$root"/busybox/{bin,etc,tmp,root,home,proc,sys,dev,usr/sbin,var/{log,tmp,spool/mail,www}}
	chmod 1777 "$root"/busybox/{tmp,var/tmp}
	cp "$root/tools/bin/busybox" "$root/busybox/bin/"
	install -D -m 0755 "$root/tools/bin/bash-static" "$root/busybox/usr/local/bin/sh"
	accounts "$root/busybox"
	applets "$root/busybox"
	pack BusyBox -cmd sh "$root/busybox"
	pack NonRoot -user 1234 -cmd sh "$root/busybox"

	install -D -m 0755 "$out/programs/pause" "$root/pause/pause"
	pack Pause -user 65535:65535 -entrypoint /pause "$root/pause"

	# agnhost, with the registry that it serves: pause once more.
	f=$root/agnhost
	mkdir -p "$f"/{uploads,etc} "$f/var/registry"
	install -m 0755 "$out/programs/agnhost" "$f/agnhost"
	ln -s agnhost "$f/agnhost-2"
	install -m 0644 "$tree"/test/images/agnhost/porter/localhost.{crt,key} "$f/"
	"$layers" -registry "$f/var/registry" -ref clusterd.local/pause:testing -entrypoint /pause "$root/pause"
	accounts "$f"
	# A test of image volumes looks for the name in it.
	echo 'PRETTY_NAME="programs of Debian in place of Alpine Linux"' >"$f/etc/os-release"
	echo user-defined-in-image:x:1000:1000::/home/user-defined-in-image:/bin/sh >>"$f/etc/passwd"
	printf '%s\n' user-defined-in-image:x:1000: group-defined-in-image:x:50000:user-defined-in-image >>"$f/etc/group"
	for id in Agnhost AgnhostPrev; do pack $id -entrypoint /agnhost -cmd pause "$root/tools" "$f"; done
	for id in Kitten Nautilus; do
		mkdir -p "$root/$id"
		install -m 0644 "$tree/test/images/${id,,}"/html/* "$root/$id/"
		pack $id -entrypoint /agnhost -cmd test-webserver "$root/tools" "$f" "$root/$id"
	done
	pack GlibcDnsTesting -cmd bash "$root/tools"

	install -D -m 6755 "$out/programs/nnp" "$root/nnp/usr/local/bin/nnp"
	pack Nonewprivs -cmd nnp "$root/busybox" "$root/nnp"

	f=$root/nginx
	mkdir -p "$f"/etc/nginx "$f"/usr/share/nginx/html "$f"/var/{log,lib}/nginx "$f/run"
	echo '<html><head><title>Welcome to nginx!</title></head><body><h1>Welcome to nginx!</h1></body></html>' >"$f/usr/share/nginx/html/index.html"
	cat >"$f/etc/nginx/nginx.conf" <<-'CONF'
		user www-data;
		worker_processes 1;
		error_log /dev/stderr;
		pid /run/nginx.pid;
		daemon off;
		events {}
		http {
			access_log /dev/stdout;
			server {
				listen 80;
				listen [::]:80;
				root /usr/share/nginx/html;
			}
		}
	CONF
	for id in Nginx NginxNew; do pack $id -cmd nginx "$root/nginx-base" "$f"; done

	install -D -m 0755 "$out/programs/sample-apiserver" "$root/sample/sample-apiserver"
	pack APIServer -entrypoint /sample-apiserver "$root/busybox" "$root/sample"
	install -D -m 0755 "$out/programs/etcd" "$root/etcd/usr/local/bin/etcd"
	pack Etcd -cmd /usr/local/bin/etcd "$root/busybox" "$root/etcd"
	rm -rf "$root" "$out"/debs
	echo "$made" >"$out/images/made"
}

for part in $PARTS; do "$part"; done
