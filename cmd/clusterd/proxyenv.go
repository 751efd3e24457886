package main

import (
	"os"
	"strings"
)

// proxyVariables name a proxy to Go's HTTP clients.
var proxyVariables = []string{"HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy"}

// keepFromProxy keeps calls inside the cluster from the proxy of the environment, which
// is for images: webhooks are called as NAME.NAMESPACE.svc, the APIs of others at their
// pods' addresses, and no proxy reaches either. It is called before the first request:
// net/http reads the environment once.
func (c *Config) keepFromProxy() error {
	proxied := false
	for _, name := range proxyVariables {
		proxied = proxied || os.Getenv(name) != ""
	}
	if !proxied {
		return nil
	}
	own := []string{".svc", "." + c.ClusterDomain, c.Advertise}
	for _, r := range c.podRanges() {
		own = append(own, r.String())
	}
	for _, r := range c.serviceRanges() {
		own = append(own, r.String())
	}
	name := "NO_PROXY"
	if os.Getenv(name) == "" && os.Getenv("no_proxy") != "" {
		name = "no_proxy" // the one that counts
	}
	if given := os.Getenv(name); given != "" {
		own = append([]string{given}, own...)
	}
	return os.Setenv(name, strings.Join(own, ","))
}
