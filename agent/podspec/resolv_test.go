package podspec

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

func TestPodResolv(t *testing.T) {
	const host = "# mine\nnameserver 9.9.9.9\nsearch example.com\noptions timeout:2\n"
	const ofHost = "search example.com\nnameserver 9.9.9.9\noptions timeout:2\n"
	const ofCluster = "search ns.svc.c.local svc.c.local c.local example.com\nnameserver 10.43.0.10\noptions ndots:5\n"
	const missing = `MissingClusterDNS The node knows no cluster DNS (--cluster-dns) and cannot create the pod using "ClusterFirstWithHostNet" policy. Falling back to "Default" policy.`
	dns := []netip.Addr{netip.MustParseAddr("10.43.0.10")}
	option := func(name, value string) v1.PodDNSConfigOption {
		o := v1.PodDNSConfigOption{Name: name}
		if value != "" {
			o.Value = ptr.To(value)
		}
		return o
	}
	many := func(n int, format string) (out []string) {
		for i := range n {
			out = append(out, fmt.Sprintf(format, i))
		}
		return out
	}
	for _, tt := range []struct {
		name string
		spec v1.PodSpec
		dns  []netip.Addr
		want string
		warn string // all warnings
	}{
		{"cluster first", v1.PodSpec{DNSPolicy: v1.DNSClusterFirst}, dns, ofCluster, ""},
		{"nothing said", v1.PodSpec{}, dns, ofCluster, ""},
		{"no cluster DNS", v1.PodSpec{DNSPolicy: v1.DNSClusterFirst}, nil, ofHost, ""},
		{"no cluster DNS, asked for", v1.PodSpec{DNSPolicy: v1.DNSClusterFirstWithHostNet, HostNetwork: true}, nil, ofHost, missing},
		{"default", v1.PodSpec{DNSPolicy: v1.DNSDefault}, dns, ofHost, ""},
		{"default without cluster DNS", v1.PodSpec{DNSPolicy: v1.DNSDefault}, nil, ofHost, ""},
		{"host network", v1.PodSpec{DNSPolicy: v1.DNSClusterFirst, HostNetwork: true}, dns, ofHost, ""},
		{"host network without cluster DNS", v1.PodSpec{DNSPolicy: v1.DNSClusterFirst, HostNetwork: true}, nil, ofHost, ""},
		{"with host network", v1.PodSpec{DNSPolicy: v1.DNSClusterFirstWithHostNet, HostNetwork: true}, dns, ofCluster, ""},
		{
			"none", v1.PodSpec{DNSPolicy: v1.DNSNone, DNSConfig: &v1.PodDNSConfig{
				Nameservers: []string{"1.1.1.1"}, Searches: []string{"a.b"}, Options: []v1.PodDNSConfigOption{option("ndots", "2"), option("edns0", "")},
			}}, dns, "search a.b\nnameserver 1.1.1.1\noptions ndots:2 edns0\n", "",
		},
		{
			"merged, each once", v1.PodSpec{DNSConfig: &v1.PodDNSConfig{
				Nameservers: []string{"1.1.1.1", "10.43.0.10"}, Searches: []string{"c.local", "a.b"},
				Options: []v1.PodDNSConfigOption{option("ndots", "2"), option("attempts", "3")},
			}}, dns, "search ns.svc.c.local svc.c.local c.local example.com a.b\nnameserver 10.43.0.10\nnameserver 1.1.1.1\noptions ndots:2 attempts:3\n", "",
		},
		{
			"too many servers", v1.PodSpec{DNSConfig: &v1.PodDNSConfig{Nameservers: many(3, "192.0.2.%d")}}, dns,
			"search ns.svc.c.local svc.c.local c.local example.com\nnameserver 10.43.0.10\nnameserver 192.0.2.0\nnameserver 192.0.2.1\noptions ndots:5\n",
			"DNSConfigForming Nameserver limits were exceeded, some nameservers have been omitted, the applied nameserver line is: 10.43.0.10 192.0.2.0 192.0.2.1",
		},
		{
			"32 domains", v1.PodSpec{DNSConfig: &v1.PodDNSConfig{Searches: many(28, "d%d")}}, dns,
			"search ns.svc.c.local svc.c.local c.local example.com " + strings.Join(many(28, "d%d"), " ") + "\nnameserver 10.43.0.10\noptions ndots:5\n", "",
		},
		{
			"33 domains", v1.PodSpec{DNSConfig: &v1.PodDNSConfig{Searches: many(29, "d%d")}}, dns,
			"search ns.svc.c.local svc.c.local c.local example.com " + strings.Join(many(28, "d%d"), " ") + "\nnameserver 10.43.0.10\noptions ndots:5\n",
			"DNSConfigForming Search Line limits were exceeded, some search paths have been omitted, the applied search line is: ns.svc.c.local svc.c.local c.local example.com " + strings.Join(many(28, "d%d"), " "),
		},
		{
			// 10 of 199 and a space each are 2000 beside example.com's 11; the next does not fit.
			"too long a line", v1.PodSpec{DNSPolicy: v1.DNSDefault, DNSConfig: &v1.PodDNSConfig{Searches: many(11, strings.Repeat("x", 197)+"%02d")}}, dns,
			"search example.com " + strings.Join(many(10, strings.Repeat("x", 197)+"%02d"), " ") + "\nnameserver 9.9.9.9\noptions timeout:2\n",
			"DNSConfigForming Search Line limits were exceeded, some search paths have been omitted, the applied search line is: example.com " + strings.Join(many(10, strings.Repeat("x", 197)+"%02d"), " "),
		},
		{
			"too long a domain", v1.PodSpec{DNSPolicy: v1.DNSDefault, DNSConfig: &v1.PodDNSConfig{Searches: []string{strings.Repeat("x", 256), "a.b"}}}, dns,
			"search example.com a.b\nnameserver 9.9.9.9\noptions timeout:2\n",
			"DNSConfigForming Search Line limits were exceeded, some search paths have been omitted, the applied search line is: example.com a.b",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns"}, Spec: tt.spec}
			var warnings []string
			got := podResolv(p, parseResolv(host), tt.dns, "c.local", func(reason, message string) { warnings = append(warnings, reason+" "+message) })
			if d := cmp.Diff(tt.want, got.String()); d != "" {
				t.Error(d)
			}
			if d := cmp.Diff(tt.warn, strings.Join(warnings, "\n")); d != "" {
				t.Error(d)
			}
		})
	}
}

// TestPodResolvLinkLocal: a server on the host's link is left out for pods on their own,
// and asked by the cluster's where there is no other.
func TestPodResolvLinkLocal(t *testing.T) {
	dns := []netip.Addr{netip.MustParseAddr("fd00:10:96::a")}
	for _, tt := range []struct {
		name, host  string
		hostNetwork bool
		dns         []netip.Addr
		want        string
		warns       bool
	}{
		{"beside another", "nameserver fe80::1%eth0\nnameserver 2001:db8::53\n", false, dns, "nameserver 2001:db8::53\n", false},
		{"alone", "nameserver fe80::1%eth0\n", false, dns, "nameserver fd00:10:96::a\n", false},
		{"alone, of the host's network", "nameserver fe80::1%eth0\n", true, dns, "nameserver fe80::1%eth0\n", false},
		{"alone, without cluster DNS", "nameserver fe80::1%eth0\n", false, nil, "", true},
		{"of a cloud", "nameserver 169.254.169.254\n", false, dns, "nameserver 169.254.169.254\n", false},
		{"no server", "", false, dns, "", false},
	} {
		var warned []string
		p := &v1.Pod{Spec: v1.PodSpec{DNSPolicy: v1.DNSDefault, HostNetwork: tt.hostNetwork}}
		got := podResolv(p, parseResolv(tt.host), tt.dns, "c.local", func(_, message string) { warned = append(warned, message) })
		if got.String() != tt.want || (len(warned) > 0) != tt.warns {
			t.Errorf("%s: %q, warned %q; want %q", tt.name, got, warned, tt.want)
		}
	}
}

// TestHostResolv: a server that only the host itself can ask is of no use to a
// pod, so the file behind systemd-resolved's stub is taken.
func TestHostResolv(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	plain := file("plain", "nameserver 192.0.2.53\nsearch a\n")
	stub := file("stub", "nameserver 127.0.0.53\noptions edns0\n")
	both := file("both", "nameserver 127.0.0.1\nnameserver 192.0.2.54\n")
	behind := file("behind", "domain b\nnameserver 192.0.2.55\n")
	for _, tt := range []struct{ etc, behind, want string }{
		{plain, behind, "search a\nnameserver 192.0.2.53\n"},
		{file("root", "nameserver 192.0.2.53\nsearch .\n"), behind, "nameserver 192.0.2.53\n"},
		{file("dots", "nameserver 192.0.2.53\nsearch a.example. . b\n"), behind, "search a.example b\nnameserver 192.0.2.53\n"},
		{both, behind, "nameserver 127.0.0.1\nnameserver 192.0.2.54\n"},
		{stub, behind, "search b\nnameserver 192.0.2.55\n"},
		{stub, "/no/such", "nameserver 127.0.0.53\noptions edns0\n"},
		{"/no/such", "/no/such", ""},
	} {
		got, err := resolvInUse(tt.etc, tt.behind)
		if err != nil || got.String() != tt.want {
			t.Errorf("%s, %s: %q, %v, want %q", tt.etc, tt.behind, got, err, tt.want)
		}
	}
	if got, err := hostResolv(stub); err != nil || got.String() != "nameserver 127.0.0.53\noptions edns0\n" {
		t.Errorf("a file that was named is not looked behind: %q, %v", got, err)
	}
	if _, err := hostResolv("/no/such"); err == nil {
		t.Error("a file that was named is not there, and that is no error")
	}
}
