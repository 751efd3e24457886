package image

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestRootLinkLocalNameServer: an image is pulled on a machine whose name server has a
// link-local address, as routers announce it: the interface's index is known to the
// process that has no socket to ask for it.
func TestRootLinkLocalNameServer(t *testing.T) {
	const inside = "CLUSTERD_TEST_LINKLOCAL"
	if os.Getenv(inside) == "" {
		isolated(t, t.TempDir(), nil) // for the conditions of these tests
		cmd := exec.Command("/proc/self/exe", "-test.v", "-test.run=^TestRootLinkLocalNameServer$")
		cmd.Env = append(os.Environ(), inside+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "--- PASS") {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	addr, err := netlink.ParseAddr("fe80::53/64")
	if err != nil {
		t.Fatal(err)
	}
	addr.Flags = unix.IFA_F_NODAD // it is of use at once
	conf := filepath.Join(t.TempDir(), "resolv.conf")
	for _, err := range []error{
		netlink.LinkSetUp(lo),
		netlink.AddrAdd(lo, addr),
		os.WriteFile(conf, []byte("nameserver fe80::53%lo\n"), 0o644),
		unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""),
		unix.Mount(conf, "/etc/resolv.conf", "", unix.MS_BIND, ""),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	defer func() { _ = unix.Unmount("/etc/resolv.conf", unix.MNT_DETACH) }()
	pc, err := net.ListenPacket("udp6", "[fe80::53%lo]:53")
	if err != nil {
		t.Fatal(err)
	}
	names := &dns.Server{PacketConn: pc, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		a := new(dns.Msg).SetReply(q)
		if q.Question[0].Qtype == dns.TypeA {
			head := dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 60}
			a.Answer = []dns.RR{&dns.A{Hdr: head, A: net.IPv4(127, 0, 0, 1)}}
		}
		_ = w.WriteMsg(a)
	})}
	served := make(chan struct{})
	go func() { defer close(served); _ = names.ActivateAndServe() }()
	defer func() { _ = pc.Close(); <-served }()

	host := serve(t, nil)
	push(t, host+"/a:1", build(t, v1.Config{}, archive(t, entry{name: "f", body: "x"})))
	named := strings.Replace(host, "127.0.0.1", "registry.example", 1)
	servedBy(named)
	s := open(t, t.TempDir())
	if _, err := s.Pull(t.Context(), named+"/a:1", Auth{}); err != nil {
		t.Error(err)
	}
}

// servedBy has registries name that host, too.
func servedBy(host string) { served.Store(host, true) }
