package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/bench/internal/proc"
)

const (
	domain = "cluster.local."
	ours   = "agent/dns"
)

// remembered are names outside of the cluster, searched what a resolver makes of one
// by its search domains.
var remembered, searched = func() (out, below []string) {
	for i := range 500 {
		name := fmt.Sprintf("host-%d.example.com.", i)
		out, below = append(out, name), append(below, name+"prod.svc."+domain)
	}
	return out, below
}()

func serviceNames(n int) []string {
	var out []string
	for i := range n {
		out = append(out, fmt.Sprintf("svc-%d.prod.svc.%s", i, domain))
	}
	return out
}

// side is a name server that is measured: a process.
type side struct {
	name, addr string
	cmd        *exec.Cmd
	dir        string
}

func (s *side) pid() int { return s.cmd.Process.Pid }

// settle waits until the server is done with what it was asked last: one that was
// asked more than it can answer is not when its client is.
func (s *side) settle(ctx context.Context) error {
	const look = 250 * time.Millisecond
	for end := time.Now().Add(time.Minute); ; {
		before, err := proc.One(s.pid())
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(look):
		}
		after, err := proc.One(s.pid())
		if err != nil {
			return err
		}
		if after.CPU-before.CPU < look/10 {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%s is still busy a minute later", s.name)
		}
	}
}

func (s *side) end() {
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	_ = s.cmd.Wait()
	if s.dir != "" {
		_ = os.RemoveAll(s.dir)
	}
}

// start runs a program that ends with this one.
func start(name string, args ...string) (*exec.Cmd, error) {
	cmd := exec.Command(name, args...)
	cmd.Stderr = os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd, cmd.Start()
}

// corefile is what Kubernetes' own installer gives CoreDNS, without what has no
// counterpart here (health, ready, reload, loop).
const corefile = `.:%d {
	bind 127.0.0.1
	errors
	%s
	kubernetes cluster.local in-addr.arpa ip6.arpa {
		endpoint %s
		pods insecure
		fallthrough in-addr.arpa ip6.arpa
	}
	prometheus 127.0.0.1:%d
	forward . %s {
		max_concurrent 1000
	}
	cache 3600 {
		disable success cluster.local
		disable denial cluster.local
	}
	loadbalance
}
`

// startSides starts all name servers, and waits until they know the last Service.
func startSides(ctx context.Context, o options, api, outside string) (list []*side, err error) {
	defer func() {
		if err != nil {
			for _, s := range list {
				s.end()
			}
		}
	}()
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	cmd, err := start(o.server, "-addr", addr, "-api", api, "-upstream", outside)
	if err != nil {
		return nil, fmt.Errorf("%s (make bench-dns builds it): %w", o.server, err)
	}
	list = append(list, &side{name: ours, addr: addr, cmd: cmd})
	if o.coredns != "" {
		for _, extra := range []string{"", "multisocket"} {
			s, err := startCoreDNS(o.coredns, strings.TrimSpace("coredns "+extra), extra, api, outside)
			if err != nil {
				return list, fmt.Errorf("%s (make bench-dns builds it): %w", o.coredns, err)
			}
			list = append(list, s)
		}
	}
	for _, s := range list {
		if err := ask(s.addr, serviceNames(o.services)[o.services-1:], 2*time.Minute); err != nil {
			return list, fmt.Errorf("%s: %w", s.name, err)
		}
	}
	return list, ctx.Err()
}

func startCoreDNS(bin, name, extra, api, outside string) (*side, error) {
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	metrics, err := freePort()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "clusterd-bench-dns-")
	if err != nil {
		return nil, err
	}
	file := filepath.Join(dir, "Corefile")
	if err := os.WriteFile(file, fmt.Appendf(nil, corefile, port, extra, api, metrics, outside), 0o600); err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	cmd, err := start(bin, "-conf", file, "-quiet")
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return &side{name: name, addr: fmt.Sprintf("127.0.0.1:%d", port), cmd: cmd, dir: dir}, nil
}

// freePort is one that nobody has, for both protocols.
func freePort() (int, error) {
	for {
		p, err := net.ListenPacket("udp4", "127.0.0.1:0")
		if err != nil {
			return 0, err
		}
		l, taken := net.Listen("tcp4", p.LocalAddr().String())
		port := p.LocalAddr().(*net.UDPAddr).Port
		if err := p.Close(); err != nil {
			return 0, err
		}
		if taken == nil {
			return port, l.Close()
		}
	}
}

// ask asks for each name until it is answered.
func ask(addr string, names []string, limit time.Duration) error {
	c := dns.Client{Timeout: time.Second}
	end := time.Now().Add(limit)
	for _, name := range names {
		for {
			m, _, err := c.Exchange(new(dns.Msg).SetQuestion(name, dns.TypeA), addr)
			if err == nil && len(m.Answer) > 0 {
				break
			}
			if time.Now().After(end) {
				return fmt.Errorf("%s is not answered within %s: %v %v", name, limit, m, err)
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	return nil
}

// outside is the name server that both ask for other names.
type outside struct {
	addr string
	srv  *dns.Server
}

func newOutside() (*outside, error) {
	pc, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	o := &outside{addr: pc.LocalAddr().String()}
	o.srv = &dns.Server{PacketConn: pc, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, r *dns.Msg) {
		m := new(dns.Msg).SetReply(r)
		if r.Question[0].Qtype == dns.TypeA {
			h := dns.RR_Header{Name: r.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 3600}
			m.Answer = []dns.RR{&dns.A{Hdr: h, A: net.IPv4(192, 0, 2, 8)}}
		}
		_ = w.WriteMsg(m)
	})}
	go func() { _ = o.srv.ActivateAndServe() }()
	return o, nil
}

func (o *outside) close() { _ = o.srv.Shutdown() }

// ownTime is what this process has used.
func ownTime() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// busyTime is what all processors have done, of all processes.
func busyTime() time.Duration {
	b, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	var name string
	var user, nice, system, idle, wait, irq, soft int64
	if _, err := fmt.Sscan(string(b), &name, &user, &nice, &system, &idle, &wait, &irq, &soft); err != nil {
		return 0
	}
	return time.Duration(user+nice+system+irq+soft) * 10 * time.Millisecond
}

func machine() string {
	var u unix.Utsname
	_ = unix.Uname(&u)
	return fmt.Sprintf("%d processors, Linux %s", runtime.NumCPU(), unix.ByteSliceToString(u.Release[:]))
}
