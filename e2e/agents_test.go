package e2e

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/e2e/cluster/clustertest"
	"github.com/clusterd/clusterd/features"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/transport"
)

// TestE2EAgents is a cluster of three servers and two agents: what agents hold
// and may do, that their pods are like all others, and that they outlive any
// server.
func TestE2EAgents(t *testing.T) {
	e := startBare(t, 3, func(c *cluster.Config) { c.Agents = 2 })
	e.ready(5)
	ns := e.namespace("agents")

	t.Run("members", func(t *testing.T) {
		e.eventually("the agents are listed as such", func(context.Context) error {
			list, err := e.members()
			if err != nil {
				return err
			}
			for _, m := range list.Members {
				if agent := strings.HasPrefix(m.Name, "a"); (m.Role == "agent") != agent || agent && m.Gossip != "answers" {
					return fmt.Errorf("%+v", m)
				}
			}
			if len(list.Members) != 5 {
				return fmt.Errorf("%d members", len(list.Members))
			}
			return nil
		})
		e.eventuallyHas([]string{"store", "status"}, "n1", "n2", "n3")
		for line := range strings.Lines(e.ctl("store", "status")) {
			if name, _, _ := strings.Cut(line, " "); name == "a1" || name == "a2" {
				t.Errorf("an agent is listed with the stores: %s", line)
			}
		}
		nodes := e.ctl("get", "nodes", "-o", "custom-columns=N:.metadata.name,R:.metadata.labels", "--no-headers")
		for line := range strings.Lines(nodes) {
			role := "node-role.kubernetes.io/control-plane"
			if strings.HasPrefix(line, "a") {
				role = "node-role.kubernetes.io/agent"
			}
			mustContain(t, "a node's labels", line, role)
		}
	})

	for _, agent := range []string{"a1", "a2"} {
		p := pod("on-" + agent)
		p.Spec.NodeName = agent
		e.create(ns, p)
	}
	first := e.podReady(ns, "on-a1")
	e.podReady(ns, "on-a2")

	t.Run("pods", func(t *testing.T) {
		for _, from := range []string{"n1", "a2"} {
			e.eventually("the page of a pod on a1 from "+from, func(context.Context) error {
				body, err := e.page(from, first.Status.PodIP)
				if err == nil && body == "" {
					err = errors.New("an empty page")
				}
				return err
			})
		}
		e.eventuallyHas([]string{"logs", "-n", ns, "on-a1"}, "serving on")
		e.eventuallyHas([]string{"exec", "-n", ns, "on-a1", "--", "/hello", "echo", "from-a1"}, "from-a1")
	})

	t.Run("ways between nodes", func(t *testing.T) { e.netDoctor(t, "n1", "a1") })

	t.Run("promoted, and demoted again", func(t *testing.T) {
		id := e.get(ns, "on-a1").Status.ContainerStatuses[0].ContainerID
		mustContain(t, "of a server", e.refused("", "members", "promote", "n2"), "n2 has the role server already")
		mustContain(t, "of an unknown name", e.refused("", "members", "demote", "ghost"), `no member is called "ghost"`)
		mustContain(t, "promote", e.ctl("members", "promote", "a1"), `member "a1" is a server now`)
		e.eventually("a1 serves the API, with the state of all", func(ctx context.Context) error {
			client, _, err := e.Client("a1")
			if err != nil {
				return err
			}
			_, err = client.CoreV1().Pods(ns).Get(ctx, "on-a1", metav1.GetOptions{})
			return err
		})
		roleIs := func(want, not string) {
			e.eventually("its Node is labelled "+want, func(ctx context.Context) error {
				n, err := e.api.CoreV1().Nodes().Get(ctx, "a1", metav1.GetOptions{})
				if err != nil {
					return err
				}
				_, has := n.Labels["node-role.kubernetes.io/"+want]
				_, old := n.Labels["node-role.kubernetes.io/"+not]
				if !has || old || !nodeReady(n) {
					return fmt.Errorf("labels %v, conditions %+v", n.Labels, n.Status.Conditions)
				}
				return nil
			})
		}
		roleIs("control-plane", "agent")
		e.eventuallyHas([]string{"logs", "-n", ns, "on-a1"}, "serving on")
		leader := e.leader()
		other := e.other(leader, "a1", "a2") // the leader will have no API to ask
		e.use(other)
		by := "--kubeconfig=" + e.Nodes()[slices.IndexFunc(e.Nodes(), func(n cluster.Node) bool { return n.Name == other })].Kubeconfig()
		mustContain(t, "demote the leader", e.ctl("members", "demote", leader, by), `member "`+leader+`" is an agent now`)
		mustContain(t, "promote it again", e.ctl("members", "promote", leader, by), `member "`+leader+`" is a server now`)
		mustContain(t, "demote", e.ctl("members", "demote", "a1", by), `member "a1" is an agent now`)
		roleIs("agent", "control-plane")
		e.eventuallyHas([]string{"logs", "-n", ns, "on-a1"}, "serving on")
		if got := e.get(ns, "on-a1").Status.ContainerStatuses[0]; got.ContainerID != id || got.RestartCount != 0 {
			t.Errorf("its pod was started again: %+v, before %s", got, id)
		}
	})

	t.Run("what lies on an agent's disk", func(t *testing.T) {
		features.Shows(t, 134)
		data := e.data("a1")
		e.eventually("it holds an agent's files alone", func(context.Context) error { // a file may be about to be replaced
			var names []string
			entries, err := os.ReadDir(filepath.Join(data, "pki"))
			if err != nil {
				return err
			}
			for _, entry := range entries {
				names = append(names, entry.Name())
			}
			if want := []string{"ca-client.crt", "ca-front.crt", "ca-node.crt", "ca-secrets.crt", "ca.crt", "node.crt", "node.key", "trust"}; !slices.Equal(names, want) {
				return fmt.Errorf("pki holds %v, want %v", names, want)
			}
			for _, name := range []string{"store", "admin.kubeconfig", "peers.json"} {
				if _, err := os.Stat(filepath.Join(data, name)); !errors.Is(err, os.ErrNotExist) {
					return fmt.Errorf("an agent has %s (%v)", name, err)
				}
			}
			return nil
		})
		pid, err := e.Pid("a1")
		if err != nil {
			t.Fatal(err)
		}
		cmdline, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err != nil || strings.Contains(string(cmdline), "cd1.") {
			t.Errorf("the token stays in the list of processes: %q %v", cmdline, err)
		}
	})

	t.Run("a stolen agent's key", func(t *testing.T) { stolenAgentKey(t, e) })
	t.Run("a stolen server's key", func(t *testing.T) { stolenServerKey(t, e, ns) })

	t.Run("behind a firewall", func(t *testing.T) {
		if err := e.Do("a2", closePort6443); err != nil {
			t.Fatal(err)
		}
		for _, server := range []string{"n1", "n2", "n3"} {
			e.use(server)
			e.eventually(server+" reads a log there", func(ctx context.Context) error {
				b, err := e.api.CoreV1().Pods(ns).GetLogs("on-a2", &corev1.PodLogOptions{}).Do(ctx).Raw()
				if err == nil && !strings.Contains(string(b), "serving on") {
					err = fmt.Errorf("%q", b)
				}
				return err
			})
			e.eventuallyHas([]string{"exec", "-n", ns, "on-a2", "--", "/hello", "echo", "from-a2"}, "from-a2")
		}
		e.eventually("it answers as a member", func(context.Context) error {
			list, err := e.members()
			if err != nil {
				return err
			}
			for _, m := range list.Members {
				if m.Name == "a2" && m.Gossip != "answers" {
					return fmt.Errorf("%+v", m)
				}
			}
			return nil
		})
	})

	t.Run("its server dies", func(t *testing.T) {
		features.Shows(t, 143)
		uids := map[string]string{}
		for _, name := range []string{"on-a1", "on-a2"} {
			uids[name] = e.get(ns, name).Status.ContainerStatuses[0].ContainerID
		}
		e.eventually("the agents know every server", func(context.Context) error {
			for _, agent := range []string{"a1", "a2"} {
				b, err := os.ReadFile(filepath.Join(e.data(agent), "servers.json"))
				if err != nil {
					return err
				}
				if n := strings.Count(string(b), `"addr"`); n != 3 {
					return fmt.Errorf("%s knows %d: %s", agent, n, b)
				}
			}
			return nil
		})
		// Each in turn, so that one of them is the agents' and one the leader.
		for _, victim := range []string{"n1", "n2", "n3"} {
			e.votersAre("n1", "n2", "n3") // one that was an agent just now is given its vote a while later
			if victim == "n2" {
				if err := e.Pause(victim); err != nil { // frozen: its connections stay open
					t.Fatal(err)
				}
			} else if err := e.Kill(victim); err != nil {
				t.Fatal(err)
			}
			e.use(e.other(victim, "a1", "a2"))
			began := time.Now()
			e.eventually("the agents renew their leases without "+victim, func(ctx context.Context) error {
				for _, agent := range []string{"a1", "a2"} {
					lease, err := e.api.CoordinationV1().Leases("kube-node-lease").Get(ctx, agent, metav1.GetOptions{})
					if err != nil {
						return err
					}
					if !lease.Spec.RenewTime.After(began.Add(time.Second)) {
						return fmt.Errorf("%s: %s", agent, lease.Spec.RenewTime)
					}
				}
				return nil
			})
			name := "after-" + victim
			p := pod(name)
			p.Spec.NodeName = "a1"
			e.create(ns, p)
			e.podReady(ns, name)
			t.Logf("without %s both agents reported, and a pod ran, after %s", victim, time.Since(began).Round(100*time.Millisecond))
			var err error
			if victim == "n2" {
				err = e.Resume(victim)
			} else {
				err = e.Start(t.Context(), victim)
			}
			if err != nil {
				t.Fatal(err)
			}
			e.eventually(victim+" serves again", func(ctx context.Context) error {
				client, _, err := e.Client(victim)
				if err != nil {
					return err
				}
				return client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
			})
		}
		for name, id := range uids {
			if got := e.get(ns, name).Status.ContainerStatuses[0]; got.ContainerID != id || got.RestartCount != 0 {
				t.Errorf("%s: %+v, before %s", name, got, id)
			}
		}
	})

	t.Run("no server is left for a while", func(t *testing.T) {
		features.Shows(t, 175, 188)
		uid := string(e.get(ns, "on-a1").UID)
		kept := e.processOf("a1", string(e.get(ns, "after-n1").UID))
		for _, server := range []string{"n1", "n2", "n3"} {
			if err := e.Kill(server); err != nil {
				t.Fatal(err)
			}
		}
		killed := e.processOf("a1", uid)
		if err := unix.Kill(killed, unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		e.eventually("the agent starts the container again", func(context.Context) error {
			pid := e.processOf("a1", uid)
			program, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
			if pid == 0 || pid == killed || err != nil || filepath.Base(program) != "hello" { // those that prepare it end again
				return fmt.Errorf("process %d of %q, %v", pid, program, err)
			}
			return nil
		})
		// An agent that begins without an API knows none of its pods.
		a1 := e.Nodes()[slices.IndexFunc(e.Nodes(), func(n cluster.Node) bool { return n.Name == "a1" })]
		kubelet := net.JoinHostPort(a1.Addr.String(), "10250")
		if err := e.Kill("a1"); err != nil {
			t.Fatal(err)
		}
		if err := e.Start(t.Context(), "a1"); err != nil {
			t.Fatal(err)
		}
		e.eventually("it works, and cannot reach the API", func(ctx context.Context) error {
			// A client without a token is rejected without a request to the API.
			var conn *tls.Conn
			err := e.Do("a1", func() error {
				d := tls.Dialer{Config: &tls.Config{InsecureSkipVerify: true}} // only whether something answers
				c, err := d.DialContext(ctx, "tcp", kubelet)
				if err == nil {
					conn = c.(*tls.Conn)
				}
				return err
			})
			if err == nil {
				err = conn.Close()
			}
			if err == nil && !strings.Contains(e.log("a1"), "no server answers") {
				err = errors.New("its log does not say that no server answers")
			}
			return err
		})
		again := e.processOf("a1", uid)
		for _, server := range []string{"n1", "n2", "n3"} {
			if err := e.Start(t.Context(), server); err != nil {
				t.Fatal(err)
			}
		}
		e.use("n1")
		e.podIs(ns, "on-a1", "tells of the restart", func(p *corev1.Pod) error {
			if s := p.Status.ContainerStatuses[0]; s.RestartCount != 1 || !s.Ready {
				return fmt.Errorf("%+v", s)
			}
			return nil
		})
		log, err := e.Logs("a1")
		if err != nil {
			t.Fatal(err)
		}
		defer log.Close()
		b, err := io.ReadAll(log)
		if err != nil {
			t.Fatal(err)
		}
		if n := strings.Count(string(b), "no server answers"); n == 0 || n > 10 {
			t.Errorf("the log says %d times that no server answers", n)
		}
		if got := e.processOf("a1", uid); again == 0 || got != again {
			t.Errorf("the container is process %d, was %d", got, again)
		}
		if got := e.processOf("a1", string(e.get(ns, "after-n1").UID)); kept == 0 || got != kept {
			t.Errorf("another container is process %d, was %d", got, kept)
		}
	})

	t.Run("removed", func(t *testing.T) {
		e.ctl("members", "rm", "--yes", "a2")
		e.eventually("a2 ends, as it is not a member any more", func(context.Context) error {
			if pid, err := e.Pid("a2"); err == nil {
				return fmt.Errorf("process %d lives", pid)
			}
			return nil
		})
		e.eventually("a removed agent's key opens no server", func(context.Context) error { // n1 learns of it by a watch
			if err := dialAs(e, "a2", "n1", transport.Member); err == nil {
				return errors.New("it opens n1")
			}
			return nil
		})
		e.eventually("the other's does", func(context.Context) error { return dialAs(e, "a1", "n1", transport.Member) })
	})
}

// closePort6443 makes the network namespace drop what comes for that port, as a
// firewall or NAT does.
func closePort6443() error {
	conn, err := nftables.New()
	if err != nil {
		return err
	}
	table := conn.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "firewall"})
	chain := conn.AddChain(&nftables.Chain{Name: "input", Table: table, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookInput, Priority: nftables.ChainPriorityFilter})
	conn.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{
		&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}, // destination port
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: binary.BigEndian.AppendUint16(nil, 6443)},
		&expr.Verdict{Kind: expr.VerdictDrop},
	}})
	return conn.Flush()
}

// processOf is a process of a pod on a node; 0: there is none.
func (e *env) processOf(node, uid string) int {
	e.t.Helper()
	pids, err := e.Processes(node)
	if err != nil {
		e.t.Fatal(err)
	}
	for _, pid := range pids {
		group, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		if err == nil && strings.Contains(string(group), uid) {
			return pid
		}
	}
	return 0
}

// stolenIdentity is what lies in a node's directory.
func stolenIdentity(e *env, node string) transport.Identity {
	e.t.Helper()
	id, err := clustertest.Stolen(nodeOf(e, node))
	if err != nil {
		e.t.Fatal(err)
	}
	return id
}

// dialAs opens a connection with a node's key, and reports whether its other
// end kept it open. The host reaches every machine.
func dialAs(e *env, key, to, protocol string) error {
	return dialFor(e, 3*time.Second, key, to, protocol)
}

// dialFor is dialAs, which looks for so long whether the connection is closed.
func dialFor(e *env, open time.Duration, key, to, protocol string) error {
	ctx, cancel := context.WithTimeout(e.t.Context(), testTimeout)
	defer cancel()
	c, err := stolenIdentity(e, key).Dial(ctx, addrOf(e, to), "", protocol)
	if err != nil {
		return err
	}
	defer c.Close()
	// A refusal closes; an open door waits for the first request.
	c.SetReadDeadline(time.Now().Add(open))
	if _, err := c.Read(make([]byte, 1)); err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
		return err
	}
	return nil
}

func addrOf(e *env, node string) netip.AddrPort {
	i := slices.IndexFunc(e.Nodes(), func(n cluster.Node) bool { return n.Name == node })
	return netip.AddrPortFrom(e.Nodes()[i].Addr, 6443)
}

// stolenAgentKey tries the doors with the key of agent a1.
func stolenAgentKey(t *testing.T, e *env) {
	for _, to := range []string{"n1", "n2", "a2"} {
		for _, protocol := range []string{transport.Raft, transport.Gossip, transport.Node} {
			// A busy machine may take long to refuse.
			if err := dialFor(e, stalled, "a1", to, protocol); err == nil {
				t.Errorf("%s of %s is open to an agent's key", protocol, to)
			}
		}
	}
	e.eventually("a server's key opens an agent", func(context.Context) error { return dialAs(e, "n1", "a2", transport.Node) })
	id := stolenIdentity(e, "a1")
	dial := func(protocol string) join.Dialer {
		return func(ctx context.Context) (net.Conn, error) { return id.Dial(ctx, addrOf(e, "n2"), "", protocol) }
	}
	e.eventually("the cluster's keys are refused", func(ctx context.Context) error {
		var no *join.Refusal
		_, err := join.FetchKeys(ctx, dial(transport.Member))
		if err == nil {
			t.Fatal("they are given to an agent's key")
		}
		if !errors.As(err, &no) {
			return fmt.Errorf("the answer: %w", err)
		}
		return nil
	})
	// The API: its own things, and nothing of others.
	data := e.data("a1")
	config := &rest.Config{Host: "https://" + addrOf(e, "n1").String(), TLSClientConfig: rest.TLSClientConfig{
		CertFile: filepath.Join(data, "pki", "node.crt"), KeyFile: filepath.Join(data, "pki", "node.key"), CAFile: filepath.Join(data, "pki", "ca.crt"),
	}}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	raw := func(path string) func(context.Context) error {
		return func(ctx context.Context) error {
			_, err := client.Discovery().RESTClient().Get().AbsPath(path).DoRaw(ctx)
			return err
		}
	}
	for what, ask := range map[string]func(context.Context) error{
		"all secrets": func(ctx context.Context) error {
			_, err := client.CoreV1().Secrets("").List(ctx, metav1.ListOptions{})
			return err
		},
		"another node's logs": func(ctx context.Context) error {
			_, err := client.CoreV1().Pods("agents").GetLogs("on-a2", &corev1.PodLogOptions{}).DoRaw(ctx)
			return err
		},
		"a server's label": func(ctx context.Context) error {
			own, err := client.CoreV1().Nodes().Get(ctx, "a1", metav1.GetOptions{}) // which its agent writes, too
			if err != nil {
				return fmt.Errorf("its own node: %w", err)
			}
			own.Labels["node-role.kubernetes.io/control-plane"] = ""
			_, err = client.CoreV1().Nodes().Update(ctx, own, metav1.UpdateOptions{})
			return err
		},
		"join tokens": raw("/clusterd/v1/tokens"), "a snapshot": raw("/clusterd/v1/snapshot"),
	} {
		e.eventually(what+" is forbidden to an agent's key", func(ctx context.Context) error {
			err := ask(ctx)
			if err == nil {
				t.Fatalf("%s: allowed to an agent's key", what)
			}
			if !apierrors.IsForbidden(err) || strings.Contains(err.Error(), "its own node") {
				return fmt.Errorf("the answer: %w", err)
			}
			return nil
		})
	}
	// It does not pass for a server: neither to nodes nor to clients of the API.
	ln, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: []tls.Certificate{*id.Certificate()}, NextProtos: []string{transport.Member, "h2"}})
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() { _, _ = io.Copy(io.Discard, c); c.Close() }()
		}
	}()
	here := ln.Addr().(*net.TCPAddr).AddrPort()
	if c, err := stolenIdentity(e, "a2").DialAPI(t.Context(), here, "", nil); err == nil {
		c.Close()
		t.Error("an agent takes another for a server")
	}
	if c, err := tls.Dial("tcp", here.String(), &tls.Config{RootCAs: id.Roots(id.Certificate().Leaf)}); err == nil {
		c.Close()
		t.Error("an agent's certificate vouches for an address")
	}
}
