package main

import (
	"net/url"
	"os"
	"testing"

	"golang.org/x/net/http/httpproxy"
)

// TestNoProxyInTheCluster: with a proxy in the unit's environment for the registries, a
// webhook of a Service and an aggregated API's pod are called directly.
func TestNoProxyInTheCluster(t *testing.T) {
	for _, variable := range []string{"NO_PROXY", "no_proxy"} {
		for _, name := range append([]string{"NO_PROXY", "no_proxy"}, proxyVariables...) {
			t.Setenv(name, "")
		}
		c, err := parse(t, "clusterDomain: c.example\n", "--advertise=192.0.2.9", "--cluster-cidr=10.244.0.0/14,fd01::/56", "--service-cidr=10.96.0.0/16,fd02::/112")
		if err != nil {
			t.Fatal(err)
		}
		if err := c.keepFromProxy(); err != nil || os.Getenv("NO_PROXY") != "" {
			t.Errorf("without a proxy: %q, %v", os.Getenv("NO_PROXY"), err)
		}
		t.Setenv("HTTPS_PROXY", "http://proxy.example.org:3128")
		t.Setenv(variable, "registry.example.org")
		if err := c.keepFromProxy(); err != nil {
			t.Fatal(err)
		}
		through := httpproxy.FromEnvironment().ProxyFunc() // as net/http has it
		for host, want := range map[string]bool{
			"hook.team.svc:443":        false,
			"hook.team.svc.c.example":  false,
			"10.245.3.4:8443":          false, // a pod
			"10.96.0.1":                false, // a Service
			"[fd01::7]:443":            false,
			"192.0.2.9:6443":           false,
			"registry.example.org":     false, // as was given
			"another.example.org":      true,
			"203.0.113.7":              true,
			"service.example.org:8443": true,
		} {
			proxy, err := through(&url.URL{Scheme: "https", Host: host})
			if err != nil || (proxy != nil) != want {
				t.Errorf("%s given: %s by %v, %v; want a proxy: %v", variable, host, proxy, err, want)
			}
		}
	}
}
