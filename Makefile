# clusterd. The two that matter: make demo, make test.
SHELL    := /bin/bash
# sudo often forgets where Go is.
GO       ?= $(shell command -v go || echo /usr/local/go/bin/go)
export GO
export PATH := $(patsubst %/,%,$(dir $(GO))):$(PATH)
VERSION  ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo dev)
COMMIT   ?= $(shell git rev-parse HEAD 2>/dev/null || echo unknown)
BUILT    ?= $(shell TZ=UTC git log -1 --format=%cd --date=format-local:%Y-%m-%dT%H:%M:%SZ 2>/dev/null || echo unknown)
KUBE     := v1.37.2
PREFIX   ?= /usr/local
# What deb and test-vm are for, as Go and Debian name it; another one than this
# machine's is built into bin/ARCH.
HOST     := $(shell $(GO) env GOHOSTARCH)
ARCH     ?= $(HOST)
CROSS    := $(if $(filter-out $(HOST),$(ARCH)),cross)
LDFLAGS  := -s -w -X main.release=v0.1.0-$(VERSION) -X k8s.io/component-base/version.gitVersion=$(KUBE) -X k8s.io/component-base/version.gitMajor=1 -X k8s.io/component-base/version.gitMinor=37 -X k8s.io/component-base/version.gitCommit=$(COMMIT) -X k8s.io/component-base/version.buildDate=$(BUILT)
PODMON_TAGS := seccomp netgo osusergo runc_nocriu
PODMON_LDFLAGS := -s -w -linkmode external -extldflags -static
export CGO_ENABLED = 0
# Go finds no version control in a tarball; the version is given above. Without
# paths of the checkout in programs, what one clone built serves another.
export GOFLAGS += -buildvcs=false -trimpath

.DEFAULT_GOAL := help
.PHONY: help
help: ## show this
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-14s %s\n",$$1,$$2}' $(MAKEFILE_LIST)

.PHONY: deps
deps: ## install what building and running needs (Debian, Ubuntu)
	@hack/deps.sh

bin/podmon: deps $(shell find cmd/podmon agent/podmon -name '*.go' -o -name '*.c' -o -name '*.h') go.mod
	@mkdir -p bin agent/runtime/podmonbin
	CGO_ENABLED=1 $(GO) build -tags '$(PODMON_TAGS)' -ldflags '$(PODMON_LDFLAGS)' -o $@ ./cmd/podmon
	cp $@ agent/runtime/podmonbin/podmon

# The definitions of the kinds of Gateways, from the module in whose releases they are.
sched/gateway/crds/crds.json.gz: go.mod hack/gatewaycrds/main.go
	$(GO) run ./hack/gatewaycrds -o $@

.PHONY: build
build: bin/podmon sched/gateway/crds/crds.json.gz ## build bin/clusterd, bin/clusterctl, bin/podmon
	$(GO) build -ldflags '$(LDFLAGS)' -o bin/ ./cmd/clusterd ./cmd/clusterctl
	@hack/own.sh

.PHONY: build-race
build-race: bin/podmon sched/gateway/crds/crds.json.gz ## build bin/race/clusterd, with the race detector, for e2e's TestE2ERace (long)
	CGO_ENABLED=1 $(GO) build -race -ldflags '$(LDFLAGS)' -o bin/race/ ./cmd/clusterd

.PHONY: cross
cross: sched/gateway/crds/crds.json.gz ## build the programs for ARCH (arm64) into bin/ARCH
	@ARCH=$(ARCH) FAULTPOINTS=$(FAULTPOINTS) LDFLAGS='$(LDFLAGS)' PODMON_TAGS='$(PODMON_TAGS)' PODMON_LDFLAGS='$(PODMON_LDFLAGS)' hack/cross.sh

bin/kubectl: go.mod $(wildcard hack/kubectl/*.go)
	$(GO) build -ldflags '$(LDFLAGS)' -o $@ ./hack/kubectl

# The gates' own tools, at the versions of hack/tools/go.mod.
bin/tools/%: hack/tools/go.mod
	@mkdir -p bin/tools
	cd hack/tools && $(GO) build -o ../../bin/tools/ $$($(GO) list tool | grep '/$*$$')

.PHONY: lint
lint: bin/tools/golangci-lint ## gofmt and the rules of .golangci.yml
	@bad=$$(gofmt -l $$(git ls-files '*.go' 2>/dev/null || find . -name '*.go')); [ -z "$$bad" ] || { echo "not formatted: $$bad"; exit 1; }
	bin/tools/golangci-lint run ./...

.PHONY: image
image: ## build the examples' images: bin/hello.tar, bin/operator.tar
	@mkdir -p bin
	$(GO) run ./examples/hello/pack -o bin/hello.tar
	$(GO) run ./examples/hello/pack -src ./examples/operator -ref clusterd.local/operator:1 -o bin/operator.tar
	@hack/own.sh

.PHONY: demo
demo: build image ## three nodes on this machine, one manifest, real containers
	$(GO) run ./e2e/demo up

.PHONY: demo-down
demo-down: ## remove the demo and all it made
	$(GO) run ./e2e/demo down

.PHONY: recording
recording: build image ## make docs/demo.svg anew from the demo (root)
	hack/record.sh

.PHONY: test
test: ## every tier that can run here
	hack/test.sh

.PHONY: test-race
test-race: ## every package's tests with the race detector (long)
	CGO_ENABLED=1 $(GO) test -race -p 1 -timeout 30m ./...

KILLS ?= 200
.PHONY: fault-store
fault-store: ## kill -9 the store's members KILLS times under load, check what clients saw
	$(GO) test ./raftstore -count=1 -v -run TestProcess -timeout 2h -args -kills=$(KILLS)

FOR  ?= 30m
SEED ?= 1
.PHONY: chaos-store
chaos-store: ## random faults befall the store for FOR, drawn from SEED: kills, flipped bytes; then links and disks
	$(GO) test ./raftstore -count=1 -v -run 'TestChaos' -timeout 48h -args -chaos=$(FOR) -chaos-seed=$(SEED)

LOAD ?= 20
.PHONY: calm-store
calm-store: ## the store serves for FOR beside LOAD processes that want a processor: not one election may happen
	$(GO) test ./raftstore -count=1 -v -run 'TestCalm' -timeout 48h -args -calm=$(FOR) -calm-load=$(LOAD)

FUZZTIME ?= 1m
.PHONY: fuzz-store
fuzz-store: ## fuzz every decoder of the store, FUZZTIME each
	@set -e; for f in raftstore/peer:FuzzReadFrame raftstore/datadir:FuzzDecodeStable raftstore/datadir:FuzzCheckSnapshot raftstore/backup:FuzzRead raftstore/seglog:FuzzOpen \
		raftstore/wire:FuzzDecodeBatch raftstore/delta:FuzzExpand raftstore/delta:FuzzMake raftstore/wire:FuzzDecodeCommand raftstore/wire:FuzzReadSnapshot; do \
		$(GO) test ./$${f%:*} -run '^$$' -fuzz "^$${f#*:}$$" -fuzztime $(FUZZTIME); done

.PHONY: test-vm
test-vm: FAULTPOINTS = 1
test-vm: $(or $(CROSS),build) ## podmon's suite and clusterd on cgroup v2 alone, in an emulated machine; ARCH=arm64 for another one
	$(if $(CROSS),,CGO_ENABLED=1 $(GO) build -tags '$(PODMON_TAGS) faultpoints' -ldflags '$(PODMON_LDFLAGS)' -o bin/vm/podmon ./cmd/podmon)
	$(GO) run ./examples/hello/pack -arch $(ARCH) -o bin/$(if $(CROSS),$(ARCH)/)hello.tar
	ARCH=$(ARCH) e2e/vm/run.sh $(if $(VM_TESTS),'$(VM_TESTS)')

# Programs of others and what is tried with them, at the versions of hack/peers/go.mod.
.PHONY: peers
peers: ## build the tools that tools-test tries into bin/peers
	@mkdir -p bin/peers
	$(GO) build -o bin/pack ./examples/hello/pack
	cd hack/peers && for pkg in $$($(GO) list tool) ./promparse; do nice $(GO) build -ldflags '-s -w' -o ../../bin/peers/ $$pkg || exit 1; done
	@rm -rf bin/peers/stages && mkdir bin/peers/stages
	cd hack/peers && kwok=$$($(GO) list -m -f '{{.Dir}}' sigs.k8s.io/kwok) && for kind in node pod; do \
		for f in $$kwok/kustomize/stage/$$kind/fast/$$kind-*.yaml; do install -m 0644 $$f ../../bin/peers/stages/; done; done
	cd hack/peers && nice ../../bin/pack -src ./operator -ref clusterd.local/peer-operator:1 -o ../../bin/peers/operator.tar

.PHONY: tools-test
tools-test: build image peers ## helm, stern, kustomize, kwok, an operator and more, unmodified, on a cluster (root, long to build)
	@cd hack/peers && $(GO) list -m -f '{{.Path}} {{.Version}}' helm.sh/helm/v4 github.com/stern/stern sigs.k8s.io/kustomize/kustomize/v5 sigs.k8s.io/kwok \
		sigs.k8s.io/controller-runtime github.com/prometheus/prometheus k8s.io/client-go
	CLUSTERD_TOOLS=$(CURDIR)/bin/peers $(GO) test -count=1 -v -timeout 40m ./e2e/tools $(if $(KWOK_NODES),-kwok-nodes $(KWOK_NODES))

# Kubernetes' CSI sidecars and hostpath driver, at the versions of hack/csi.sh. CSI_SOURCES names checkouts of what the module proxy lacks.
.PHONY: csi-programs
csi-programs: ## build the CSI sidecars and driver that csi-test tries into bin/csi
	$(GO) build -o bin/pack ./examples/hello/pack
	GO='$(GO)' CGO_ENABLED=0 hack/csi.sh bin/csi

.PHONY: csi-test
csi-test: build image csi-programs ## upstream's CSI sidecars, snapshot controller and hostpath driver, unmodified, on a cluster (root, long to build)
	CLUSTERD_TOOLS=$(CURDIR)/bin/peers CLUSTERD_CSI=$(CURDIR)/bin/csi $(GO) test -count=1 -v -timeout 40m -run TestE2ECSI ./e2e/tools

# The suite's programs and the images that its manifests name, which are all one program of its module.
.PHONY: gateway-suite
gateway-suite:
	@mkdir -p bin/peers
	$(GO) build -o bin/pack ./examples/hello/pack
	cd hack/peers && $(GO) test -c -o ../../bin/peers/gateway-conformance ./gatewayconformance
	cd hack/peers && suite=$$($(GO) list -m -f '{{.Dir}}' sigs.k8s.io/gateway-api/conformance) && \
		for image in $$(grep -rho '[a-z.0-9/-]*/echo-basic:[a-z0-9.-]*' $$suite/base $$suite/tests | sort -u); do \
		../../bin/pack -src sigs.k8s.io/gateway-api/conformance/echo-basic -ref $$image -o ../../bin/peers/echo-$${image##*:}.tar || exit 1; done

.PHONY: gateway-conformance
gateway-conformance: build image gateway-suite ## the Gateway API's own conformance suite on three servers; SUITE='-run-test NAME' for flags of its own (root, long)
	CLUSTERD_GATEWAY=$(CURDIR)/bin/peers $(GO) test -count=1 -v -timeout 2h ./e2e/gateway -args -suite='$(SUITE)' -report=$(CURDIR)/bin/gateway-conformance.yaml

# Attacks on a whole cluster; ATTACKS picks groups of them, such as images.
.PHONY: security-test
security-test: build image ## 856 attacks on three servers and two agents; ATTACKS=images for some (root, 20 minutes)
	$(GO) run ./examples/hello/pack -src ./e2e/security/escape -ref clusterd.local/escape:1 -o bin/escape.tar
	CLUSTERD_SECURITY=$(CURDIR)/bin $(GO) test -count=1 -v -timeout 60m -run 'TestSecurity/$(ATTACKS)' ./e2e/security

.PHONY: doors-test
doors-test: build image ## what three servers and two agents refuse, by kubectl, client-go and raw HTTP: status, message, audit line (root, minutes)
	CLUSTERD_DOORS=$(CURDIR)/bin $(GO) test -count=1 -v -timeout 30m ./e2e/doors

.PHONY: ui-test
ui-test: build image ## the web page in headless Chromium, beside three nodes; screenshots in bin/ui (root)
	e2e/browser/run.sh

.PHONY: upgrade-test
upgrade-test: build image ## from the programs of PREVIOUS (the last tag, or the commit before) to these and back, under traffic; then release-test (root)
	hack/previous.sh $(PREVIOUS)
	CLUSTERD_E2E=netns CLUSTERD_OLD_BIN=$(CURDIR)/bin/old CLUSTERD_UPGRADE=1 $(GO) test -count=1 -v -timeout 50m -run 'TestE2E(Upgrade|Release)$$' ./e2e

.PHONY: release-test
release-test: build image ## a signed release goes over a cluster by `clusterctl upgrade`, and bad ones go back (root)
	CLUSTERD_E2E=netns CLUSTERD_UPGRADE=1 $(GO) test -count=1 -v -timeout 30m -run 'TestE2ERelease$$' ./e2e

.PHONY: etcd-test
etcd-test: build image ## etcd of three members as a StatefulSet with claims, through the loss of a node and a rolling restart (root)
	$(GO) build -o bin/pack ./examples/hello/pack
	cd bench && GOWORK=off ../bin/pack -src ./etcdpod -ref clusterd.local/etcdpod:1 -o ../bin/etcdpod.tar
	CLUSTERD_E2E=netns CLUSTERD_ETCD=$(CURDIR)/bin/etcdpod.tar $(GO) test -count=1 -v -timeout 20m -run 'TestE2EEtcd$$' ./e2e

.PHONY: keys-test
keys-test: build image ## authorities of their own for each purpose, and an EncryptionConfiguration with a KMS, on clusters (root, minutes)
	CLUSTERD_E2E=netns CLUSTERD_KEYS=1 $(GO) test -count=1 -v -timeout 30m -run 'TestE2E(Authorities|EncryptionConfiguration)$$' ./e2e

.PHONY: vagrant-test
vagrant-test: deb image ## the package on systemd, in NODES (1) emulated machines by the Vagrantfile (root, long)
	e2e/machines/run.sh

.PHONY: systemd-test
systemd-test: deb image ## clusterctl upgrade under a real systemd with the package's unit, in namespaces (root)
	e2e/machines/systemd.sh

.PHONY: features
features: build build-race image bin/kubectl ## the rows of docs/FEATURES.md that passing tests show
	CLUSTERD_E2E=netns CLUSTERD_KUBECTL=$(CURDIR)/bin/kubectl $(GO) run ./e2e/features/report

.PHONY: conformance
conformance: build image bin/kubectl ## the rows of docs/CONFORMANCE.md that passing tests show
	CLUSTERD_E2E=netns CLUSTERD_KUBECTL=$(CURDIR)/bin/kubectl $(GO) run ./e2e/features/report -list conformance

.PHONY: bench-line
bench-line: build image ## from apply to Running, memory, start: JSON lines
	cd bench && $(GO) run ./line

.PHONY: bench-idle
bench-idle: build ## what a node costs when nobody asks anything: memory, wake-ups, bytes written: JSON lines (root)
	cd bench && $(GO) run ./idle -bin ../bin

.PHONY: bench-api
bench-api: ## processor time of the API's chain of requests, of tokens, of the seal of Secrets: JSON lines
	CLUSTERD_BENCH=1 $(GO) test -count=1 -v -run TestFigures ./apis/server
	cd bench && $(GO) run ./api

.PHONY: bench-swarm
bench-swarm: build image ## one node beside one of Docker's swarm mode: start, memory, three replicas: JSON lines (root, docker.io)
	bench/swarm/run.sh

.PHONY: bench-agent
bench-agent: bin/podmon ## one node's hands: pods up and down, exec, memory: JSON lines
	cd bench && $(GO) run ./agent

.PHONY: leaks
leaks: ## 110 pods made and deleted 50 times, and nothing of them left (root, long)
	CLUSTERD_ROOT=1 CGO_ENABLED=0 $(GO) test -count=1 -v -timeout 4h -run RootNothingLeaks ./agent -leak-pods 110 -leak-rounds 50

.PHONY: bench-net
bench-net: bench-dns ## connections by Services and a change of one endpoint at 10 to 10 000 Services, then bench-dns: JSON lines; root
	CLUSTERD_ROOT=1 CLUSTERD_BENCH=1 $(GO) test -count=1 -v -run TestRootFigures ./netsetup/lb

bin/peers/coredns: hack/peers/coredns/go.mod hack/peers/coredns/main.go
	@mkdir -p bin/peers
	cd hack/peers/coredns && nice $(GO) build -ldflags '-s -w' -o ../../../bin/peers/ .

.PHONY: bench-dns
bench-dns: bin/peers/coredns ## names a second beside CoreDNS, with 10 000 Services: JSON lines
	cd bench && $(GO) build -ldflags '-s -w' -o ../bin/bench-dns-server ./dns/server && $(GO) run ./dns

SERVERS ?= 1
CASES   ?= 100x400,1000x2500
.PHONY: bench-sched
bench-sched: build ## decisions a second; a Deployment of CASES (nodes x pods) on hollow nodes with SERVERS servers: JSON lines (root)
	CLUSTERD_BENCH=1 $(GO) test -count=1 -v -run TestFigures ./sched/scheduler
	cd bench && $(GO) run ./sched -servers $(SERVERS) -cases $(CASES)

.PHONY: bench-scale
NODES ?= 1000
bench-scale: build ## three servers with NODES agents that have no machine: joins, rest, ten pods each, servers killed: JSON lines (root)
	cd bench && $(GO) run ./agents -bin ../bin -nodes $(NODES)

.PHONY: bench-store
bench-store: ## the store beside etcd: in process, by the same gRPC, and as an API server sees them; failover, silent leaders (root), memory; 300 000 objects: JSON lines
	cd bench && $(GO) run ./store
	cd bench && $(GO) run ./scale

.PHONY: bench
bench: bench-store bench-agent bench-line ## all benchmarks

.PHONY: generate
generate: ## write the generated code anew
	$(GO) generate ./apis/...

.PHONY: install
install: build ## install into $(PREFIX) (/usr/local) with a systemd unit
	install -D -m 0755 bin/clusterd bin/clusterctl -t $(DESTDIR)$(PREFIX)/bin
	install -d $(DESTDIR)/etc/systemd/system
	sed 's|/usr/bin/|$(PREFIX)/bin/|' packaging/clusterd.service >$(DESTDIR)/etc/systemd/system/clusterd.service

.PHONY: uninstall
uninstall: ## remove what install put there; clusterd stops, pods and data stay
	if [ -z "$(DESTDIR)" ] && [ -d /run/systemd/system ]; then systemctl disable --now clusterd || true; fi
	rm -f $(DESTDIR)$(PREFIX)/bin/clusterd $(DESTDIR)$(PREFIX)/bin/clusterctl $(DESTDIR)/etc/systemd/system/clusterd.service
	if [ -z "$(DESTDIR)" ] && [ -d /run/systemd/system ]; then systemctl daemon-reload; fi

.PHONY: deb
deb: build $(CROSS) ## build dist/clusterd_….deb and the tarball beside it; ARCH=arm64 for another machine
	@hack/deps.sh deb
	ARCH=$(ARCH) packaging/build.sh $(if $(CROSS),bin/$(ARCH))
	@hack/own.sh

.PHONY: release
release: deb ## the tarball of `make deb`, signed with RELEASE_KEY for clusterctl upgrade
	@[ -n '$(RELEASE_KEY)' ] || { echo 'give the secret key: make release RELEASE_KEY=FILE (bin/clusterctl upgrade key FILE makes one)' >&2; exit 1; }
	bin/clusterctl upgrade sign "$$(ls -t dist/clusterd_*_$(ARCH).tar.gz | head -1)" --key '$(RELEASE_KEY)' $(if $(CROSS),--release v0.1.0-$(VERSION))

.PHONY: clean
clean: ## remove what was built
	rm -rf bin dist agent/runtime/podmonbin/podmon sched/gateway/crds/crds.json.gz
