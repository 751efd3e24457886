package e2e

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/netsetup/antispoof"
	"github.com/clusterd/clusterd/netsetup/lb"
	"github.com/clusterd/clusterd/netsetup/nft"
	"github.com/clusterd/clusterd/netsetup/overlay"
	"github.com/clusterd/clusterd/netsetup/policy"
)

var seed = flag.Uint64("seed", 1, "what is random in tests of faults is drawn from it")

// openConns is how many connections are open while faults befall the network.
const openConns = 200

// netFault befalls the network of a cluster in use. When do returns it is over, and
// what it must not have harmed is checked by the caller.
type netFault struct {
	name string
	do   func(f *netFaults)
}

// netFaults is a cluster in use: a Service with pods on each node, and connections to
// it from each node.
type netFaults struct {
	*env
	rnd   *rand.Rand
	ns    string
	nodes []string
	url   string
	pods  []corev1.Pod
	conns []*openConn
}

// TestE2ENetworkFaults: of 200 connections by a Service none breaks, whatever befalls
// clusterd, podmon, the packet filter and a cable, in an order drawn from the seed; and
// a node that dies is left out by all others.
func TestE2ENetworkFaults(t *testing.T) {
	need(t)
	t.Logf("seed %d", *seed)
	e := startBare(t, 3, func(c *cluster.Config) { c.OwnBin = true })
	e.ready(3)
	f := &netFaults{env: e, rnd: rand.New(rand.NewPCG(*seed, 0)), ns: e.namespace("netfaults")}
	for _, n := range e.Nodes() {
		f.nodes = append(f.nodes, n.Name)
		p := on(n.Name, pod("ask-"+n.Name, "sleep"))
		e.create(f.ns, p)
	}
	// A policy, so that its table is there.
	e.ctlIn(`{"apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "web"}, "spec": {"podSelector": {"matchLabels": {"app": "web"}}, "ingress": [{"ports": [{"port": 8080}]}]}}`, "-n", f.ns, "apply", "-f", "-")
	e.createDeployment(f.ns, deployment("web", 6))
	f.pods = e.podsReady(f.ns, "app=web", 6)
	for _, n := range f.nodes {
		e.podReady(f.ns, "ask-"+n)
	}
	f.url = "http://" + e.service(f.ns, "web", nil).Spec.ClusterIP + "/"
	e.answers("all pods answer", f.url, f.nodes, podNames(f.pods)...)
	f.open()
	defer f.close()
	faults := []netFault{
		{"clusterd is killed on one node after the other, and another program is in its place", (*netFaults).replaced},
		{"clusterd is killed on all nodes at once", (*netFaults).allKilled},
		{"podmon is killed", (*netFaults).podmonKilled},
		{"the tables of the packet filter are deleted", (*netFaults).tablesDeleted},
		{"two nodes are cut off from each other", (*netFaults).cutOff},
	}
	f.rnd.Shuffle(len(faults), func(i, j int) { faults[i], faults[j] = faults[j], faults[i] })
	for _, one := range faults {
		if t.Failed() {
			return
		}
		t.Run(one.name, func(t *testing.T) {
			mine := *e
			mine.t = t
			g := *f
			g.env = &mine
			one.do(&g)
			g.wellAgain()
		})
	}
	t.Run("a node dies", func(t *testing.T) {
		mine := *e
		mine.t = t
		g := *f
		g.env = &mine
		g.nodeDies()
	})
}

func podNames(pods []corev1.Pod) (out []string) {
	for _, p := range pods {
		out = append(out, p.Name)
	}
	return out
}

// any is one of the nodes.
func (f *netFaults) any() string { return f.nodes[f.rnd.IntN(len(f.nodes))] }

// wellAgain waits until all nodes are Ready, the same pods run that did, all of them
// are reached from each node, and checks the connections.
func (f *netFaults) wellAgain() {
	f.t.Helper()
	f.stillThere()
	f.eventually("all nodes are Ready", func(ctx context.Context) error {
		list, err := f.api.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return err
		}
		for _, n := range list.Items {
			if !nodeReady(&n) {
				return errors.New(n.Name + " is not")
			}
		}
		return nil
	})
	now := f.podsReady(f.ns, "app=web", len(f.pods))
	for _, p := range now {
		if !slices.ContainsFunc(f.pods, func(q corev1.Pod) bool { return p.UID == q.UID && p.Status.PodIP == q.Status.PodIP }) || p.Status.ContainerStatuses[0].RestartCount != 0 {
			f.t.Errorf("it did not live through it: %s", brief(&p))
		}
	}
	f.answers("all pods answer", f.url, f.nodes, podNames(f.pods)...)
	f.stillThere()
}

// openConn is one connection, from a node by the Service.
type openConn struct {
	net.Conn
	from string
	in   *bufio.Reader
	pod  string // the one that answers
}

// ask sends a request over it and reads the answer.
func (c *openConn) ask() (pod string, err error) {
	_ = c.SetDeadline(time.Now().Add(testTimeout))
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: web\r\n\r\n"); err != nil {
		return "", err
	}
	resp, err := http.ReadResponse(c.in, nil)
	if err != nil {
		return "", err
	}
	b, err := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	return answerer(string(b)), err
}

func (f *netFaults) open() {
	f.t.Helper()
	to := strings.Trim(strings.TrimPrefix(f.url, "http://"), "/") + ":80"
	for i := range openConns {
		c := &openConn{from: f.nodes[i%len(f.nodes)]}
		err := f.Do(c.from, func() (err error) {
			c.Conn, err = net.DialTimeout("tcp", to, testTimeout)
			return err
		})
		if err == nil {
			c.in = bufio.NewReader(c.Conn)
			f.conns = append(f.conns, c)
			c.pod, err = c.ask()
		}
		if err != nil {
			f.t.Fatalf("connection %d, from %s: %v", i, c.from, err)
		}
	}
}

func (f *netFaults) close() {
	for _, c := range f.conns {
		_ = c.Close()
	}
}

// stillThere has each connection answered by the pod that it was made to.
func (f *netFaults) stillThere() {
	f.t.Helper()
	errs := make([]error, len(f.conns))
	var wg sync.WaitGroup
	for i, c := range f.conns {
		wg.Go(func() {
			pod, err := c.ask()
			if err == nil && pod != c.pod {
				err = fmt.Errorf("answered by %s", pod)
			}
			if err != nil {
				errs[i] = fmt.Errorf("from %s to %s: %w", c.from, c.pod, err)
			}
		})
	}
	wg.Wait()
	if broken := slices.DeleteFunc(errs, func(err error) bool { return err == nil }); len(broken) > 0 {
		f.t.Errorf("seed %d: %d of %d connections broke, the first %v", *seed, len(broken), len(f.conns), broken[0])
	}
}

// replaced gives each node's clusterd the end that a package's upgrade does at worst:
// another program lies in its place, and it is killed.
func (f *netFaults) replaced() {
	for _, node := range f.rnd.Perm(len(f.nodes)) {
		name := f.nodes[node]
		own, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", f.pid(name)))
		if err != nil {
			f.t.Fatal(err)
		}
		if !strings.Contains(own, filepath.Join(name+".bin", "clusterd")) {
			f.t.Fatalf("%s runs %s, which is not its own", name, own)
		}
		b, err := os.ReadFile(own)
		if err == nil {
			err = durable.ReplaceFile(own, b, 0o755)
		}
		if err == nil {
			err = f.Kill(name)
		}
		if err != nil {
			f.t.Fatal(err)
		}
		f.stillThere() // without it
		if err := f.Start(f.t.Context(), name); err != nil {
			f.t.Fatal(err)
		}
		f.wellAgain()
	}
}

func (f *netFaults) pid(node string) int {
	f.t.Helper()
	pid, err := f.Pid(node)
	if err != nil {
		f.t.Fatal(err)
	}
	return pid
}

func (f *netFaults) allKilled() {
	for _, n := range f.nodes {
		if err := f.Kill(n); err != nil {
			f.t.Fatal(err)
		}
	}
	f.stillThere()
	for _, n := range f.nodes {
		if err := f.Start(f.t.Context(), n); err != nil {
			f.t.Fatal(err)
		}
	}
}

func (f *netFaults) podmonKilled() {
	node := f.any()
	all, err := f.Processes(node)
	if err != nil {
		f.t.Fatal(err)
	}
	killed := 0
	for _, pid := range all {
		if b, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)); err == nil && strings.TrimSpace(string(b)) == "podmon" {
			if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
				f.t.Fatal(err)
			}
			killed++
		}
	}
	if killed == 0 {
		f.t.Fatalf("no podmon runs on %s", node)
	}
}

// tablesDeleted does what an administrator does who flushes the packet filter: all of
// our tables come back, and an event names each.
func (f *netFaults) tablesDeleted() {
	node := f.any()
	tables := []nft.Table{{Name: lb.TableName}, {Name: policy.TableName}, {Name: nft.DefaultTable}, {Name: overlay.FenceTable}, {Name: antispoof.TableName, Family: nft.Bridge}}
	f.rnd.Shuffle(len(tables), func(i, j int) { tables[i], tables[j] = tables[j], tables[i] })
	remove := func(tables ...nft.Table) error {
		return f.Do(node, func() error {
			kernel, err := nft.OpenTables()
			if err != nil {
				return err
			}
			for _, table := range tables {
				err = errors.Join(err, kernel.Delete(table))
			}
			return errors.Join(err, kernel.Close())
		})
	}
	if err := remove(tables...); err != nil {
		f.t.Fatal(err)
	}
	removed := time.Now()
	for _, table := range tables {
		f.eventually(fmt.Sprintf("an event on %s tells of table %s", node, table.Name), func(ctx context.Context) error {
			list, err := f.api.CoreV1().Events("").List(ctx, metav1.ListOptions{FieldSelector: "involvedObject.kind=Node,involvedObject.name=" + node})
			if err != nil {
				return err
			}
			for _, e := range list.Items {
				if e.Reason == "PacketFilterRepaired" && strings.Contains(e.Message, " "+table.Name+" ") {
					return nil
				}
			}
			// A clusterd that had only begun made the table as if it had never been there.
			if time.Since(removed) > 10*time.Second {
				removed, err = time.Now(), remove(table)
			}
			return errors.Join(err, fmt.Errorf("%d events", len(list.Items)))
		})
	}
}

// cutOff loses every packet between two nodes that do not lead: both go on being Ready,
// say what is wrong, and keep their pods.
func (f *netFaults) cutOff() {
	const tries = 3
	for try := 1; ; try++ {
		leader := f.leader()
		f.cutOffFrom(leader)
		if f.leader() == leader {
			return
		}
		// One of the two led meanwhile: what became of the other shows nothing.
		if try == tries {
			f.t.Fatalf("another node leads after each of %d tries", tries)
		}
	}
}

func (f *netFaults) cutOffFrom(leader string) {
	var pair []cluster.Node
	for _, n := range f.Nodes() {
		if n.Name != leader {
			pair = append(pair, n)
		}
	}
	lost := func(change func(*netlink.Neigh) error) {
		f.t.Helper()
		for i, n := range pair {
			if err := f.Do(n.Name, func() error {
				routes, err := netlink.RouteGet(pair[1-i].Addr.AsSlice())
				if err != nil || len(routes) == 0 {
					return errors.Join(err, fmt.Errorf("%d routes", len(routes)))
				}
				// Its packets go to a machine that does not exist.
				return change(&netlink.Neigh{LinkIndex: routes[0].LinkIndex, IP: pair[1-i].Addr.AsSlice(), State: netlink.NUD_PERMANENT, HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 0x99}})
			}); err != nil {
				f.t.Fatal(err)
			}
		}
	}
	lost(netlink.NeighSet)
	mended := false
	mend := func() {
		if !mended {
			mended = true
			lost(netlink.NeighDel)
		}
	}
	defer mend()
	for i, n := range pair {
		f.pathCondition(n.Name, corev1.ConditionTrue, pair[1-i].Name+": ")
	}
	for _, n := range f.nodes {
		f.eventually(n+" is Ready though two nodes cannot reach each other", func(ctx context.Context) error {
			node, err := f.api.CoreV1().Nodes().Get(ctx, n, metav1.GetOptions{})
			if err == nil && !nodeReady(node) && f.leader() == leader {
				err = fmt.Errorf("%+v", node.Status.Conditions)
			}
			return err
		})
	}
	mend()
	for _, n := range pair {
		f.pathCondition(n.Name, corev1.ConditionFalse, "work")
	}
}

// leaveOut is how long an endpoint of a dead node may go on being asked. It is
// insisted on where the machine has time for it.
const leaveOut = 5 * time.Second

// nodeDies switches a node off: the others send nothing to its pods any more and
// answer names.
func (f *netFaults) nodeDies() {
	dead := f.other(f.leader(), "n1") // n1 is asked
	var living, left []string
	for _, n := range f.nodes {
		if n != dead {
			living = append(living, n)
		}
	}
	for _, p := range f.pods {
		if p.Spec.NodeName != dead {
			left = append(left, p.Name)
		}
	}
	if len(left) == len(f.pods) || len(left) == 0 {
		f.t.Fatalf("%d of %d pods are on other nodes than %s", len(left), len(f.pods), dead)
	}
	began := time.Now()
	if err := errors.Join(f.PowerOff(dead), f.Partition(dead)); err != nil {
		f.t.Fatal(err)
	}
	f.eventually("the pods of the dead node are asked no more", func(context.Context) error {
		for _, n := range living {
			// Each draws one of six endpoints: that none of thirty meets one of the dead
			// node's by luck does not happen.
			errs := make([]error, 30)
			var wg sync.WaitGroup
			for i := range errs {
				wg.Go(func() {
					errs[i] = f.Do(n, func() error {
						c, err := net.DialTimeout("tcp", strings.Trim(strings.TrimPrefix(f.url, "http://"), "/")+":80", time.Second)
						if err == nil {
							_ = c.Close()
						}
						return err
					})
				})
			}
			wg.Wait()
			if err := errors.Join(errs...); err != nil {
				return fmt.Errorf("from %s: %w", n, err)
			}
		}
		return nil
	})
	took := time.Since(began)
	f.t.Logf("endpoints of %s were out of the rules of all others %s after its last packet; the bound is %s", dead, took.Round(10*time.Millisecond), leaveOut)
	if took > leaveOut && idle() {
		f.t.Errorf("it took %s on a machine that has nothing else to do, want %s", took, leaveOut)
	}
	f.answers("the others alone", f.url, living, left...)
	for _, n := range living {
		f.resolves(f.ns, "ask-"+n, "host", "web", strings.Trim(strings.TrimPrefix(f.url, "http://"), "/"))
	}
}

// idle reports whether the machine's processors are enough for what wants to run.
func idle() bool { return loadAverage() < float64(runtime.NumCPU()) }
