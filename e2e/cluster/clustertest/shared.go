// Package clustertest is a cluster for all tests of a package, of one node unless
// they ask for more, and how they wait for it and run programs on it.
package clustertest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/e2e/cluster"
)

// Shared is a cluster that all tests of a package use. The first three fields are
// required, the numbers are not; the others are there when Start has returned.
type Shared struct {
	Name   string // of its directory
	Bridge string
	Subnet netip.Prefix

	Servers int // default 1: n1 alone
	Agents  int
	Args    []string // further flags for every clusterd

	Dir     string // removed by Main, a home for commands
	Cluster *cluster.Netns
	API     kubernetes.Interface
	Config  *rest.Config
	Began   time.Time    // when Start began to make the cluster
	Served  time.Time    // when its API answered
	First   *corev1.Node // the node as it was when it was Ready for the first time

	once sync.Once
	err  error
}

// Node is the first node of a Shared.
const Node = "n1"

// startTimeout is how long a Shared may take to come and to go on a busy machine.
const startTimeout = 6 * time.Minute

// Start makes the cluster of the programs in bin once, waits for its nodes and loads
// the image hello.tar of that directory. Each call returns the same error.
func (s *Shared) Start(bin string) error {
	s.once.Do(func() { s.err = s.up(bin) })
	return s.err
}

func (s *Shared) up(bin string) (err error) {
	if s.Dir, err = os.MkdirTemp("", s.Name+"-"); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	s.Began = time.Now()
	c, err := cluster.Up(ctx, cluster.Config{Dir: filepath.Join(s.Dir, "c"), Bin: bin, Nodes: max(1, s.Servers), Agents: s.Agents, Bridge: s.Bridge, Subnet: s.Subnet, Args: s.Args})
	if err != nil {
		return err
	}
	s.Cluster, s.Served = c, time.Now()
	if s.API, s.Config, err = c.Client(Node); err != nil {
		return err
	}
	if err := Poll(ctx, func(ctx context.Context) error {
		for _, node := range c.Nodes() {
			n, err := s.API.CoreV1().Nodes().Get(ctx, node.Name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if !slices.ContainsFunc(n.Status.Conditions, func(c corev1.NodeCondition) bool {
				return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
			}) {
				return fmt.Errorf("%s is not Ready: %+v", node.Name, n.Status.Conditions)
			}
			if node.Name == Node && s.First == nil {
				s.First = n
			}
		}
		return nil
	}); err != nil {
		return err
	}
	return Poll(ctx, func(context.Context) error { // a node that has just started takes no commands yet
		load := exec.CommandContext(ctx, c.Bin("clusterctl"), "image", "load", filepath.Join(bin, "hello.tar"))
		load.Env = append(os.Environ(), "KUBECONFIG="+c.Nodes()[0].Kubeconfig())
		if out, err := load.CombinedOutput(); err != nil {
			return fmt.Errorf("clusterctl image load: %w: %s", err, out)
		}
		return nil
	})
}

// Main runs the package's tests and takes the cluster down. It returns the exit
// code, which is not 0 either when something of the cluster is left.
func (s *Shared) Main(m *testing.M) int {
	code := m.Run()
	if s.Cluster != nil {
		if err := s.down(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	if s.Dir != "" {
		_ = os.RemoveAll(s.Dir) // down has said what is left
	}
	return code
}

func (s *Shared) down() error {
	marks := append(s.Cluster.Marks(), s.Dir)
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	if err := s.Cluster.Down(ctx); err != nil {
		return fmt.Errorf("take the cluster down: %w", err)
	}
	gone, cancel := context.WithTimeout(context.Background(), goneTimeout)
	defer cancel()
	return Poll(gone, func(context.Context) error {
		left, err := cluster.Remains(marks...)
		if err == nil && len(left) > 0 {
			err = fmt.Errorf("left behind: %q", left)
		}
		return err
	})
}

// goneTimeout is how long what was killed may take to be gone on a busy machine.
const goneTimeout = 10 * time.Second

// LastLog is the end of the node's log.
func (s *Shared) LastLog(lines int) string {
	r, err := s.Cluster.Logs(Node)
	if err != nil {
		return err.Error()
	}
	defer r.Close()
	b, err := io.ReadAll(r)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// Poll asks until check has nothing to complain of, or ctx ends: then it returns
// the last complaint.
func Poll(ctx context.Context, check func(context.Context) error) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		ask, stop := context.WithTimeout(ctx, 20*time.Second)
		err := check(ask)
		stop()
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return err
		}
	}
}

// Finish runs a command with something on its standard input. err says why it did
// not run; that it failed is in the exit code.
func Finish(cmd *exec.Cmd, stdin string) (stdout, stderr string, code int, err error) {
	var out, errs bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errs
	err = cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		code, err = exit.ExitCode(), nil
	}
	return out.String(), errs.String(), code, err
}
