package main

import (
	"errors"
	"io/fs"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"sigs.k8s.io/yaml"

	"github.com/clusterd/clusterd/agent"
	"github.com/clusterd/clusterd/raftstore"
)

func parse(t *testing.T, file string, args ...string) (Config, error) {
	t.Helper()
	c := defaultConfig()
	c.Data = t.TempDir()
	if file != "" {
		if err := os.WriteFile(configPath(c.Data), []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	f := pflag.NewFlagSet("test", pflag.ContinueOnError)
	c.addFlags(f)
	c.addClusterFlags(f)
	if err := f.Parse(args); err != nil {
		return c, err
	}
	return c, c.load(f)
}

func TestConfigOrder(t *testing.T) {
	c, err := parse(t, "name: filed\nport: 7000\nevictionDelay: 5s\n", "--port=7001", "--advertise=192.0.2.9")
	if err != nil {
		t.Fatal(err)
	}
	if c.Name != "filed" || c.Port != 7001 || c.EvictionDelay.Duration != 5*time.Second || c.MaxPods != 110 || c.Advertise != "192.0.2.9" {
		t.Errorf("%+v", c)
	}
}

// TestConfigFile: a file that is named is read in the place of the data directory's, has to
// be there, and mistakes in it name it.
func TestConfigFile(t *testing.T) {
	file := filepath.Join(t.TempDir(), "node.yaml")
	if _, err := parse(t, "", "--config="+file); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "--config "+file) {
		t.Errorf("without the file: %v", err)
	}
	for text, want := range map[string]string{"nonsense: 1\n": `unknown field "nonsense"`, "maxPods: -3\n": "--max-pods -3"} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := parse(t, "", "--advertise=192.0.2.9", "--config="+file); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %s", text, err, want)
		}
	}
	if err := os.WriteFile(file, []byte("name: named\nport: 7001\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	folders := "name: filed\nmaxPods: 5\npodEncryption: wireguard\n" // as join leaves it
	c, err := parse(t, folders, "--advertise=192.0.2.9", "--port=7002", "--config="+file)
	if err != nil || c.Name != "named" || c.Port != 7002 || c.MaxPods != 5 || c.PodEncryption != "wireguard" {
		t.Errorf("name %q, port %d, maxPods %d, podEncryption %q: %v", c.Name, c.Port, c.MaxPods, c.PodEncryption, err)
	}
	t.Setenv("CLUSTERD_CONFIG", file)
	if c, err = parse(t, folders, "--advertise=192.0.2.9"); err != nil || c.Name != "named" || c.Port != 7001 {
		t.Errorf("by the variable: name %q, port %d: %v", c.Name, c.Port, err)
	}
	if b, err := yaml.Marshal(c); err != nil || strings.Contains(string(b), file) {
		t.Errorf("the name of the file is written down: %s %v", b, err)
	}
}

// TestConfigFromEnvironment: a variable wins over the file, a flag over both.
func TestConfigFromEnvironment(t *testing.T) {
	t.Setenv("CLUSTERD_PORT", "7002")
	t.Setenv("CLUSTERD_MAX_PODS", "7")
	t.Setenv("CLUSTERD_EVICTION_DELAY", "9s")
	t.Setenv("CLUSTERD_PEER", "192.0.2.7")
	c, err := parse(t, "name: filed\nport: 7000\nmaxPods: 5\n", "--port=7001", "--advertise=192.0.2.9")
	if err != nil {
		t.Fatal(err)
	}
	if c.Name != "filed" || c.Port != 7001 || c.MaxPods != 7 || c.EvictionDelay.Duration != 9*time.Second || !slices.Equal(c.Peers, []string{"192.0.2.7"}) {
		t.Errorf("%+v", c)
	}
	t.Setenv("CLUSTERD_MAX_PODS", "many")
	if _, err := parse(t, "", "--advertise=192.0.2.9"); err == nil || !strings.Contains(err.Error(), `CLUSTERD_MAX_PODS="many", for --max-pods`) {
		t.Error(err)
	}
}

func TestClusterDNS(t *testing.T) {
	c, err := parse(t, "clusterDNS: 10.96.0.10\nclusterDomain: c.example\n")
	if err != nil {
		t.Fatal(err)
	}
	var to agent.Config
	if err := c.settings(&to); err != nil || !slices.Equal(to.ClusterDNS, []netip.Addr{netip.MustParseAddr("10.96.0.10")}) || to.ClusterDomain != "c.example" {
		t.Errorf("%v, %s, %v", to.ClusterDNS, to.ClusterDomain, err)
	}
	if c, err = parse(t, "", "--cluster-dns=10.96.0.10, 2001:db8::53"); err != nil || c.ClusterDomain != "cluster.local" {
		t.Fatal(c.ClusterDomain, err)
	}
	if got, err := c.clusterDNS(); err != nil || len(got) != 2 {
		t.Errorf("%v, %v", got, err)
	}
}

// TestPodPidsLimit: there is a limit unless none is asked for, and asking for
// none outlives the writing of the file.
func TestPodPidsLimit(t *testing.T) {
	for _, tt := range []struct {
		file string
		args []string
		want int64
	}{
		{want: 4096},
		{file: "podPidsLimit: 0\n", want: 0},
		{file: "podPidsLimit: -1\n", want: -1},
		{file: "podPidsLimit: 100\n", args: []string{"--pod-pids-limit=0"}, want: 0},
		{args: []string{"--pod-pids-limit=-1"}, want: -1},
	} {
		c, err := parse(t, tt.file, tt.args...)
		if err != nil || c.PodPidsLimit != tt.want {
			t.Fatalf("%q %q: %d, %v; want %d", tt.file, tt.args, c.PodPidsLimit, err, tt.want)
		}
		written, err := yaml.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		if c, err = parse(t, string(written)); err != nil || c.PodPidsLimit != tt.want {
			t.Errorf("%q %q, read again: %d, %v; want %d", tt.file, tt.args, c.PodPidsLimit, err, tt.want)
		}
	}
}

// TestConfigForReset: a node whose file has a mistake can be reset, and what
// the file says beside the mistake counts.
func TestConfigForReset(t *testing.T) {
	for name, tt := range map[string]struct{ file, warns string }{
		"right":       {file: "cgroupRoot: /mine\nname: n7\n"},
		"unknown key": {file: "cgroupRoot: /mine\nnmae: x\nname: n7\n", warns: "nmae"},
		"wrong type":  {file: "cgroupRoot: /mine\nport: many\nname: n7\n", warns: "port"},
		"bad value":   {file: "maxPods: -3\ncgroupRoot: /mine\nname: n7\n", warns: "--max-pods -3"},
		"no YAML":     {file: "cgroupRoot: /mine\n\t{{{\nname: n7\n", warns: "yaml"},
	} {
		c := defaultConfig()
		c.Data = t.TempDir()
		if err := os.WriteFile(configPath(c.Data), []byte(tt.file), 0o600); err != nil {
			t.Fatal(err)
		}
		f := pflag.NewFlagSet("test", pflag.ContinueOnError)
		c.addFlags(f)
		var warned string
		if err := c.loadForReset(f, func(err error) { warned += err.Error() }); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if c.CgroupRoot != "/mine" || c.Name != "n7" || c.MaxPods != 110 || c.Port != DefaultPort {
			t.Errorf("%s: %q %q %d %d", name, c.CgroupRoot, c.Name, c.MaxPods, c.Port)
		}
		if (tt.warns == "") != (warned == "") || !strings.Contains(warned, tt.warns) {
			t.Errorf("%s: warns %q, want %q", name, warned, tt.warns)
		}
	}
}

func TestConfigRefuses(t *testing.T) {
	for _, tc := range []struct {
		file string
		args []string
		want string // the message names the flag or key
	}{
		{"", []string{"--name=Bad_Name"}, `--name "Bad_Name"`},
		{"", []string{"--advertise=nowhere"}, `--advertise "nowhere"`},
		{"", []string{"--advertise=0.0.0.0"}, `--advertise "0.0.0.0"`},
		{"", []string{"--port=0"}, "--port 0"},
		{"", []string{"--peer=n2"}, `--peer "n2"`},
		{"", []string{"--port=70000"}, "70000"},
		{"", []string{"--image-pull-memory=lots"}, `--image-pull-memory "lots"`},
		{"", []string{"--image-pull-memory=1Mi"}, "--image-pull-memory 1Mi: give at least 128Mi"},
		{"", []string{"--cgroup-root=x"}, `--cgroup-root "x"`},
		{"", []string{"--cgroup-root=/"}, `--cgroup-root "/"`},
		{"", []string{"--cluster-cidr=10.0.0.1/8"}, `--cluster-cidr "10.0.0.1/8"`},
		{"", []string{"--service-cidr=10.244.7.0/24"}, "overlap"},
		{"", []string{"--cluster-cidr=10.0.0.0/14,10.4.0.0/14"}, "are of one IP family"},
		{"", []string{"--cluster-cidr=10.0.0.0/14,fd00::/48,fd01::/48"}, "one range of each IP family"},
		{"", []string{"--cluster-cidr=10.244.0.0/14,fd00::/48"}, "both need ranges of the same IP families in the same order"},
		{"", []string{"--cluster-cidr=10.244.0.0/14,fd00::/48", "--service-cidr=fd01::/112,10.96.0.0/16"}, "both need ranges of the same IP families in the same order"},
		{"", []string{"--cluster-cidr=10.244.0.0/14,fd00::/72", "--service-cidr=10.96.0.0/16,fd01::/112"}, "each node gets a /64"},
		{"", []string{"--cluster-cidr=10.244.0.0/14,fd00::/48", "--service-cidr=10.96.0.0/16,fd00::/112"}, "overlap"},
		{"", []string{"--cluster-cidr=fd00::/48", "--service-cidr=fd01::/112", "--advertise=192.0.2.7"}, "--advertise 192.0.2.7: the nodes' addresses and the first range"},
		{"", []string{"--eviction-delay=-1s"}, "--eviction-delay"},
		{"", []string{"--node-lease-duration=1s"}, "--node-lease-duration 1s: give whole seconds between 4s and 1h"},
		{"", []string{"--node-lease-duration=10500ms"}, "--node-lease-duration"},
		{"", []string{"--max-pods=0"}, "--max-pods 0"},
		{"", []string{"--cpu-manager-policy=dynamic"}, `--cpu-manager-policy "dynamic"`},
		{"", []string{"--cpu-manager-policy=static"}, "--reserved-cpus 0"},
		{"", []string{"--reserved-cpus=a"}, `--reserved-cpus "a"`},
		{"", []string{"--pod-pids-limit=-5"}, "--pod-pids-limit -5"},
		{"", []string{"--cluster-dns=10.96.0.10,dns"}, `--cluster-dns "10.96.0.10,dns": give the address`},
		{"", []string{"--cluster-dns=0.0.0.0"}, `--cluster-dns "0.0.0.0"`},
		{"", []string{"--cluster-dns=10.0.0.1,10.0.0.2,10.0.0.3,10.0.0.4"}, "no more than 3 servers"},
		{"clusterDNS: kube-dns\n", nil, `--cluster-dns "kube-dns"`},
		{"", []string{"--cluster-domain=cluster.local."}, `--cluster-domain "cluster.local."`},
		{"", []string{"--cluster-domain="}, `--cluster-domain ""`},
		{"", []string{"--resolv-conf=resolv.conf"}, `--resolv-conf "resolv.conf": an absolute path`},
		{"", []string{"--resolv-conf=/no/such"}, `--resolv-conf "/no/such": there is no such file`},
		{"", []string{"--eviction-hard=memory.free<1Gi"}, `unknown signal "memory.free"`},
		{"", []string{"--eviction-soft=memory.available<1Gi"}, "no grace period"},
		{"", []string{"--eviction-transition=-1s"}, "--eviction-transition"},
		{"", []string{"--system-reserved=memory"}, "resource=quantity"},
		{"", []string{"--system-reserved=pods=5"}, "cpu, memory or ephemeral-storage"},
		{"", []string{"--image-gc-low=90"}, "--image-gc-low 90"},
		{"", []string{"--log-level=loud"}, `--log-level "loud"`},
		{"", []string{"--log-format=xml"}, `--log-format "xml"`},
		{"", []string{"--store-quota=lots"}, `--store-quota "lots"`},
		{"", []string{"--store-quota=1Mi"}, "--store-quota 1Mi: give at least 64Mi"},
		{"", []string{"--store-history-age=1s"}, "--store-history-age 1s"},
		{"", []string{"--store-history-size=-1Gi"}, "--store-history-size -1Gi"},
		{"", []string{"--store-writer-window=1ms"}, "--store-writer-window 1ms: give at least 1s, or 0"},
		{"storeWriterWindow: -1m\n", nil, "--store-writer-window -1m0s"},
		{"raftLog: tape\n", nil, `--raft-log "tape": give one of ["segments" "bolt"]`},
		{"storeFormatAfter: 0s\n", nil, "--store-format-after 0s: give at least 1s"},
		{"storeQuotas: {secret: 1Mi}\n", nil, `storeQuotas: "secret": no such resource`},
		{"storeQuotas: {nodes/a: 1Mi}\n", nil, `storeQuotas: "nodes/a": nodes are in no namespace`},
		{"storeQuotas: {secrets/A_b: 1Mi}\n", nil, `"A_b" is no namespace`},
		{"storeQuotas: {secrets: much}\n", nil, `storeQuotas: secrets "much"`},
		{"nmae: x\n", nil, `"nmae"`},
		{"evictionDelay: soon\n", nil, "soon"},
	} {
		_, err := parse(t, tc.file, tc.args...)
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%q %v: %v, want something with %s", tc.file, tc.args, err, tc.want)
		}
	}
}

func TestStoreLimits(t *testing.T) {
	c, err := parse(t, "storeQuotas: {secrets/a: 10Mi, deployments.apps: 1Gi, widgets.example.com: 5Mi}\nstoreHistoryAge: 2h\n", "--store-quota=1Gi", "--store-history-size=16Mi")
	if err != nil {
		t.Fatal(err)
	}
	limits, err := c.storeLimits()
	if err != nil {
		t.Fatal(err)
	}
	var store raftstore.Config
	limits.apply(&store)
	want := map[string]int64{"/registry/core/secrets/a/": 10 << 20, "/registry/apps/deployments/": 1 << 30, "/registry/example.com/widgets/": 5 << 20}
	if !maps.Equal(store.FolderQuotas, want) || store.QuotaBytes != 1<<30 || store.HistoryAge != 2*time.Hour || store.HistoryBytes != 16<<20 {
		t.Errorf("%+v", store)
	}
	if !slices.Contains(store.VitalPrefixes, "/registry/coordination.k8s.io/leases/") || !slices.Contains(store.VitalPrefixes, "/registry/core/nodes/") {
		t.Errorf("vital: %v", store.VitalPrefixes)
	}
}

func TestDifferingStores(t *testing.T) {
	server := func(name string, index uint64, hash string) storeView {
		return storeView{Name: name, Applied: &index, Hash: &hash}
	}
	same := []storeView{server("n1", 7, "a"), server("n2", 8, "b"), server("n3", 7, "a"), {Name: "n4"}}
	if got := differing(same); len(got) != 0 {
		t.Errorf("%v", got)
	}
	if got := differing(append(same, server("n5", 8, "c"))); len(got) != 1 || !strings.Contains(got[0], "n2 and n5 differ at log index 8") {
		t.Errorf("%v", got)
	}
}

func TestNodeDNS(t *testing.T) {
	for _, tt := range []struct{ args, want string }{
		{"", "10.96.0.10"},
		{"--service-cidr=10.32.0.0/24", "10.32.0.10"},
		{"--service-cidr=10.32.0.8/29", "10.32.0.10"},
		{"--service-cidr=fd00:96::/112 --cluster-cidr=fd00:244::/48 --advertise=2001:db8::7", "fd00:96::a"},
		{"--service-cidr=10.32.0.0/24,fd00:96::/112 --cluster-cidr=10.244.0.0/14,fd00:244::/48 --advertise=192.0.2.7", "10.32.0.10,fd00:96::a"},
		{"--cluster-dns=none", ""},
		{"--cluster-dns=192.0.2.53", ""},
	} {
		c, err := parse(t, "", strings.Fields(tt.args)...)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, a := range c.nodeDNS() {
			got = append(got, a.String())
		}
		if got := strings.Join(got, ","); got != tt.want {
			t.Errorf("%s: %s, want %s", tt.args, got, tt.want)
		}
	}
}

// TestNoCDIDirs: there may be no directories of CDI files.
func TestNoCDIDirs(t *testing.T) {
	c, err := parse(t, "", "--cdi-dirs=")
	if err != nil {
		t.Fatal(err)
	}
	var to agent.Config
	if err := c.settings(&to); err != nil || len(to.CDIDirs) != 0 {
		t.Errorf("%q, %v", to.CDIDirs, err)
	}
	if _, err := parse(t, "", "--cdi-dirs=/etc/cdi,"); err == nil {
		t.Error("an empty folder among others passed")
	}
}

// TestPortsDiffer: two ports of a node cannot be one.
func TestPortsDiffer(t *testing.T) {
	if _, err := parse(t, "", "--kubelet-port=6443"); err == nil || !strings.Contains(err.Error(), "--kubelet-port 6443") {
		t.Error(err)
	}
	for _, args := range [][]string{{"--kubelet-port=0"}, {"--port=10250", "--kubelet-port=0"}} {
		if _, err := parse(t, "", args...); err != nil {
			t.Error(err)
		}
	}
}
