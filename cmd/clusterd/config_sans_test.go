package main

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/pki"
)

func TestTLSSANs(t *testing.T) {
	c, err := parse(t, "tlsSANs: api.example.org\nclusterDomain: c.example\n", "--advertise=192.0.2.9")
	if err != nil || !slices.Equal(certNames(c), []string{"kubernetes.default.svc.c.example", "api.example.org"}) {
		t.Errorf("%q, %v", certNames(c), err)
	}
	c, err = parse(t, "", "--advertise=192.0.2.9", "--tls-san=lb, 203.0.113.7,2001:db8::7")
	if err != nil || !slices.Contains(certNames(c), "lb") {
		t.Fatalf("%q, %v", certNames(c), err)
	}
	for _, want := range []string{"203.0.113.7", "2001:db8::7"} {
		if got := certAddrs(c); !slices.Contains(got, netip.MustParseAddr(want)) {
			t.Errorf("%s is not among %v", want, got)
		}
	}
	for value, want := range map[string]string{
		"api.example.org:6443":          "without a port",
		"*.example.org":                 "other machines' too",
		"API.example.org":               "such as api.example.org",
		"0.0.0.0":                       "an address that clients can call",
		"fe80::1%eth0":                  "an address that clients can call",
		"10.96.0.10":                    "it is a Service's, of --service-cidr 10.96.0.0/16: leave it out; the API's own, 10.96.0.1",
		"10.244.3.4":                    "it is a pod's, of --cluster-cidr",
		"db.prod.svc":                   "are Services' and pods'",
		"db.prod.svc.cluster.local":     "are Services' and pods'",
		"good.example.org,bad_name.org": `"bad_name.org"`,
	} {
		_, err := parse(t, "", "--advertise=192.0.2.9", "--tls-san="+value)
		if err == nil || !strings.Contains(err.Error(), "--tls-san: ") || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %s", value, err, want)
		}
	}
}

// TestCertificateFollowsTLSSANs: a server makes its certificate again when its names
// have changed: with one more, and without one that was taken back.
func TestCertificateFollowsTLSSANs(t *testing.T) {
	m, _ := sealingServer(t)
	m.cfg = defaultConfig()
	m.cfg.Name, m.cfg.Advertise = "n1", "127.0.0.1"
	now := time.Now()
	var err error
	// As another server signs it at the join: for its own name and address alone.
	if m.id.Cert, err = m.id.Trust.Signer().IssueServer(m.id.Key.Public(), "n1", certAddrs(m.cfg)[:1], now); err != nil {
		t.Fatal(err)
	}
	if err := m.dir.WriteIdentity(m.id); err != nil {
		t.Fatal(err)
	}
	for _, step := range []struct {
		sans, domain   string
		names, refuses []string
	}{
		{"", "cluster.local", []string{"n1", "kubernetes.default.svc.cluster.local", "10.96.0.1"}, []string{"api.example.org", "203.0.113.7"}},
		{"api.example.org,203.0.113.7", "cluster.local", []string{"n1", "api.example.org", "203.0.113.7", "127.0.0.1"}, []string{"n2"}},
		{"203.0.113.7", "c.example", []string{"203.0.113.7", "kubernetes.default.svc.c.example"}, []string{"api.example.org", "kubernetes.default.svc.cluster.local"}},
	} {
		m.cfg.TLSSANs, m.cfg.ClusterDomain = step.sans, step.domain
		var serials []string
		for range 2 { // it is not made again without need
			if err := m.renewCert(now); err != nil {
				t.Fatal(err)
			}
			cert := m.cert.Load().Leaf
			serials = append(serials, cert.SerialNumber.String())
			for _, name := range step.names {
				if err := cert.VerifyHostname(name); err != nil {
					t.Errorf("--tls-san %q: %v", step.sans, err)
				}
			}
			for _, name := range step.refuses {
				if cert.VerifyHostname(name) == nil {
					t.Errorf("--tls-san %q: the certificate is good for %s", step.sans, name)
				}
			}
		}
		written, err := m.dir.ReadNodeCert()
		if err != nil || serials[0] != serials[1] || written.SerialNumber.String() != serials[1] {
			t.Errorf("--tls-san %q: serial numbers %q, on disk %v, %v", step.sans, serials, written.SerialNumber, err)
		}
	}
	if pki.NodeRole(m.cert.Load().Leaf) != pki.Server {
		t.Error("it is no server's")
	}
}
