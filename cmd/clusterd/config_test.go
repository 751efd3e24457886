package main

import (
	"os"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
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
		{"", []string{"--port=70000"}, "70000"},
		{"", []string{"--cgroup-root=x"}, `--cgroup-root "x"`},
		{"", []string{"--cgroup-root=/"}, `--cgroup-root "/"`},
		{"", []string{"--cluster-cidr=10.0.0.1/8"}, `--cluster-cidr "10.0.0.1/8"`},
		{"", []string{"--service-cidr=10.244.7.0/24"}, "overlap"},
		{"", []string{"--eviction-delay=-1s"}, "--eviction-delay"},
		{"", []string{"--max-pods=0"}, "--max-pods 0"},
		{"", []string{"--cpu-manager-policy=dynamic"}, `--cpu-manager-policy "dynamic"`},
		{"", []string{"--cpu-manager-policy=static"}, "--reserved-cpus 0"},
		{"", []string{"--reserved-cpus=a"}, `--reserved-cpus "a"`},
		{"", []string{"--pod-pids-limit=-5"}, "--pod-pids-limit -5"},
		{"", []string{"--log-level=loud"}, `--log-level "loud"`},
		{"", []string{"--log-format=xml"}, `--log-format "xml"`},
		{"nmae: x\n", nil, `"nmae"`},
		{"evictionDelay: soon\n", nil, "soon"},
	} {
		_, err := parse(t, tc.file, tc.args...)
		if err == nil || !strings.Contains(err.Error(), tc.want) {
			t.Errorf("%q %v: %v, want something with %s", tc.file, tc.args, err, tc.want)
		}
	}
}
