package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/clusterd/clusterd/"

// layer is one row of the table "who may know whom" (HOUSE.md, section 2). A
// package belongs to the row with the longest room that holds it.
type layer struct {
	room string
	may  []string // rooms, each a row of its own, that it may import beside itself
	// never names packages that must not be linked at all, with the reason.
	never map[string]string
	// pure is set where functions of values stand alone: no files, no API, no processes.
	pure bool
	// links are packages that the room's program is built on: it links them.
	links []string
}

var (
	noKubernetes = map[string]string{"k8s.io/": "an island knows no Kubernetes types"}
	noContainers = map[string]string{"github.com/opencontainers/runc": "libcontainer re-executes the program that links it: only podmon may (DESIGN.md, decision 7)"}
)

// leafRooms are the rooms that each room may import without naming them: they depend
// on the standard library only.
var leafRooms = []string{"durable", "loglimit", "slack"}

// impure are the packages, with those below them, that a pure room does not import.
var impure = []string{"os", "io", "net/http", "syscall", "golang.org/x/sys", "k8s.io/client-go", "k8s.io/klog"}

var layers = []layer{
	{room: "durable", never: map[string]string{"github.com/": "durable is imported by every package and must depend on the standard library only", "k8s.io/": "an island knows no Kubernetes types"}},
	{room: "loglimit", never: map[string]string{"github.com/": "loglimit is imported by every package and must depend on the standard library only", "k8s.io/": "an island knows no Kubernetes types"}},
	{room: "slack", never: map[string]string{"github.com/": "slack is imported by every package and must depend on the standard library only", "k8s.io/": "an island knows no Kubernetes types"}},
	{room: "apis", never: noContainers},
	{room: "apis/server", may: []string{"apis"}, never: noContainers},
	{room: "raftstore", may: []string{"raftstore/datadir"}, never: noKubernetes},
	{room: "raftstore/datadir", may: []string{"raftstore"}, never: noKubernetes}, // engines and bytes; Go keeps it from importing the root
	{room: "raftstore/backup", may: []string{"raftstore"}, never: map[string]string{
		"k8s.io/":                   "an island knows no Kubernetes types",
		"github.com/hashicorp/raft": "clusterctl links it, and links no store",
	}},
	{room: "raftstore/kubestore", may: []string{"raftstore"}},
	{room: "gossip", never: noKubernetes},
	{room: "netsetup", never: noKubernetes},
	{room: "sched", may: []string{"apis"}, never: noContainers},
	{room: "ingress", may: []string{"apis"}, never: noContainers},
	{room: "agent", may: []string{"apis", "netsetup", "agent/podmon/api", "agent/podstate"}, never: noContainers},
	{room: "agent/podstate", may: []string{"apis", "agent/podmon/api"}, never: noContainers, pure: true},
	{room: "agent/podmon", may: []string{"agent/podmon/api"}, never: noKubernetes},
	{room: "agent/podmon/api", never: noKubernetes},
	{room: "ui", never: map[string]string{"k8s.io/": "ui only serves files; the browser asks the API for what they show"}},
	// Membership is where gossip's hints meet raft's configuration.
	{room: "member", may: []string{"apis", "raftstore", "gossip", "member/releases"}, never: noContainers},
	{room: "member/releases", never: map[string]string{
		"k8s.io/":               "files, signatures and processes know no Kubernetes types",
		"github.com/hashicorp/": "clusterctl links it, and links no store",
	}},
	{room: "cmd/podmon", may: []string{"agent/podmon", "agent/podmon/api"}, never: noKubernetes, links: []string{"github.com/opencontainers/runc/libcontainer"}},
	{room: "cmd/imageworker", may: []string{"agent", "agent/podmon/api"}, never: map[string]string{
		"k8s.io/":                        "it is started for each layer of an image: its size is time",
		"github.com/opencontainers/runc": "libcontainer re-executes the program that links it: only podmon may (DESIGN.md, decision 7)",
	}},
	{room: "cmd/clusterctl", may: []string{"apis", "raftstore/backup", "member/releases"}, never: map[string]string{
		"k8s.io/apiserver/pkg/server": "a client links no server",
		"github.com/hashicorp/raft":   "a client links no store",
	}},
	{room: "cmd/clusterd", may: []string{"apis", "apis/server", "raftstore", "raftstore/backup", "raftstore/kubestore", "gossip", "member", "member/releases", "sched", "agent", "agent/podstate", "ingress", "netsetup", "ui"}, never: noContainers, links: []string{
		"github.com/hashicorp/raft", "github.com/hashicorp/raft-boltdb/v2", "github.com/hashicorp/memberlist",
		"github.com/vishvananda/netlink", "github.com/vishvananda/netns",
	}},
}

// featuresKit is what any test may import: it says which rows of docs/FEATURES.md a
// test shows, and imports nothing of ours.
const featuresKit = "features"

// testsMay are the rows that tests of a row import beside what its code may, kits
// (packages named …test) and featuresKit, because they prove several rooms together.
var testsMay = map[string][]string{
	"apis/server":    {"raftstore", "raftstore/kubestore"},                           // several servers on the real store
	"sched":          {"apis/server", "raftstore", "raftstore/kubestore", "ingress"}, // from a write to running pods, in one process
	"cmd/clusterctl": {"apis/server", "raftstore/kubestore", "cmd/clusterd"},         // verbs against a server with a history
	"cmd/clusterd":   {"agent/podmon/api"},
}

func (l layer) testsAllow(to string) bool {
	other, ok := layerOf(to)
	return l.allows(to) || strings.HasSuffix(to, "test") || to == featuresKit || ok && slices.Contains(testsMay[l.room], other.room) ||
		ok && slices.Contains(leafRooms, other.room)
}

type pkg struct {
	ImportPath   string
	Imports      []string
	Deps         []string
	TestImports  []string
	XTestImports []string
}

func goList(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-e", "-deps=false", "-json=ImportPath,Imports,Deps,TestImports,XTestImports", module+"...")
	// podmon needs cgo, and so do its packages' files.
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1", "GOFLAGS=-tags=seccomp")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.Bytes())
	}
	var pkgs []pkg
	for d := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			return pkgs
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
}

// layerOf is the row of a package; false: it belongs to none.
func layerOf(path string) (layer, bool) {
	var best layer
	for _, l := range layers {
		if (path == l.room || strings.HasPrefix(path, l.room+"/")) && len(l.room) > len(best.room) {
			best = l
		}
	}
	return best, best.room != ""
}

func (l layer) allows(to string) bool {
	other, ok := layerOf(to)
	return ok && (other.room == l.room || slices.Contains(l.may, other.room) || slices.Contains(leafRooms, other.room) && !l.pure)
}

// TestLayers holds who may know whom. When it fails, the fix is nearly always
// a small interface declared by the user of a thing, filled in cmd/clusterd.
func TestLayers(t *testing.T) {
	pkgs := goList(t)
	seen := map[string]bool{}
	for _, p := range pkgs {
		path := strings.TrimPrefix(p.ImportPath, module)
		if path == featuresKit && slices.ContainsFunc(p.Imports, func(imp string) bool { return strings.HasPrefix(imp, module) }) {
			t.Errorf("%s imports %v of this module: tests of every room import it, so it must import none", path, p.Imports)
		}
		for _, imp := range slices.Concat(p.TestImports, p.XTestImports) {
			if to, ours := strings.CutPrefix(imp, module+"e2e"); ours && (to == "" || to[0] == '/') && path != "e2e" && !strings.HasPrefix(path, "e2e/") {
				t.Errorf("a test of %s imports %s: whole clusters are e2e's matter, and its tests'", path, imp)
			}
		}
		l, ok := layerOf(path)
		if !ok {
			continue // e2e, examples, bench: they may know all
		}
		seen[l.room] = true
		for _, imp := range slices.Concat(p.TestImports, p.XTestImports) {
			if to, ours := strings.CutPrefix(imp, module); ours && !l.testsAllow(to) {
				t.Errorf("a test of %s imports %s: tests of %s may know what it may, kits (…test) and %v", path, to, l.room, testsMay[l.room])
			}
		}
		if strings.HasSuffix(path, "test") { // test kits
			continue
		}
		for _, imp := range p.Imports {
			if to, ours := strings.CutPrefix(imp, module); ours && !l.allows(to) {
				t.Errorf("%s imports %s: %s may know only itself and %v (HOUSE.md, section 2)", path, to, l.room, l.may)
			}
		}
		for _, imp := range p.Imports {
			if l.pure && slices.ContainsFunc(impure, func(r string) bool { return imp == r || strings.HasPrefix(imp, r+"/") }) {
				t.Errorf("%s imports %s: a pure room computes from values: no files, no API, no processes", path, imp)
			}
		}
		if path == l.room {
			for _, want := range l.links {
				if !slices.Contains(p.Deps, want) {
					t.Errorf("%s does not link %s, which it is built on", path, want)
				}
			}
		}
		for _, dep := range p.Deps {
			for never, why := range l.never {
				if strings.HasPrefix(dep, never) {
					t.Errorf("%s links %s: %s", path, dep, why)
				}
			}
			if strings.HasPrefix(dep, "k8s.io/kubernetes/") {
				t.Errorf("%s links %s: k8s.io/kubernetes is never imported", path, dep)
			}
		}
	}
	for _, l := range layers {
		if !seen[l.room] {
			t.Errorf("the table names %s, which has no package", l.room)
		}
	}
}
