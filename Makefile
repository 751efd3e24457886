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
help: ## show this list
	@awk -F':.*## ' '/^##@ /{print "\n" substr($$0,5)} /^[a-z-]+:.*## /{printf "  make %-20s %s\n",$$1,$$2}' $(MAKEFILE_LIST)

##@ Build

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

bin/imageworker: deps $(shell find cmd/imageworker agent/image agent/podmon/api agent/internal/plainfile durable -name '*.go') go.mod
	@mkdir -p bin agent/image/imageworkerbin
	$(GO) build -ldflags '-s -w' -o $@ ./cmd/imageworker
	cp $@ agent/image/imageworkerbin/imageworker

.PHONY: build
build: bin/podmon bin/imageworker sched/gateway/crds/crds.json.gz ## build bin/clusterd, bin/clusterctl, bin/podmon, bin/imageworker
	$(GO) build -ldflags '$(LDFLAGS)' -o bin/ ./cmd/clusterd ./cmd/clusterctl
	@hack/own.sh

.PHONY: build-race
build-race: bin/podmon bin/imageworker sched/gateway/crds/crds.json.gz ## build bin/race/clusterd with the race detector (slow)
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

##@ Lint and demo

.PHONY: lint
lint: bin/tools/golangci-lint ## gofmt and the rules of .golangci.yml
	@bad=$$(gofmt -l $$(git ls-files '*.go' 2>/dev/null || find . -name '*.go')); [ -z "$$bad" ] || { echo "not formatted: $$bad"; exit 1; }
	bin/tools/golangci-lint run ./...

.PHONY: image
image: ## build the examples' images into bin/
	@mkdir -p bin
	$(GO) run ./examples/hello/pack -o bin/hello.tar
	$(GO) run ./examples/hello/pack -src ./examples/operator -ref clusterd.local/operator:1 -o bin/operator.tar
	@hack/own.sh

.PHONY: demo
demo: build image ## start five nodes on this machine and run an example (root)
	$(GO) run ./e2e/demo up

.PHONY: demo-down
demo-down: ## remove the demo and everything it created (root)
	$(GO) run ./e2e/demo down

.PHONY: recording
recording: build image ## record docs/demo.svg from the demo again (root)
	hack/record.sh

##@ Test

.PHONY: test
test: ## run every test tier that this machine can run
	hack/test.sh

.PHONY: test-race
test-race: ## run every package's tests with the race detector (slow)
	CGO_ENABLED=1 $(GO) test -race -p 1 -timeout 30m ./...

KILLS ?= 200
.PHONY: fault-store
fault-store: ## kill -9 store members KILLS times under load, check clients
	$(GO) test ./raftstore -count=1 -v -run TestProcess -timeout 2h -args -kills=$(KILLS)

FOR  ?= 30m
SEED ?= 1
# Kills and flipped bytes, then links and disks.
.PHONY: chaos-store
chaos-store: ## random faults on the store for FOR, drawn from SEED
	$(GO) test ./raftstore -count=1 -v -run 'TestChaos' -timeout 48h -args -chaos=$(FOR) -chaos-seed=$(SEED)

LOAD ?= 20
# LOAD processes want a CPU all the time; not one election may happen.
.PHONY: stability-store
stability-store: ## no election for FOR beside LOAD busy processes
	$(GO) test ./raftstore -count=1 -v -run 'TestCalm' -timeout 48h -args -calm=$(FOR) -calm-load=$(LOAD)

FUZZTIME ?= 1m
.PHONY: fuzz-store
fuzz-store: ## fuzz every decoder of the store, FUZZTIME each
	@set -e; for f in raftstore/peer:FuzzReadFrame raftstore/datadir:FuzzDecodeStable raftstore/datadir:FuzzCheckSnapshot raftstore/backup:FuzzRead raftstore/seglog:FuzzOpen \
		raftstore/wire:FuzzDecodeBatch raftstore/delta:FuzzExpand raftstore/delta:FuzzMake raftstore/wire:FuzzDecodeCommand raftstore/wire:FuzzReadSnapshot; do \
		$(GO) test ./$${f%:*} -run '^$$' -fuzz "^$${f#*:}$$" -fuzztime $(FUZZTIME); done

.PHONY: test-vm
test-vm: FAULTPOINTS = 1
test-vm: $(or $(CROSS),build) ## podmon and clusterd on cgroup v2, in an emulated machine (ARCH)
	$(if $(CROSS),,CGO_ENABLED=1 $(GO) build -tags '$(PODMON_TAGS) faultpoints' -ldflags '$(PODMON_LDFLAGS)' -o bin/vm/podmon ./cmd/podmon)
	$(GO) run ./examples/hello/pack -arch $(ARCH) -o bin/$(if $(CROSS),$(ARCH)/)hello.tar
	ARCH=$(ARCH) e2e/vm/run.sh $(if $(VM_TESTS),'$(VM_TESTS)')

# Programs of others and what is tried with them, at the versions of hack/peers/go.mod.
.PHONY: peers
peers: ## build the tools that tools-test runs into bin/peers
	@mkdir -p bin/peers
	$(GO) build -o bin/pack ./examples/hello/pack
	cd hack/peers && for pkg in $$($(GO) list tool) ./promparse; do nice $(GO) build -ldflags '-s -w' -o ../../bin/peers/ $$pkg || exit 1; done
	@rm -rf bin/peers/stages && mkdir bin/peers/stages
	cd hack/peers && kwok=$$($(GO) list -m -f '{{.Dir}}' sigs.k8s.io/kwok) && for kind in node pod; do \
		for f in $$kwok/kustomize/stage/$$kind/fast/$$kind-*.yaml; do install -m 0644 $$f ../../bin/peers/stages/; done; done
	cd hack/peers && nice ../../bin/pack -src ./operator -ref clusterd.local/peer-operator:1 -o ../../bin/peers/operator.tar

.PHONY: tools-test
tools-test: build image peers ## helm, kustomize, kwok, an operator and more (root, slow)
	@cd hack/peers && $(GO) list -m -f '{{.Path}} {{.Version}}' helm.sh/helm/v4 github.com/stern/stern sigs.k8s.io/kustomize/kustomize/v5 sigs.k8s.io/kwok \
		sigs.k8s.io/controller-runtime github.com/prometheus/prometheus k8s.io/client-go
	CLUSTERD_TOOLS=$(CURDIR)/bin/peers $(GO) test -count=1 -v -timeout 40m ./e2e/tools $(if $(KWOK_NODES),-kwok-nodes $(KWOK_NODES))

# Kubernetes' CSI sidecars and hostpath driver, at the versions of hack/csi.sh. CSI_SOURCES names checkouts of what the module proxy lacks.
.PHONY: csi-programs
csi-programs: ## build the CSI sidecars and driver that csi-test runs
	$(GO) build -o bin/pack ./examples/hello/pack
	GO='$(GO)' CGO_ENABLED=0 hack/csi.sh bin/csi

.PHONY: csi-test
csi-test: build image csi-programs ## upstream's CSI sidecars and hostpath driver (root, slow)
	CLUSTERD_TOOLS=$(CURDIR)/bin/peers CLUSTERD_CSI=$(CURDIR)/bin/csi $(GO) test -count=1 -v -timeout 40m -run TestE2ECSI ./e2e/tools

bin/peers/versitygw: hack/peers/s3/go.mod
	@mkdir -p bin/peers
	cd hack/peers/s3 && nice $(GO) build -ldflags '-s -w' -o ../../../bin/peers/ $$($(GO) list tool)

.PHONY: s3-test
s3-test: build image bin/peers/versitygw ## snapshots in a bucket of a real S3 server (root, slow)
	CLUSTERD_S3=$(CURDIR)/bin/peers/versitygw $(GO) test -count=1 -v ./cmd/clusterd/autosnapshot/bucket
	CLUSTERD_S3=$(CURDIR)/bin/peers/versitygw CLUSTERD_E2E=netns $(GO) test -count=1 -v -timeout 40m -run TestE2ESnapshotStore ./e2e

# The suite's programs and the images that its manifests name, which are all one program of its module.
.PHONY: gateway-suite
gateway-suite:
	@mkdir -p bin/peers
	$(GO) build -o bin/pack ./examples/hello/pack
	cd hack/peers && $(GO) test -c -o ../../bin/peers/gateway-conformance ./gatewayconformance
	cd hack/peers && suite=$$($(GO) list -m -f '{{.Dir}}' sigs.k8s.io/gateway-api/conformance) && \
		for image in $$(grep -rho '[a-z.0-9/-]*/echo-basic:[a-z0-9.-]*' $$suite/base $$suite/tests | sort -u); do \
		../../bin/pack -src sigs.k8s.io/gateway-api/conformance/echo-basic -ref $$image -o ../../bin/peers/echo-$${image##*:}.tar || exit 1; done

# SUITE='-run-test NAME' passes flags to the suite.
.PHONY: gateway-conformance
gateway-conformance: build image gateway-suite ## the Gateway API's conformance suite (root, slow)
	CLUSTERD_GATEWAY=$(CURDIR)/bin/peers $(GO) test -count=1 -v -timeout 2h ./e2e/gateway -args -suite='$(SUITE)' -report=$(CURDIR)/bin/gateway-conformance.yaml

# Attacks on a whole cluster; ATTACKS picks groups of them, such as images.
.PHONY: security-test
security-test: build image ## attacks on three servers and two agents; ATTACKS (root, slow)
	$(GO) run ./examples/hello/pack -src ./e2e/security/escape -ref clusterd.local/escape:1 -o bin/escape.tar
	CLUSTERD_SECURITY=$(CURDIR)/bin $(GO) test -count=1 -v -timeout 60m -run 'TestSecurity/$(ATTACKS)' ./e2e/security

.PHONY: doors-test
doors-test: build image ## what three servers and two agents refuse, by kubectl, client-go and raw HTTP: status, message, audit line (root, minutes)
	CLUSTERD_DOORS=$(CURDIR)/bin $(GO) test -count=1 -v -timeout 30m ./e2e/doors

.PHONY: ui-test
ui-test: build image ## the web page in headless Chromium (root)
	e2e/browser/run.sh

# Programs built with -trimpath do not say with which flags they were linked.
upgrade-test release-test vagrant-test systemd-test: export CLUSTERD_LDFLAGS = $(LDFLAGS)

# PREVIOUS: a commit, default the last tag or the commit before. release-test is part of it.
.PHONY: upgrade-test
upgrade-test: build image ## upgrade from PREVIOUS and back, under traffic (root)
	hack/previous.sh $(PREVIOUS)
	CLUSTERD_E2E=netns CLUSTERD_OLD_BIN=$(CURDIR)/bin/old CLUSTERD_UPGRADE=1 $(GO) test -count=1 -v -timeout 50m -run 'TestE2E(Upgrade|Release)$$' ./e2e

.PHONY: release-test
release-test: build image ## signed releases by `clusterctl upgrade`, good and bad (root)
	CLUSTERD_E2E=netns CLUSTERD_UPGRADE=1 $(GO) test -count=1 -v -timeout 30m -run 'TestE2ERelease$$' ./e2e

.PHONY: etcd-test
etcd-test: build image ## etcd as a StatefulSet, through node loss and restart (root)
	$(GO) build -o bin/pack ./examples/hello/pack
	cd bench && GOWORK=off ../bin/pack -src ./etcdpod -ref clusterd.local/etcdpod:1 -o ../bin/etcdpod.tar
	CLUSTERD_E2E=netns CLUSTERD_ETCD=$(CURDIR)/bin/etcdpod.tar $(GO) test -count=1 -v -timeout 20m -run 'TestE2EEtcd$$' ./e2e

.PHONY: keys-test
keys-test: build image ## CA rotation and a KMS for encryption at rest (root)
	CLUSTERD_E2E=netns CLUSTERD_KEYS=1 $(GO) test -count=1 -v -timeout 30m -run 'TestE2E(Authorities|EncryptionConfiguration)$$' ./e2e

.PHONY: vagrant-test
vagrant-test: deb image ## the package on systemd, in NODES emulated machines (root, slow)
	e2e/machines/run.sh

.PHONY: systemd-test
systemd-test: deb image ## clusterctl upgrade and a shutdown under systemd (root)
	e2e/machines/systemd.sh

.PHONY: features
features: build build-race image bin/kubectl ## report the rows of docs/FEATURES.md that tests cover (root)
	CLUSTERD_E2E=netns CLUSTERD_KUBECTL=$(CURDIR)/bin/kubectl $(GO) run ./features/report

.PHONY: conformance
conformance: build image bin/kubectl ## report the rows of docs/CONFORMANCE.md that tests cover (root)
	CLUSTERD_E2E=netns CLUSTERD_KUBECTL=$(CURDIR)/bin/kubectl $(GO) run ./features/report -list conformance

# Kubernetes' own tests and the images that they name, from the module proxy and Debian's packages.
.PHONY: conformance-kit
conformance-kit:
	@hack/deps.sh
	$(GO) build -o bin/layers ./hack/layers
	GO='$(GO)' nice hack/conformance.sh bin/conformance
	@hack/own.sh

FOCUS ?= \[Conformance\]
PROCS ?= 6
# FOCUS and SKIP are regular expressions of tests' names.
.PHONY: conformance-upstream
conformance-upstream: build image bin/kubectl conformance-kit ## Kubernetes' own conformance tests, as they are; FOCUS, SKIP, PROCS (root, slow)
	CLUSTERD_CONFORMANCE=$(CURDIR)/bin/conformance $(GO) test -count=1 -v -timeout 7h ./e2e/conformance -args -focus='$(FOCUS)' -skip='$(SKIP)' -procs=$(PROCS) -report=$(CURDIR)/bin/conformance/report

##@ Bench

.PHONY: bench-line
bench-line: build image ## from apply to Running; memory; start
	cd bench && $(GO) run ./line

.PHONY: bench-idle
bench-idle: build ## cost of an idle node: memory, wake-ups, bytes written (root)
	cd bench && $(GO) run ./idle -bin ../bin

.PHONY: bench-start
bench-start: build ## CPU time of starts, until nodes are Ready (root)
	cd bench && $(GO) run ./start -bin ../bin

.PHONY: bench-api
bench-api: ## CPU time of a request, of tokens and of encryption at rest
	CLUSTERD_BENCH=1 $(GO) test -count=1 -v -run TestFigures ./apis/server
	cd bench && $(GO) run ./api

.PHONY: bench-swarm
bench-swarm: build image ## one node beside Docker's swarm mode (root, docker.io)
	bench/swarm/run.sh

.PHONY: bench-agent
bench-agent: bin/podmon ## pods up and down, exec, memory of the agent
	cd bench && $(GO) run ./agent

.PHONY: leaks
leaks: ## create and delete 110 pods 50 times, look for leaks (root, slow)
	CLUSTERD_ROOT=1 CGO_ENABLED=0 $(GO) test -count=1 -v -timeout 4h -run RootNothingLeaks ./agent -leak-pods 110 -leak-rounds 50

# Connections by Services and a change of one endpoint at 10 to 10 000 Services.
.PHONY: bench-net
bench-net: bench-dns ## Services and endpoint changes, then bench-dns (root)
	CLUSTERD_ROOT=1 CLUSTERD_BENCH=1 $(GO) test -count=1 -v -run TestRootFigures ./netsetup/lb

bin/peers/coredns: hack/peers/coredns/go.mod hack/peers/coredns/main.go
	@mkdir -p bin/peers
	cd hack/peers/coredns && nice $(GO) build -ldflags '-s -w' -o ../../../bin/peers/ .

.PHONY: bench-dns
bench-dns: bin/peers/coredns ## DNS queries a second beside CoreDNS
	cd bench && $(GO) build -ldflags '-s -w' -o ../bin/bench-dns-server ./dns/server && $(GO) run ./dns

SERVERS ?= 1
CASES   ?= 100x400,1000x2500
BURST   ?= 100x1000
# Decisions a second, then a Deployment of CASES (nodes x pods) with SERVERS servers, a BURST of pods.
.PHONY: bench-sched
bench-sched: build ## scheduling rate on hollow nodes; SERVERS, CASES (root)
	CLUSTERD_BENCH=1 $(GO) test -count=1 -v -run TestFigures ./sched/scheduler
	cd bench && $(GO) run ./sched -servers $(SERVERS) -cases $(CASES) -burst $(BURST)

# Joins, rest, ten pods each, servers killed.
.PHONY: bench-scale
NODES ?= 1000
bench-scale: build ## three servers with NODES hollow agents (root)
	cd bench && $(GO) run ./agents -bin ../bin -nodes $(NODES)

# In process, by the same gRPC and as an API server sees both; failover, silent leaders, memory.
.PHONY: bench-store
bench-store: ## the store beside etcd; then 300 000 objects (root)
	cd bench && $(GO) run ./store
	cd bench && $(GO) run ./scale

.PHONY: bench
bench: bench-store bench-agent bench-line ## the benchmarks of store, agent and the whole

##@ Release

.PHONY: generate
generate: ## regenerate the generated code
	$(GO) generate ./apis/...

.PHONY: install
install: build ## install into PREFIX (/usr/local) with a systemd unit
	install -D -m 0755 bin/clusterd bin/clusterctl -t $(DESTDIR)$(PREFIX)/bin
	install -d $(DESTDIR)/etc/systemd/system
	sed 's|/usr/bin/|$(PREFIX)/bin/|' packaging/clusterd.service >$(DESTDIR)/etc/systemd/system/clusterd.service

.PHONY: uninstall
uninstall: ## undo install; clusterd stops, pods and data stay
	if [ -z "$(DESTDIR)" ] && [ -d /run/systemd/system ]; then systemctl disable --now clusterd || true; fi
	rm -f $(DESTDIR)$(PREFIX)/bin/clusterd $(DESTDIR)$(PREFIX)/bin/clusterctl $(DESTDIR)/etc/systemd/system/clusterd.service
	if [ -z "$(DESTDIR)" ] && [ -d /run/systemd/system ]; then systemctl daemon-reload; fi

.PHONY: deb
deb: build $(CROSS) ## build the Debian package and tarball in dist/; ARCH
	@hack/deps.sh deb
	ARCH=$(ARCH) packaging/build.sh $(if $(CROSS),bin/$(ARCH))
	@hack/own.sh

.PHONY: release
release: deb ## sign the tarball of `make deb` with RELEASE_KEY
	@[ -n '$(RELEASE_KEY)' ] || { echo 'give the secret key: make release RELEASE_KEY=FILE (bin/clusterctl upgrade key FILE makes one)' >&2; exit 1; }
	bin/clusterctl upgrade sign "$$(ls -t dist/clusterd_*_$(ARCH).tar.gz | head -1)" --key '$(RELEASE_KEY)' $(if $(CROSS),--release v0.1.0-$(VERSION))

.PHONY: clean
clean: ## remove what was built
	rm -rf bin dist agent/runtime/podmonbin/podmon agent/image/imageworkerbin/imageworker sched/gateway/crds/crds.json.gz
