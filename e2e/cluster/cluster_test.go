package cluster_test

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"github.com/clusterd/clusterd/e2e/cluster"
)

// The harness is tested with a stand-in for clusterd: this test binary, which
// keeps to the same command line, serves /readyz, and keeps one "container".
const standInEnv = "CLUSTERD_STAND_IN"

// Set for a child of this test binary that makes a cluster and is killed.
const makerEnv = "CLUSTERD_MAKER"

func TestMain(m *testing.M) {
	if os.Getenv(standInEnv) != "" {
		if err := standIn(os.Args[1:]); err != nil {
			fmt.Fprintln(os.Stderr, "stand-in:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if dir := os.Getenv(makerEnv); dir != "" {
		if _, err := cluster.Up(context.Background(), makerConfig(dir)); err != nil {
			fmt.Println(err)
			os.Exit(1)
		}
		fmt.Println("up")
		time.Sleep(time.Hour)
	}
	os.Exit(m.Run())
}

func standIn(args []string) error {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM)
	defer stop()
	cmd := args[0]
	fs := flag.NewFlagSet(cmd, flag.ContinueOnError)
	data, addr, cgroup := fs.String("data", "", ""), fs.String("advertise", "", ""), fs.String("cgroup-root", "", "")
	for _, name := range []string{"name", "eviction-hard", "image-gc-high", "image-gc-low"} {
		fs.String(name, "", "")
	}
	token, broken := fs.String("token", "", ""), fs.Bool("broken", false, "")
	rest := args[1:]
	if cmd == "join" {
		rest = args[2:]
	}
	if err := fs.Parse(rest); err != nil {
		return err
	}
	settings := filepath.Join(*data, "settings")
	switch cmd {
	case "init", "join":
		if *broken && cmd == "join" {
			return errors.New("the token has expired")
		}
		if cmd == "join" && (*token != "secret" || args[1] == "") {
			return fmt.Errorf("wrong token %q", *token)
		}
		if err := os.MkdirAll(*data, 0o700); err != nil {
			return err
		}
		if err := os.WriteFile(settings, []byte(*addr+" "+*cgroup), 0o600); err != nil {
			return err
		}
		config := clientcmdapi.NewConfig()
		config.Clusters["c"] = &clientcmdapi.Cluster{Server: "http://" + *addr + ":6443"}
		config.Contexts["c"] = &clientcmdapi.Context{Cluster: "c"}
		config.CurrentContext = "c"
		if err := clientcmd.WriteToFile(*config, filepath.Join(*data, "admin.kubeconfig")); err != nil {
			return err
		}
		if err := contain(*cgroup); err != nil {
			return err
		}
	case "run", "reset":
		b, err := os.ReadFile(settings)
		if err != nil {
			return err
		}
		*addr, *cgroup, _ = strings.Cut(string(b), " ")
		if cmd == "reset" {
			for _, pid := range contained(*cgroup) {
				if err := unix.Kill(pid, unix.SIGKILL); err != nil {
					return err
				}
			}
			for len(contained(*cgroup)) > 0 {
				time.Sleep(time.Millisecond)
			}
			return os.RemoveAll(*data)
		}
	}
	l, err := net.Listen("tcp", *addr+":6443")
	if err != nil {
		return err
	}
	fmt.Fprintln(os.Stderr, "serving", *addr)
	if cmd == "init" {
		fmt.Printf("clusterd join %s:6443 --token secret\nclusterd join %s:6443 --token agents\n", *addr, *addr)
	}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "ok") })}
	go func() { <-ctx.Done(); _ = srv.Close() }()
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// procs is the file of the stand-in's one container's cgroup.
func procs(root string) string {
	base := "/sys/fs/cgroup/pids"
	if _, err := os.Stat(base); err != nil {
		base = "/sys/fs/cgroup" // v2
	}
	return filepath.Join(base, root, "container", "cgroup.procs")
}

// contain starts a process in a cgroup of its own, which outlives this one.
func contain(root string) error {
	if err := os.MkdirAll(filepath.Dir(procs(root)), 0o755); err != nil {
		return err
	}
	cmd := exec.Command("sleep", "3600")
	if err := cmd.Start(); err != nil {
		return err
	}
	return os.WriteFile(procs(root), fmt.Appendln(nil, cmd.Process.Pid), 0o644)
}

func contained(root string) []int {
	b, err := os.ReadFile(procs(root))
	if err != nil {
		return nil
	}
	var pids []int
	for f := range strings.FieldsSeq(string(b)) {
		if pid, err := strconv.Atoi(f); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

func need(t *testing.T) {
	t.Helper()
	if os.Getenv("CLUSTERD_E2E") != "netns" {
		t.Skip("needs root: CLUSTERD_E2E=netns go test ./e2e/...")
	}
	if os.Geteuid() != 0 {
		t.Fatal("CLUSTERD_E2E is set, but this is not root")
	}
}

// config is a cluster of stand-ins, checked at the test's end for remains.
func config(t *testing.T, args ...string) cluster.Config {
	t.Helper()
	need(t)
	bin := t.TempDir()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	script := fmt.Sprintf("#!/bin/sh\n%s=1 exec %s \"$@\"\n", standInEnv, self)
	for _, prog := range []string{"clusterd", "clusterctl"} {
		if err := os.WriteFile(filepath.Join(bin, prog), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	dir := filepath.Join(t.TempDir(), "c")
	t.Cleanup(func() {
		if left, err := cluster.Stays("cdharness", dir); err != nil || len(left) > 0 {
			t.Errorf("left behind: %q (%v)", left, err)
		}
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the folder is left: %v", err)
		}
	})
	return cluster.Config{Dir: dir, Bin: bin, Bridge: "cdharness", Subnet: netip.MustParsePrefix("10.88.0.0/24"), Args: args}
}

func ready(t *testing.T, c *cluster.Netns, node string) error {
	t.Helper()
	return readyWithin(30*time.Second, t, c, node)
}

func readyWithin(wait time.Duration, t *testing.T, c *cluster.Netns, node string) error {
	t.Helper()
	client, _, err := c.Client(node)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	return client.Discovery().RESTClient().Get().AbsPath("/readyz").Do(ctx).Error()
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	deadline, tick := time.After(2*time.Minute), time.Tick(10*time.Millisecond)
	for !ok() {
		select {
		case <-tick:
		case <-deadline:
			t.Fatalf("waited for: %s", what)
		}
	}
}

// reach opens a connection from one machine to another.
func reach(c *cluster.Netns, from string, to cluster.Node) error {
	return c.Do(from, func() error {
		conn, err := net.DialTimeout("tcp", net.JoinHostPort(to.Addr.String(), "6443"), 2*time.Second)
		if err != nil {
			return err
		}
		return conn.Close()
	})
}

func TestE2EHarness(t *testing.T) {
	cfg := config(t)
	var progress []string
	cfg.Progress = func(what string) { progress = append(progress, what) }
	c, err := cluster.Up(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	marks := c.Marks()
	down := func() {
		if err := c.Down(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	}
	defer down()
	if _, err := cluster.Up(t.Context(), cfg); !errors.Is(err, cluster.ErrExists) {
		t.Fatalf("a second Up: %v", err)
	}
	// Another cluster of the same name changes nothing here.
	rival := cfg
	rival.Dir = filepath.Join(t.TempDir(), "rival")
	if _, err := cluster.Up(t.Context(), rival); !errors.Is(err, cluster.ErrTaken) {
		t.Fatalf("a rival's Up: %v", err)
	}
	if _, err := os.Stat(rival.Dir); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the rival's folder is left: %v", err)
	}
	nodes := c.Nodes()
	if len(nodes) != 3 || nodes[2].Name != "n3" || nodes[2].Addr.String() != "10.88.0.4" || len(progress) < 3 {
		t.Fatalf("nodes %+v, progress %q", nodes, progress)
	}
	for _, n := range nodes {
		if err := ready(t, c, n.Name); err != nil {
			t.Errorf("%s: %v", n.Name, err)
		}
	}
	eventually(t, "n1 to reach n2", func() bool { return reach(c, "n1", nodes[1]) == nil })
	if out, err := c.Exec(t.Context(), "n2", "ip", "-4", "-o", "addr", "show", "eth0").CombinedOutput(); err != nil || !bytes.Contains(out, []byte("10.88.0.3/24")) {
		t.Errorf("Exec: %s %v", out, err)
	}

	// Another process finds it.
	found, err := cluster.Open(cfg.Dir)
	if err != nil {
		t.Fatal(err)
	}
	pid, err := found.Pid("n2")
	if err != nil {
		t.Fatal(err)
	}

	t.Run("kill and start", func(t *testing.T) {
		container := contained(nodes[1].CgroupRoot)
		if err := c.Kill("n2"); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Pid("n2"); !errors.Is(err, cluster.ErrNotRunning) {
			t.Errorf("Pid of a killed one: %v", err)
		}
		if got := contained(nodes[1].CgroupRoot); len(got) != 1 || got[0] != container[0] {
			t.Errorf("the container: %v, before %v", got, container)
		}
		if err := c.Start(t.Context(), "n2"); err != nil {
			t.Fatal(err)
		}
		eventually(t, "n2 to serve again", func() bool { return ready(t, c, "n2") == nil })
		if now, err := found.Pid("n2"); err != nil || now == pid {
			t.Errorf("pid %d, before %d (%v)", now, pid, err)
		}
		if err := c.Start(t.Context(), "n2"); err == nil {
			t.Error("started twice")
		}
	})
	t.Run("stop in order", func(t *testing.T) {
		for range 2 {
			if err := c.Stop(t.Context(), "n3"); err != nil {
				t.Fatal(err)
			}
		}
		if err := c.Start(t.Context(), "n3"); err != nil {
			t.Fatal(err)
		}
		eventually(t, "n3 to serve again", func() bool { return ready(t, c, "n3") == nil })
	})
	t.Run("pause", func(t *testing.T) {
		if err := c.Pause("n1"); err != nil {
			t.Fatal(err)
		}
		if err := readyWithin(time.Second, t, c, "n1"); err == nil {
			t.Error("a frozen one answers")
		}
		if err := c.Resume("n1"); err != nil {
			t.Fatal(err)
		}
		eventually(t, "n1 to answer again", func() bool { return ready(t, c, "n1") == nil })
	})
	t.Run("partition", func(t *testing.T) {
		if err := c.Partition("n3"); err != nil {
			t.Fatal(err)
		}
		if reach(c, "n1", nodes[2]) == nil || reach(c, "n3", nodes[0]) == nil {
			t.Error("the line is not cut")
		}
		eventually(t, "n1 to reach n2 as before", func() bool { return reach(c, "n1", nodes[1]) == nil })
		if err := c.Heal("n3"); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the link to be restored", func() bool { return reach(c, "n1", nodes[2]) == nil })
	})
	t.Run("power off", func(t *testing.T) {
		if err := c.PowerOff("n3"); err != nil {
			t.Fatal(err)
		}
		if got := contained(nodes[2].CgroupRoot); len(got) != 0 {
			t.Errorf("containers live: %v", got)
		}
		if _, err := c.Pid("n3"); !errors.Is(err, cluster.ErrNotRunning) {
			t.Errorf("clusterd lives: %v", err)
		}
	})
	t.Run("logs", func(t *testing.T) {
		r, err := c.Logs("n2")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = r.Close() }()
		b, err := io.ReadAll(r)
		if err != nil || strings.Count(string(b), "serving 10.88.0.3") != 2 {
			t.Errorf("%q %v", b, err)
		}
	})
	t.Run("unknown node", func(t *testing.T) {
		_, pidErr := c.Pid("n9")
		for _, err := range []error{c.Kill("n9"), c.Start(t.Context(), "n9"), c.Partition("n9"), c.PowerOff("n9"), pidErr} {
			if err == nil || !strings.Contains(err.Error(), `"n9"`) {
				t.Errorf("got %v", err)
			}
		}
	})
	down()
	if left, err := cluster.Stays(marks...); err != nil || len(left) > 0 {
		t.Errorf("left behind: %q (%v)", left, err)
	}
	if _, err := cluster.Open(cfg.Dir); !errors.Is(err, cluster.ErrNone) {
		t.Fatalf("Open after Down: %v", err)
	}
}

// TestE2EHarnessFailure: a node that does not come up is quoted, and nothing
// of the cluster is left.
func TestE2EHarnessFailure(t *testing.T) {
	c, err := cluster.Up(t.Context(), config(t, "--broken"))
	if err == nil {
		_ = c.Down(t.Context())
		t.Fatal("passed")
	}
	if !strings.Contains(err.Error(), "the token has expired") || !strings.Contains(err.Error(), "n2") {
		t.Fatalf("got %v", err)
	}
}

func makerConfig(dir string) cluster.Config {
	return cluster.Config{
		Dir: filepath.Join(dir, "c"), Bin: filepath.Join(dir, "bin"), Nodes: 2,
		Bridge: "cdharness", Subnet: netip.MustParsePrefix("10.88.0.0/24"),
	}
}

// maker starts a process that makes a cluster in a directory of its own.
func maker(t *testing.T, bin string) (dir string, kill func()) {
	t.Helper()
	dir = t.TempDir()
	if err := os.Symlink(bin, filepath.Join(dir, "bin")); err != nil {
		t.Fatal(err)
	}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append(os.Environ(), makerEnv+"="+dir)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	kill = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	t.Cleanup(kill)
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "up\n" {
		t.Fatalf("the maker: %q %v", line, err)
	}
	return dir, kill
}

// TestE2EHarnessKilled: a run that was killed leaves its machines, processes,
// cgroups and mounts. The next one with the same bridge removes them.
func TestE2EHarnessKilled(t *testing.T) {
	cfg := config(t)
	dir, kill := maker(t, cfg.Bin)
	killed, err := cluster.Open(filepath.Join(dir, "c"))
	if err != nil {
		t.Fatal(err)
	}
	marks := killed.Marks()
	pid, err := killed.Pid("n2")
	if err != nil {
		t.Fatal(err)
	}

	// While its owner lives it is waited for.
	short, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if _, err := cluster.Up(short, cfg); !errors.Is(err, cluster.ErrTaken) || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatalf("Up while the owner lives: %v", err)
	}
	if err := ready(t, killed, "n2"); err != nil {
		t.Fatalf("the first cluster suffered: %v", err)
	}

	kill()
	mounted := filepath.Join(dir, "c", "a mount") // the kernel escapes the space
	if err := os.Mkdir(mounted, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", mounted, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	var progress []string
	cfg.Progress = func(what string) { progress = append(progress, what) }
	c, err := cluster.Up(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	if len(progress) == 0 || !strings.Contains(progress[0], "killed run") {
		t.Errorf("progress %q", progress)
	}
	if _, err := killed.Pid("n2"); !errors.Is(err, cluster.ErrNotRunning) {
		t.Errorf("process %d of the killed run lives: %v", pid, err)
	}
	if _, err := os.Stat(filepath.Join(dir, "c")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("its folder is left: %v", err)
	}
	for _, n := range c.Nodes() {
		if err := ready(t, c, n.Name); err != nil {
			t.Errorf("%s: %v", n.Name, err)
		}
	}
	if err := c.Down(context.WithoutCancel(t.Context())); err != nil {
		t.Error(err)
	}
	if left, err := cluster.Stays(append(marks, dir)...); err != nil || len(left) > 0 {
		t.Errorf("left behind: %q (%v)", left, err)
	}
}

func TestUpRefuses(t *testing.T) {
	if os.Geteuid() != 0 {
		if _, err := cluster.Up(t.Context(), cluster.Config{Dir: t.TempDir()}); err == nil || !strings.Contains(err.Error(), "sudo") {
			t.Fatalf("without root: %v", err)
		}
		return
	}
	if _, err := cluster.Up(t.Context(), cluster.Config{Dir: filepath.Join(t.TempDir(), "c"), Bin: t.TempDir()}); !errors.Is(err, os.ErrNotExist) || !strings.Contains(err.Error(), "make build") {
		t.Fatalf("without programs: %v", err)
	}
}
