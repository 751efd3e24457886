package main

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"

	"github.com/clusterd/clusterd/agent"
)

func hostFlags(t *testing.T, args ...string) (Config, error) {
	t.Helper()
	cfg := defaultConfig()
	cfg.Data = t.TempDir()
	cfg.Name, cfg.Advertise = "n1", "192.0.2.1"
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	cfg.addFlags(flags)
	cfg.addClusterFlags(flags)
	if err := flags.Parse(args); err != nil {
		t.Fatal(err)
	}
	return cfg, cfg.complete()
}

func TestHostOptions(t *testing.T) {
	const two = "--cluster-cidr=10.244.0.0/14,fd00:244::/48 --service-cidr=10.96.0.0/16,fd00:96::/112 "
	for _, c := range []struct{ flags, err, ips string }{
		{"--node-ip=127.0.0.1", "loopback", ""},
		{"--node-ip=192.0.2.7,192.0.2.8", "one family", ""},
		{"--node-addresses=InternalIP=192.0.2.7", "--node-ip", ""},
		{"--read-only-port=10250", "--kubelet-port", ""},
		{"--read-only-port=6443", "--port", ""},
		{"--node-ip=192.0.2.7,2001:db8::7", "", "[192.0.2.7 2001:db8::7]"},
		{two + "--node-ip=192.0.2.7,2001:db8::7", "", "[192.0.2.7 2001:db8::7]"},
		{two + "--node-ip=192.0.2.7", "", "[192.0.2.7]"},
		{two + "--node-ip=2001:db8::7,192.0.2.7", "give the node's address of that family first", ""},
	} {
		cfg, err := hostFlags(t, strings.Fields(c.flags)...)
		if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%s: %v", c.flags, err)
		}
		if err != nil {
			continue
		}
		if got := fmt.Sprint(cfg.nodeIPs(slog.New(slog.DiscardHandler))); got != c.ips {
			t.Errorf("%s: the node's addresses are %s, want %s", c.flags, got, c.ips)
		}
	}
	cfg, err := hostFlags(t)
	if err != nil || fmt.Sprint(cfg.nodeIPs(slog.New(slog.DiscardHandler))) != "[192.0.2.1]" || cfg.ReadOnlyPort != 0 || cfg.FailSwapOn || !cfg.NodeLogs {
		t.Errorf("defaults: %+v, %v", cfg.HostConfig, err)
	}
	cfg.NodeIP = "192.0.2.1"
	if err := cfg.checkMachine(); err == nil || !strings.Contains(err.Error(), "no interface") {
		t.Errorf("an address of no interface: %v", err)
	}
}

func TestTracingConfig(t *testing.T) {
	for text, want := range map[string]string{
		"apiVersion: apiserver.config.k8s.io/v1\nkind: TracingConfiguration\nendpoint: localhost:4317\nsamplingRatePerMillion: 100\n": "",
		"apiVersion: apiserver.config.k8s.io/v1\nkind: TracingConfiguration\nsamplingRatePerMillion: 2000000\n":                       "samplingRatePerMillion",
		"apiVersion: apiserver.config.k8s.io/v1\nkind: TracingConfiguration\nendpoint: https://x\n":                                   "unsupported scheme",
		"apiVersion: apiserver.config.k8s.io/v1\nkind: TracingConfiguration\nendpiont: x\n":                                           "endpiont",
		"nonsense": "--tracing-config",
	} {
		path := filepath.Join(t.TempDir(), "tracing.yaml")
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		c := HostConfig{TracingConfig: path}
		got, err := c.tracing()
		if (err == nil) != (want == "") || err != nil && (!strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), path)) || err == nil && *got.Endpoint != "localhost:4317" {
			t.Errorf("%s: %v, %v", text, got, err)
		}
	}
	if got, err := (&HostConfig{}).tracing(); got != nil || err != nil {
		t.Errorf("without one: %v, %v", got, err)
	}
	if _, err := (&HostConfig{TracingConfig: filepath.Join(t.TempDir(), "none")}).tracing(); err == nil {
		t.Error("a file that is not passed")
	}
}

func TestOwnLog(t *testing.T) {
	t.Setenv("JOURNAL_STREAM", "")
	cfg := Config{Data: filepath.Join(t.TempDir(), "data"), HostConfig: defaultHost()}
	var out strings.Builder
	w := cfg.withOwnLog(&out)
	if _, err := w.Write([]byte("a line\n")); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(filepath.Join(cfg.Data, "log", "clusterd.log"))
	if err != nil || string(b) != "a line\n" || out.String() != "a line\n" {
		t.Errorf("%q, %q, %v", b, out.String(), err)
	}
	// A file that cannot be written keeps nothing from being logged.
	cfg.Data = filepath.Join(cfg.Data, "log", "clusterd.log")
	if _, err := cfg.withOwnLog(&out).Write([]byte("another\n")); err != nil || !strings.HasSuffix(out.String(), "another\n") {
		t.Errorf("%q, %v", out.String(), err)
	}
	t.Setenv("JOURNAL_STREAM", "8:1")
	if got := cfg.ownLog(); got != "" {
		t.Errorf("beside the journal: %s", got)
	}
}

func TestDebugCertLife(t *testing.T) {
	for text, want := range map[string]time.Duration{"": 0, "30s": 30 * time.Second, "nonsense": 0, "-1s": 0, "1ms": 0} {
		t.Setenv(certLifeEnv, text)
		if got := debugCertLife(); got != want {
			t.Errorf("%q: %s", text, got)
		}
	}
}

// TestRegistration: labels that NodeRestriction would refuse are refused before the node
// tries, with the label's name; those of a kubelet and one's own are not.
func TestRegistration(t *testing.T) {
	c, err := parse(t, "registerWithTaints: dedicated=db:NoSchedule\n", "--node-labels=disk=ssd,topology.kubernetes.io/zone=a,node.kubernetes.io/pool=x,example.org/rack=7")
	if err != nil {
		t.Fatal(err)
	}
	var to agent.Config
	if err := c.hostSettings(&to); err != nil || to.Registration.Labels["example.org/rack"] != "7" || len(to.Registration.Taints) != 1 {
		t.Errorf("%+v, %v", to.Registration, err)
	}
	for _, label := range []string{"node-role.kubernetes.io/control-plane", "node-restriction.kubernetes.io/secret", "example.node-restriction.kubernetes.io/x", "kubernetes.io/other", "x.k8s.io/y"} {
		if _, err := parse(t, "", "--node-labels="+label+"=1"); err == nil || !strings.Contains(err.Error(), "--node-labels: \""+label+"\": a node may not give itself this label") {
			t.Errorf("%s: %v", label, err)
		}
	}
	if _, err := parse(t, "", "--register-with-taints=db"); err == nil || !strings.Contains(err.Error(), "--register-with-taints: \"db\"") {
		t.Error(err)
	}
}
