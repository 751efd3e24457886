package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/clusterd/clusterd/netsetup/netns"
)

// Config of a netns cluster.
type Config struct {
	// Dir holds everything of the cluster; made here, removed by Down.
	Dir string
	// Bin is the directory with clusterd and clusterctl.
	Bin string
	// OwnBin gives each machine a clusterd of its own, a copy of Bin's, that may be
	// replaced.
	OwnBin bool
	// Nodes is how many servers, n1, n2 …; default 3.
	Nodes int
	// Agents is how many machines join as agents, a1, a2 ….
	Agents int
	// Far is how many of the last machines are of a second segment, FarSubnet of
	// Subnet, with a router between. Default 0.
	Far int
	// Bridge joins them, in the network namespace of the caller; at most 12
	// letters; default "clusterd-demo".
	Bridge string
	// Subnet is the machines' network. The host has the first address, the
	// nodes follow. Default 10.89.0.0/24. With a network of IPv6 the machines have
	// no address of IPv4 but on the loopback, their own address is not of use before
	// the kernel has made sure of it, and clusterd finds it by itself.
	Subnet netip.Prefix
	// Subnet6 is the machines' network of IPv6 beside Subnet, on one segment; not
	// valid: they have IPv4 alone, as has the last of them so many as Only4 says.
	Subnet6 netip.Prefix
	Only4   int
	// InitArgs are further flags for the clusterd that begins the cluster.
	InitArgs []string
	// Lasting is set for a cluster that is meant to outlive the process that
	// makes it. Any other is removed by the next Up with the same bridge once
	// that process has ended without Down.
	Lasting bool
	// Args are further flags for every clusterd.
	Args []string
	// Clocks gives each machine a clock that SetClock moves.
	Clocks bool
	// Progress is called with a message for each step; may be nil.
	Progress func(what string)
}

// Netns is a Cluster of network namespaces on this machine. Its state lies in
// Config.Dir, so that Open finds it again from another process.
type Netns struct {
	cfg   Config
	state state
	ns    *netns.Dir

	clockMu sync.Mutex
	clocks  map[string]time.Duration // how far each machine's is ahead; guarded by clockMu
}

var _ Cluster = (*Netns)(nil)

type state struct {
	Bridge string       `json:"bridge"`
	Subnet netip.Prefix `json:"subnet"`
	Bin    string       `json:"bin"`
	OwnBin bool         `json:"ownBin,omitempty"`
	Nodes  []Node       `json:"nodes"`
}

const stateFile = "cluster.json"

// ErrExists is returned by Up when the directory holds a cluster already.
var ErrExists = errors.New("a cluster is there already")

// ErrTaken is returned by Up when another cluster of this machine, or another
// program, has the bridge's name. Nothing was changed then. A cluster whose
// maker was killed has no claim to it: Up removes that one first.
var ErrTaken = errors.New("an interface of that name is there already")

// ErrNone is returned by Open when the directory holds no cluster.
var ErrNone = errors.New("no cluster is there")

// Up makes a cluster and returns when every node is a member and its API
// answers. On error everything that was made is removed again, but for the
// nodes' logs, which the error quotes.
func Up(ctx context.Context, cfg Config) (_ *Netns, err error) {
	if cfg.Nodes == 0 {
		cfg.Nodes = 3
	}
	if cfg.Bridge == "" {
		cfg.Bridge = "clusterd-demo"
	}
	if !cfg.Subnet.IsValid() {
		cfg.Subnet = netip.MustParsePrefix("10.89.0.0/24")
	}
	if cfg.Progress == nil {
		cfg.Progress = func(string) {}
	}
	if cfg.Dir, err = filepath.Abs(cfg.Dir); err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return nil, errors.New("network namespaces need root: run it with sudo")
	}
	if _, err := os.Stat(filepath.Join(cfg.Dir, stateFile)); err == nil {
		return nil, fmt.Errorf("%s: %w", cfg.Dir, ErrExists)
	}
	for _, prog := range []string{"clusterd", "clusterctl"} {
		if _, err := os.Stat(filepath.Join(cfg.Bin, prog)); err != nil {
			return nil, fmt.Errorf("%w: build it first with `make build`", err)
		}
	}
	if err := os.MkdirAll(cfg.Dir, 0o755); err != nil {
		return nil, err
	}
	c := &Netns{cfg: cfg, clocks: map[string]time.Duration{}, state: state{Bridge: cfg.Bridge, Subnet: cfg.Subnet, Bin: cfg.Bin, OwnBin: cfg.OwnBin}}
	if c.ns, err = netns.Open(filepath.Join(cfg.Dir, "netns")); err != nil {
		return nil, err
	}
	host := cfg.Subnet.Masked().Addr().Next()
	addr := host
	for i := range cfg.Nodes + cfg.Agents {
		far := i >= cfg.Nodes+cfg.Agents-cfg.Far
		if far && !FarSubnet(cfg.Subnet).Contains(addr) {
			addr = FarSubnet(cfg.Subnet).Addr().Next() // which is the host
		}
		addr = addr.Next()
		name, agent := fmt.Sprintf("n%d", i+1), i >= cfg.Nodes
		if agent {
			name = fmt.Sprintf("a%d", i-cfg.Nodes+1)
		}
		var addr6 netip.Addr
		if cfg.Subnet6.IsValid() && i < cfg.Nodes+cfg.Agents-cfg.Only4 {
			b := cfg.Subnet6.Masked().Addr().As16()
			b[15] = addr.AsSlice()[addr.BitLen()/8-1]
			addr6 = netip.AddrFrom16(b)
		}
		c.state.Nodes = append(c.state.Nodes, Node{
			Name: name, Addr: addr, Addr6: addr6, Agent: agent, Far: far,
			Data:       filepath.Join(cfg.Dir, name),
			CgroupRoot: "/" + cfg.Bridge + "/" + name,
		})
	}
	// The bridge first: its name is what clusters could quarrel about. When it
	// is taken, nothing was made and nothing may be taken down.
	if err := c.claimBridge(ctx); err != nil {
		return nil, errors.Join(err, removeIfEmpty(filepath.Join(cfg.Dir, "netns")), removeIfEmpty(cfg.Dir))
	}
	defer func() {
		if err != nil {
			err = fmt.Errorf("%w%s", err, c.lastWords())
			// The caller's context may be what ended.
			down, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Minute)
			defer cancel()
			err = errors.Join(err, c.Down(down))
		}
	}()
	if err := c.save(); err != nil {
		return nil, err
	}
	if err := c.addressBridge(host); err != nil {
		return nil, err
	}
	if cfg.Far > 0 {
		if err := c.makeRouter(host); err != nil {
			return nil, fmt.Errorf("make the router: %w", err)
		}
	}
	for _, n := range c.state.Nodes {
		if err := c.makeMachine(n); err != nil {
			return nil, fmt.Errorf("make machine %s: %w", n.Name, err)
		}
	}
	return c, c.form(ctx)
}

// form begins the cluster on the first machine and joins the others at once.
func (c *Netns) form(ctx context.Context) error {
	first := c.state.Nodes[0]
	c.cfg.Progress("beginning the cluster on " + first.Name)
	if err := c.launch(first, "init"); err != nil {
		return err
	}
	server, agent, err := c.joinLines(ctx, first)
	if err != nil {
		return err
	}
	for _, n := range c.state.Nodes[1:] {
		c.cfg.Progress("joining " + n.Name)
		line := server
		if n.Agent {
			line = agent
		}
		if err := c.launch(n, line...); err != nil {
			return err
		}
	}
	for _, n := range c.state.Nodes {
		if n.Agent {
			continue // whether its Node is Ready shows that it is there
		}
		if err := c.waitServing(ctx, n); err != nil {
			return err
		}
	}
	return nil
}

// Open finds a cluster that Up made.
func Open(dir string) (*Netns, error) {
	b, err := os.ReadFile(filepath.Join(dir, stateFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w", dir, ErrNone)
	}
	if err != nil {
		return nil, err
	}
	c := &Netns{cfg: Config{Dir: dir, Progress: func(string) {}}}
	if err := json.Unmarshal(b, &c.state); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, stateFile), err)
	}
	c.cfg.Bin = c.state.Bin
	c.ns, err = netns.Open(filepath.Join(dir, "netns"))
	return c, err
}

func (c *Netns) save() error {
	b, err := json.MarshalIndent(c.state, "", "  ")
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(c.cfg.Dir, stateFile), b, 0o644)
}

// Nodes implements Cluster.
func (c *Netns) Nodes() []Node { return c.state.Nodes }

func (c *Netns) node(name string) (Node, error) {
	for _, n := range c.state.Nodes {
		if n.Name == name {
			return n, nil
		}
	}
	return Node{}, fmt.Errorf("no machine is called %q", name)
}

// Client implements Cluster.
func (c *Netns) Client(name string) (kubernetes.Interface, *rest.Config, error) {
	n, err := c.node(name)
	if err != nil {
		return nil, nil, err
	}
	config, err := clientcmd.BuildConfigFromFlags("", n.Kubeconfig())
	if err != nil {
		return nil, nil, err
	}
	config.QPS = -1
	client, err := kubernetes.NewForConfig(config)
	return client, config, err
}

// Progress sets the function that is called with a message for each step.
func (c *Netns) Progress(report func(what string)) { c.cfg.Progress = report }

// Marks are texts of which every trace of this cluster outside its directory
// bears one: names of interfaces and cgroups, and its processes.
func (c *Netns) Marks() []string {
	marks := []string{c.state.Bridge, "/" + c.state.Bridge + "/"}
	for _, n := range c.state.Nodes {
		marks = append(marks, c.cable(n))
		pids, err := c.processes(n)
		if err != nil {
			continue // its namespace is gone, and so are they
		}
		for _, pid := range pids {
			if started, err := startTime(pid); err == nil {
				marks = append(marks, processMark(pid, started))
			}
		}
	}
	return marks
}

// Bin is the path of one of our programs.
func (c *Netns) Bin(prog string) string { return filepath.Join(c.cfg.Bin, prog) }

func (c *Netns) logPath(n Node) string { return filepath.Join(c.cfg.Dir, n.Name+".log") }

// launch starts clusterd on a machine, detached: it outlives this process.
func (c *Netns) launch(n Node, command ...string) error {
	log, err := os.OpenFile(c.logPath(n), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	out, err := os.Create(c.outPath(n))
	if err != nil {
		return err
	}
	defer out.Close()
	args := append(command, "--data", n.Data)
	if command[0] == "run" && n.Moved {
		args = append(args, "--advertise", n.Addr.String())
	}
	if command[0] != "run" {
		args = append(args, "--name", n.Name, "--cgroup-root", n.CgroupRoot)
		if n.Addr.Is4() {
			args = append(args, "--advertise", n.Addr.String())
		}
		// The machines share this one's disk: how full it is says nothing of them.
		args = append(args, "--eviction-hard", "memory.available<100Mi", "--image-gc-high", "100", "--image-gc-low", "99")
		args = append(args, c.cfg.Args...)
		if command[0] == "init" {
			args = append(args, c.cfg.InitArgs...)
		}
	}
	program, err := c.clusterd(n)
	if err != nil {
		return err
	}
	cmd := exec.Command(program, args...)
	cmd.Stdout, cmd.Stderr = out, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	// The child is born in the network namespace of the thread that forks.
	start := func() error { return netns.Do(c.ns.Path(n.Name), cmd.Start) }
	if c.cfg.Clocks {
		c.clockMu.Lock()
		defer c.clockMu.Unlock()
		start = func() error { return StartAt(cmd, c.ns.Path(n.Name), c.clocks[n.Name]) }
	}
	if err := start(); err != nil {
		return fmt.Errorf("start clusterd on %s: %w", n.Name, err)
	}
	err = writePid(c.pidPath(n), cmd.Process.Pid)
	go cmd.Wait() // so that a killed one does not stay a zombie
	return err
}

func (c *Netns) outPath(n Node) string { return filepath.Join(c.cfg.Dir, n.Name+".out") }
func (c *Netns) pidPath(n Node) string { return filepath.Join(c.cfg.Dir, n.Name+".pid") }

// waitServing waits until the node's own API is ready.
func (c *Netns) waitServing(ctx context.Context, n Node) error {
	return c.poll(ctx, n, "to serve the API", func() bool {
		client, _, err := c.Client(n.Name)
		if err != nil {
			return false
		}
		ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
		defer cancel()
		return client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error() == nil
	})
}

// nodeTimeout bounds every wait for a node.
const nodeTimeout = 3 * time.Minute

// poll waits for a condition of a node, and gives up early when its clusterd
// has ended.
func (c *Netns) poll(ctx context.Context, n Node, what string, done func() bool) error {
	ctx, cancel := context.WithTimeout(ctx, nodeTimeout)
	defer cancel()
	for !done() {
		if _, err := c.Pid(n.Name); err != nil {
			return fmt.Errorf("%s ended while it was waited for %s", n.Name, what)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for %s %s: %w", n.Name, what, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil
}

// lastWords quotes the end of each node's log, for an error.
func (c *Netns) lastWords() string {
	var b strings.Builder
	for _, n := range c.state.Nodes {
		log, err := os.ReadFile(c.logPath(n))
		if err != nil || len(log) == 0 {
			continue
		}
		lines := strings.Split(strings.TrimSpace(string(log)), "\n")
		lines = lines[max(0, len(lines)-8):]
		fmt.Fprintf(&b, "\n--- the end of %s's log:\n%s", n.Name, strings.Join(lines, "\n"))
	}
	return b.String()
}

// Logs implements Cluster.
func (c *Netns) Logs(name string) (io.ReadCloser, error) {
	n, err := c.node(name)
	if err != nil {
		return nil, err
	}
	return os.Open(c.logPath(n))
}

// Exec implements Cluster.
func (c *Netns) Exec(ctx context.Context, name, prog string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "nsenter", append([]string{"--net=" + c.ns.Path(name), "--", prog}, args...)...)
}

// Do runs fn in the node's network.
func (c *Netns) Do(name string, fn func() error) error { return netns.Do(c.ns.Path(name), fn) }

// Down implements Cluster. It can be called again after it failed, and on a
// cluster that was only half made.
func (c *Netns) Down(ctx context.Context) error {
	var errs []error
	for _, n := range c.state.Nodes {
		c.cfg.Progress("removing " + n.Name)
		if err := c.end(ctx, n); err != nil {
			errs = append(errs, fmt.Errorf("remove %s: %w", n.Name, err))
		}
	}
	if err := removeCgroupDirs("/" + c.state.Bridge); err != nil {
		errs = append(errs, err)
	}
	if err := errors.Join(c.ns.Delete(router), removeLink(c.cable(Node{Name: router}))); err != nil {
		errs = append(errs, err)
	}
	// After all that the next Up would look for if this process ended now.
	if err := removeLink(c.state.Bridge); err != nil {
		errs = append(errs, err)
	}
	if err := errors.Join(errs...); err != nil {
		return err // the state file stays: Down can be tried again
	}
	return os.RemoveAll(c.cfg.Dir)
}

// end removes one machine.
func (c *Netns) end(ctx context.Context, n Node) error {
	c.Resume(n.Name) // a frozen process cannot end; the error is that it is not there
	if err := c.Stop(ctx, n.Name); err != nil && !errors.Is(err, ErrHung) {
		return err
	}
	var errs []error
	if _, err := os.Stat(n.Data); err == nil {
		if _, err := os.Stat(c.ns.Path(n.Name)); err == nil {
			// reset undoes what is in the node's network, so it runs there.
			cmd := c.Exec(ctx, n.Name, c.Bin("clusterd"), "reset", "--data", n.Data)
			if out, err := cmd.CombinedOutput(); err != nil {
				errs = append(errs, fmt.Errorf("clusterd reset: %w: %s", err, strings.TrimSpace(string(out))))
			}
		}
	}
	if err := c.ns.Delete(n.Name); err != nil {
		errs = append(errs, err)
	}
	// The kernel would take the line away with the namespace, but later.
	if err := removeLink(c.cable(n)); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// signal sends a signal to clusterd on the node.
func (c *Netns) signal(name string, sig unix.Signal) error {
	pid, err := c.Pid(name)
	if err != nil {
		return err
	}
	return unix.Kill(pid, sig)
}

// Kill implements Cluster.
func (c *Netns) Kill(name string) error {
	pid, err := c.Pid(name)
	if err != nil {
		return err
	}
	if err := unix.Kill(pid, unix.SIGKILL); err != nil {
		return err
	}
	return waitGone(context.Background(), pid, nodeTimeout)
}

// Pause implements Cluster. It returns when every thread has stopped: the
// signal alone stops none at once.
func (c *Netns) Pause(name string) error {
	pid, err := c.Pid(name)
	if err != nil {
		return err
	}
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		return err
	}
	for deadline := time.Now().Add(nodeTimeout); !stopped(pid); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			return fmt.Errorf("%s: process %d does not stop", name, pid)
		}
	}
	return nil
}

// Resume implements Cluster.
func (c *Netns) Resume(name string) error { return c.signal(name, unix.SIGCONT) }

// ErrHung is returned by Stop when clusterd did not end by itself and had to
// be killed. Its log then holds the stacks of all its goroutines.
var ErrHung = errors.New("clusterd did not stop when it was asked to")

// stopTimeout is how long clusterd may take to stop in order on a busy machine.
const stopTimeout = time.Minute

// Stop implements Cluster. A clusterd that does not stop has to say what it is
// at, and is killed.
func (c *Netns) Stop(ctx context.Context, name string) error {
	pid, err := c.Pid(name)
	if errors.Is(err, ErrNotRunning) {
		return nil
	}
	if err != nil {
		return err
	}
	if err := unix.Kill(pid, unix.SIGTERM); err != nil && err != unix.ESRCH {
		return err
	}
	if waitGone(ctx, pid, stopTimeout) == nil {
		return nil
	}
	ctx = context.WithoutCancel(ctx)
	for _, sig := range []unix.Signal{unix.SIGQUIT, unix.SIGKILL} {
		if err := unix.Kill(pid, sig); err != nil && err != unix.ESRCH {
			return err
		}
		if waitGone(ctx, pid, 10*time.Second) == nil {
			return fmt.Errorf("%s: %w within %s", name, ErrHung, stopTimeout)
		}
	}
	return fmt.Errorf("%s: process %d cannot be killed", name, pid)
}

// Start implements Cluster.
func (c *Netns) Start(ctx context.Context, name string) error { return c.StartWith(ctx, name) }

// StartWith starts clusterd on the node again, with more arguments than it had.
func (c *Netns) StartWith(_ context.Context, name string, args ...string) error {
	n, err := c.node(name)
	if err != nil {
		return err
	}
	if _, err := c.Pid(name); err == nil {
		return fmt.Errorf("clusterd runs on %s already", name)
	}
	return c.launch(n, append([]string{"run"}, args...)...)
}

// Move gives a node on which clusterd does not run another address. The next
// Start tells it.
func (c *Netns) Move(name string, addr netip.Addr) error {
	if _, err := c.Pid(name); err == nil {
		return fmt.Errorf("clusterd runs on %s", name)
	}
	for i := range c.state.Nodes {
		n := &c.state.Nodes[i]
		if n.Name != name {
			continue
		}
		if err := c.readdress(*n, addr); err != nil {
			return fmt.Errorf("move %s from %s to %s: %w", name, n.Addr, addr, err)
		}
		n.Addr, n.Moved = addr, true
		return c.save()
	}
	return fmt.Errorf("no machine is called %q", name)
}

// Partition implements Cluster: the machine's cable is pulled.
func (c *Netns) Partition(name string) error { return c.setLink(name, false) }

// Heal implements Cluster.
func (c *Netns) Heal(name string) error { return c.setLink(name, true) }
