package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/client-go/rest"
)

func TestKubeconfigSearch(t *testing.T) {
	dir := t.TempDir()
	home, data, absent := filepath.Join(dir, "home"), filepath.Join(dir, "data"), filepath.Join(dir, "absent")
	for _, path := range []string{home, data} {
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		name   string
		search kubeconfigSearch
		flag   string
		server string
		want   string // the kubeconfig that is named after it
		lost   bool
	}{
		{name: "flag first", search: kubeconfigSearch{env: home, home: home, data: data}, flag: "f", want: "f"},
		{name: "environment", search: kubeconfigSearch{env: "e", home: absent, data: data}},
		{name: "home", search: kubeconfigSearch{home: home, data: data}},
		{name: "data folder", search: kubeconfigSearch{home: absent, data: data}, want: data},
		{name: "server named", search: kubeconfigSearch{home: absent, data: data}, server: "https://x:1"},
		{name: "in a pod", search: kubeconfigSearch{home: absent, data: absent, inCluster: true}},
		{name: "nothing", search: kubeconfigSearch{home: absent, data: absent}, lost: true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			flags := genericclioptions.NewConfigFlags(true)
			*flags.KubeConfig, *flags.APIServer = tt.flag, tt.server
			tt.search.apply(flags)
			if got := *flags.KubeConfig; got != tt.want {
				t.Errorf("kubeconfig %q, want %q", got, tt.want)
			}
			config := flags.WrapConfigFn(&rest.Config{})
			if config.WrapTransport == nil != !tt.lost {
				t.Errorf("requests fail: %v, want %v", config.WrapTransport != nil, tt.lost)
			}
			if !strings.HasPrefix(config.UserAgent, "clusterctl/") {
				t.Errorf("user agent %q", config.UserAgent)
			}
		})
	}
}

func TestNoClusterSaysWhatToDo(t *testing.T) {
	err := kubeconfigSearch{home: "/home/me/.kube/config", data: "/nowhere/admin.kubeconfig"}.lost()
	for _, part := range []string{"no cluster is configured", "/home/me/.kube/config", "/nowhere/admin.kubeconfig", "set KUBECONFIG"} {
		if !strings.Contains(err.Error(), part) {
			t.Errorf("%q lacks %q", err, part)
		}
	}
}
