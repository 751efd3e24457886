package kubectl

import (
	"testing"

	"github.com/clusterd/clusterd/e2e/features"
)

// TestE2EXDNSConfig: what a pod says of its name servers is its resolv.conf.
func TestE2EXDNSConfig(t *testing.T) {
	t.Parallel()
	k := start(t, "dnsconfig")
	features.Conforms(k, 219)
	k.apply(simple("p", "sleep", "dnsPolicy: None", "dnsConfig: {nameservers: [192.0.2.53], searches: [example.test], options: [{name: ndots, value: '2'}]}"))
	k.ready("p")
	k.is("resolv.conf", k.exec("p", "main", "cat", "/etc/resolv.conf"), "search example.test\nnameserver 192.0.2.53\noptions ndots:2\n")
	k.ok("delete", "pod", "p", "--wait=false")
}
