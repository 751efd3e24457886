package host

import (
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
)

func TestSwaps(t *testing.T) {
	const none = "Filename\t\t\t\tType\t\tSize\t\tUsed\t\tPriority\n"
	for text, want := range map[string][]string{
		"":   nil,
		none: nil,
		none + "/swap.img                               file\t\t4092\t\t0\t\t-2\n/dev/zram0 partition 1 0 100\n": {"/swap.img", "/dev/zram0"},
	} {
		if diff := cmp.Diff(want, swaps(text)); diff != "" {
			t.Errorf("%q: %s", text, diff)
		}
	}
	if err := (Machine{}).RefuseSwap(); err != nil {
		t.Error(err)
	}
	err := Machine{Swaps: []string{"/swap.img"}}.RefuseSwap()
	if err == nil || !strings.Contains(err.Error(), "/swap.img") || !strings.Contains(err.Error(), "swapoff") {
		t.Error(err)
	}
}

func TestNotices(t *testing.T) {
	for _, c := range []struct {
		m    Machine
		want string
	}{
		{Machine{CgroupV2: true}, ""},
		{Machine{}, "CgroupV1"},
		{Machine{CgroupV2: true, Swaps: []string{"/a"}}, "SwapOn"},
		{Machine{Swaps: []string{"/a"}}, "CgroupV1 SwapOn"},
	} {
		var got []string
		for _, n := range c.m.Notices() {
			got = append(got, n.Reason)
			if n.Message == "" {
				t.Errorf("%s says nothing", n.Reason)
			}
		}
		if got := strings.Join(got, " "); got != c.want {
			t.Errorf("%+v: %q, want %q", c.m, got, c.want)
		}
	}
}

func TestLook(t *testing.T) {
	m, err := Look()
	if err != nil {
		t.Fatal(err)
	}
	if err := m.CheckNodeIPs(m.Addrs); err != nil {
		t.Error(err)
	}
	if err := m.CheckNodeIPs([]netip.Addr{netip.MustParseAddr("192.0.2.254")}); err == nil || !strings.Contains(err.Error(), "192.0.2.254") {
		t.Error(err)
	}
}

func TestNodeIPs(t *testing.T) {
	for _, c := range []struct{ text, want, err string }{
		{"", "", ""},
		{"192.0.2.7", "192.0.2.7", ""},
		{"2001:db8::7", "2001:db8::7", ""},
		{"::ffff:192.0.2.7", "192.0.2.7", ""},
		{"192.0.2.7, 2001:db8::7", "192.0.2.7 2001:db8::7", ""},
		{"2001:db8::7,192.0.2.7", "2001:db8::7 192.0.2.7", ""},
		{"192.0.2.7,192.0.2.8", "", "one family"},
		{"2001:db8::7,2001:db8::8", "", "one family"},
		{"192.0.2.7,2001:db8::7,192.0.2.8", "", "one of IPv4 and one of IPv6"},
		{"192.0.2.7,", "", `""`},
		{"n1", "", `"n1"`},
		{"fe80::1%eth0", "", "no address"},
		{"fe80::1", "", "link-local"},
		{"169.254.1.1", "", "link-local"},
		{"127.0.0.1", "", "loopback"},
		{"::1", "", "loopback"},
		{"0.0.0.0", "", "unspecified"},
		{"::", "", "unspecified"},
		{"224.0.0.1", "", "multicast"},
		{"ff02::1", "", "multicast"},
		{"255.255.255.255", "", "broadcast"},
	} {
		ips, err := NodeIPs(c.text)
		var got []string
		for _, a := range ips {
			got = append(got, a.String())
		}
		if got := strings.Join(got, " "); got != c.want || (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%q: %q, %v", c.text, got, err)
		}
	}
}

func TestAddresses(t *testing.T) {
	got, err := Addresses("ExternalIP=203.0.113.7, ExternalDNS=n1.example.org,InternalDNS=n1.local,")
	want := []v1.NodeAddress{
		{Type: v1.NodeExternalIP, Address: "203.0.113.7"}, {Type: v1.NodeExternalDNS, Address: "n1.example.org"}, {Type: v1.NodeInternalDNS, Address: "n1.local"},
	}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Error(err, diff)
	}
	for _, text := range []string{
		"203.0.113.7", "ExternalIP=", "ExternalIP=127.0.0.1", "ExternalIP=n1", "ExternalDNS=-n1", "ExternalDNS=", "InternalIP=192.0.2.7", "Hostname=n1", "=x",
		"ExternalIP=203.0.113.7,ExternalIP=203.0.113.7",
	} {
		if got, err := Addresses(text); err == nil || !strings.Contains(err.Error(), "--node-addresses") {
			t.Errorf("%q: %v, %v", text, got, err)
		}
	}
}

func TestFolders(t *testing.T) {
	data := filepath.Join(t.TempDir(), "data")
	if err := os.MkdirAll(filepath.Join(data, "pods"), 0o755); err != nil { // of an earlier version
		t.Fatal(err)
	}
	if err := os.Chmod(data, 0o700); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := Folders(data); err != nil {
			t.Fatal(err)
		}
	}
	for path, want := range map[string]fs.FileMode{
		".": 0o700, "pods": 0o750, "kubelet/plugins": 0o750, "kubelet/plugins_registry": 0o750, "pod-resources": 0o750,
	} {
		if st, err := os.Stat(filepath.Join(data, path)); err != nil || st.Mode().Perm() != want {
			t.Errorf("%s: %v (%v), want %v", path, st, err, want)
		}
	}
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Folders(file); err == nil {
		t.Error("a file was taken for a folder")
	}
}
