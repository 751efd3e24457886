package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/clusterd/clusterd/cmd/clusterd/sudoer"
	"github.com/clusterd/clusterd/e2e/cluster"
)

const (
	namespace = "hello"
	selector  = "app=hello"
	replicas  = 3
	agents    = 2
	// waitTimeout bounds each wait; the whole demo takes some seconds.
	waitTimeout = 90 * time.Second
)

func up(ctx context.Context, o options, out *screen) error {
	if err := check(o); err != nil {
		return err
	}
	began := time.Now()
	out.println("\n" + out.bold("clusterd: three servers and two agents on this machine, real containers") + "\n")
	_, err := os.Stat(o.dir)
	fresh := errors.Is(err, fs.ErrNotExist)
	c, err := nodes(ctx, o, out)
	if err != nil {
		return err
	}
	d := demo{c: c, o: o, out: out}
	if d.client, _, err = c.Client(d.first().Name); err != nil {
		return err
	}
	for _, s := range []struct {
		title string
		do    func(context.Context, func(string)) error
	}{
		{"every node is Ready", d.waitNodes},
		{"addresses for ways in", d.addresses},
		{"image load bin/hello.tar", d.loadImage},
		{"apply -f examples/hello.yaml", d.apply},
		{"every pod is Ready", d.waitPods},
		{"apply -f examples/gateway.yaml", d.applyGateway},
	} {
		ctx, cancel := context.WithTimeout(ctx, waitTimeout)
		err := out.step(s.title, func(say func(string)) error { return s.do(ctx, say) })
		cancel()
		if err != nil {
			return &hint{fmt.Errorf("%s: %w", s.title, err), "look into " + o.dir + "/*.log, then: sudo make demo-down"}
		}
	}
	took := time.Since(began)
	if err := d.show(ctx); err != nil {
		return err
	}
	from := "From nothing"
	if !fresh {
		from = "From what was there"
	}
	out.println(fmt.Sprintf("\n  %s to %d pods serving on %d nodes: %s.\n", from, replicas, len(c.Nodes()), out.bold(fmt.Sprintf("%.1f s", took.Seconds()))))
	return d.goOn()
}

// nodes starts the cluster, or finds the one that runs. One that a reboot or
// a failure left incomplete is made again.
func nodes(ctx context.Context, o options, out *screen) (*cluster.Netns, error) {
	c, err := cluster.Open(o.dir)
	switch {
	case errors.Is(err, cluster.ErrNone):
		return start(ctx, o, out)
	case err != nil:
		return nil, &hint{err, "sudo make demo-down"}
	}
	if !c.Exists() {
		if err := out.step("clearing away the last demo", func(func(string)) error { return c.Down(ctx) }); err != nil {
			return nil, &hint{err, "sudo make demo-down"}
		}
		return start(ctx, o, out)
	}
	var stopped []string
	for _, n := range c.Nodes() {
		if _, err := c.Pid(n.Name); err != nil {
			stopped = append(stopped, n.Name)
		}
	}
	if len(stopped) == 0 {
		out.println("  It is up already; nothing is started twice.")
		return c, nil
	}
	err = out.step("starting again", func(say func(string)) error {
		say(strings.Join(stopped, ", "))
		for _, name := range stopped {
			if err := c.Start(ctx, name); err != nil {
				return err
			}
		}
		return nil
	})
	if err == nil {
		return c, nil
	}
	if err := out.step("clearing away the last demo", func(func(string)) error { return c.Down(ctx) }); err != nil {
		return nil, &hint{err, "sudo make demo-down"}
	}
	return start(ctx, o, out)
}

func start(ctx context.Context, o options, out *screen) (*cluster.Netns, error) {
	subnet, err := netip.ParsePrefix(o.subnet)
	if err != nil {
		return nil, fmt.Errorf("-subnet: %w", err)
	}
	var c *cluster.Netns
	err = out.step("a Raft quorum of three, two agents", func(say func(string)) (err error) {
		c, err = cluster.Up(ctx, cluster.Config{Dir: o.dir, Bin: o.bin, Agents: agents, Bridge: o.bridge, Subnet: subnet, Lasting: true, Progress: say})
		if err == nil {
			var names []string
			for _, n := range c.Nodes() {
				names = append(names, n.Name+" "+n.Addr.String())
			}
			say(strings.Join(names, ", "))
		}
		return err
	})
	if errors.Is(err, cluster.ErrTaken) {
		return nil, &hint{err, "another folder's demo is up: run `sudo make demo-down` there (if there is none: ip link del " + o.bridge + ")"}
	}
	if err != nil {
		return nil, &hint{err, "nothing was left behind; the nodes' last words are above"}
	}
	return c, nil
}

// demo is the part that uses the cluster.
type demo struct {
	c      *cluster.Netns
	o      options
	out    *screen
	client kubernetes.Interface
	way    string // by which the page is had from this machine, once it is known
}

func (d *demo) first() cluster.Node { return d.c.Nodes()[0] }

// ctl runs clusterctl as a person would.
func (d *demo) ctl(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, d.c.Bin("clusterctl"), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+d.first().Kubeconfig())
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("clusterctl %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// poll asks until the answer is yes; the last error tells why it never was.
func poll(ctx context.Context, ask func() (bool, error)) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		yes, err := ask()
		if yes {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			if err != nil {
				return err
			}
			return ctx.Err()
		}
	}
}

// waitNodes waits until all are Ready and answer: one that was killed a moment
// ago, and was started again just now, still counts as Ready.
func (d *demo) waitNodes(ctx context.Context, say func(string)) error {
	return poll(ctx, func() (bool, error) {
		for _, n := range d.c.Nodes() {
			conn, err := (&net.Dialer{Timeout: time.Second}).DialContext(ctx, "tcp", net.JoinHostPort(n.Addr.String(), "6443"))
			if err != nil {
				return false, fmt.Errorf("%s does not answer: %w", n.Name, err)
			}
			_ = conn.Close()
		}
		list, err := d.client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
		if err != nil {
			return false, err
		}
		var ready []string
		for _, n := range list.Items {
			for _, c := range n.Status.Conditions {
				if c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue {
					ready = append(ready, n.Name)
				}
			}
		}
		say(strings.Join(ready, ", "))
		return len(ready) == len(d.c.Nodes()), fmt.Errorf("Ready are only %q", ready)
	})
}

func (d *demo) loadImage(ctx context.Context, say func(string)) error {
	if _, err := d.ctl(ctx, "image", "load", d.o.image); err != nil {
		return err
	}
	say("clusterd.local/hello:1 on every node, no registry asked")
	return nil
}

func (d *demo) apply(ctx context.Context, say func(string)) error {
	text, err := d.ctl(ctx, "apply", "-f", d.o.manifest)
	if err != nil {
		return err
	}
	say(strings.Join(strings.FieldsFunc(text, func(r rune) bool { return r == '\n' }), ", "))
	return nil
}

// waitPods waits for the Deployment's pods, and says of each what it is at.
func (d *demo) waitPods(ctx context.Context, say func(string)) error {
	return poll(ctx, func() (bool, error) {
		list, err := d.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: selector})
		if err != nil {
			return false, err
		}
		ready := 0
		var states []string
		for _, p := range list.Items {
			state := describe(&p)
			if state == "Ready" {
				ready++
			}
			states = append(states, state)
		}
		say(fmt.Sprintf("%d of %d", ready, replicas))
		if ready < replicas {
			say(fmt.Sprintf("%d of %d: %s", ready, replicas, strings.Join(states, ", ")))
		}
		return ready >= replicas && ready == len(list.Items), fmt.Errorf("the pods are: %s", strings.Join(states, ", "))
	})
}

// describe is a pod's state in one or two words.
func describe(p *corev1.Pod) string {
	if p.DeletionTimestamp != nil {
		return "Terminating"
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
			return "Ready"
		}
	}
	for _, s := range p.Status.ContainerStatuses {
		if w := s.State.Waiting; w != nil && w.Message != "" {
			return w.Reason + " (" + w.Message + ")"
		} else if w != nil {
			return w.Reason
		}
	}
	if p.Spec.NodeName == "" {
		return "waiting for a node"
	}
	return string(p.Status.Phase)
}

// show prints what kubectl users look at, and a page of each pod, fetched
// from another node than its own.
func (d *demo) show(ctx context.Context) error {
	for _, args := range [][]string{{"get", "nodes"}, {"get", "pods", "-n", namespace, "-o", "wide"}} {
		table, err := d.ctl(ctx, args...)
		if err != nil {
			return err
		}
		d.out.println("\n  " + d.out.dim("$ clusterctl "+strings.Join(args, " ")))
		d.out.indented(table)
	}
	d.out.println("\n  " + d.out.dim("each pod's page, fetched from another node over the pod network"))
	list, err := d.client.CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		return err
	}
	for _, p := range list.Items {
		from := d.otherThan(p.Spec.NodeName)
		page, err := d.fetch(ctx, from, p.Status.PodIP)
		if err != nil {
			return &hint{fmt.Errorf("fetch %s's page from %s: %w", p.Name, from, err), "look into " + d.o.dir + "/*.log"}
		}
		d.out.println(fmt.Sprintf("  %s %s → %s: %s", d.out.green("✓"), from, p.Spec.NodeName, strings.ReplaceAll(strings.TrimSpace(page), "\n", " ")))
	}
	return d.answers(ctx)
}

func (d *demo) otherThan(node string) string {
	for _, n := range d.c.Nodes() {
		if n.Name != node {
			return n.Name
		}
	}
	return node
}

// fetch gets a pod's page from a node's network.
func (d *demo) fetch(ctx context.Context, node, ip string) (page string, err error) {
	return get(ctx, "http://"+net.JoinHostPort(ip, "8080")+"/", func(ctx context.Context, network, addr string) (conn net.Conn, err error) {
		err = d.c.Do(node, func() (err error) {
			conn, err = (&net.Dialer{}).DialContext(ctx, network, addr)
			return err
		})
		return conn, err
	})
}

// goOn prints what one may do next, as whoever typed sudo.
func (d *demo) goOn() error {
	kubeconfig := d.first().Kubeconfig()
	if uid, gid, ok := sudoer.Person(); ok {
		own := filepath.Join(d.o.dir, "kubeconfig") // goes with the folder
		if err := sudoer.Leave(kubeconfig, own, uid, gid); err != nil {
			return err
		}
		kubeconfig = own
	}
	rel := func(path string) string {
		if wd, err := os.Getwd(); err == nil {
			if r, ok := strings.CutPrefix(path, wd+"/"); ok {
				return r
			}
		}
		return path
	}
	d.out.println("  " + d.out.bold("Go on:"))
	d.out.println("    export KUBECONFIG=" + kubeconfig + " PATH=" + d.o.bin + ":$PATH")
	for _, line := range [][2]string{
		{"clusterctl -n hello scale deployment hello --replicas=9", "kubectl and helm work as well"},
		{"curl " + d.way, "the page, by the Gateway"},
		{"clusterctl -n hello logs -l app=hello --prefix", "what the pods print"},
		{"clusterctl members", "who votes, who leads"},
		{"sudo kill -9 $(cut -d' ' -f1 " + rel(d.o.dir) + "/n1.pid)", "a node dies; its containers go on"},
		{"sudo make demo", "starts it again"},
		{"sudo make demo-down", "ends it all and leaves nothing"},
	} {
		d.out.println(fmt.Sprintf("    %-58s %s", line[0], d.out.dim("# "+line[1])))
	}
	return nil
}
