package tools

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/e2e/cluster/clustertest"
)

const (
	image = "clusterd.local/hello:1"
	node  = clustertest.Node
	// testTimeout is how long anything may take on a busy machine.
	testTimeout = 3 * time.Minute
)

// shared is the cluster that all tests of the package use.
var shared = clustertest.Shared{Name: "clusterd-tools", Bridge: "cdtools", Subnet: netip.MustParsePrefix("10.86.0.0/24")}

func TestMain(m *testing.M) { os.Exit(shared.Main(m)) }

// kit is one test's hold on the cluster.
type kit struct {
	*testing.T
	c      *cluster.Netns
	api    kubernetes.Interface
	config *rest.Config
	peers  string // folder of the tools
	ns     string // the test's own namespace
}

// start gives the cluster to a test, with a namespace of the given name.
func start(t *testing.T, ns string) *kit {
	t.Helper()
	peers := os.Getenv("CLUSTERD_TOOLS")
	if peers == "" {
		t.Skip("needs root and tools of others: make tools-test")
	}
	if os.Geteuid() != 0 {
		t.Fatal("CLUSTERD_TOOLS is set, but this is not root")
	}
	if err := shared.Start(filepath.Dir(peers)); err != nil {
		t.Fatal(err)
	}
	k := &kit{T: t, c: shared.Cluster, api: shared.API, config: shared.Config, peers: peers, ns: ns}
	k.ok("clusterctl", "create", "namespace", ns)
	t.Cleanup(func() {
		if t.Failed() {
			k.dump()
		}
		// What a test leaves would be in the way of the next.
		k.ok("clusterctl", "delete", "namespace", ns, "--timeout="+testTimeout.String())
	})
	return k
}

func (k *kit) dump() {
	for _, args := range [][]string{{"get", "deploy,jobs,pods,pvc,leases", "-o", "wide"}, {"get", "events", "--sort-by=.lastTimestamp"}, {"logs", "--prefix", "--tail=30", "-l", "app=operator"}} {
		out, errs, _ := k.run("", "clusterctl", args...)
		k.Logf("$ clusterctl %s\n%s%s", strings.Join(args, " "), out, errs)
	}
	k.Logf("--- %s:\n%s", node, shared.LastLog(40))
}

// command prepares a tool as the administrator, in the test's namespace and in
// the node's network.
func (k *kit) command(ctx context.Context, tool string, args ...string) *exec.Cmd {
	path := filepath.Join(k.peers, tool)
	switch tool {
	case "clusterctl":
		path = k.c.Bin(tool)
		args = append([]string{"--namespace", k.ns}, args...)
	case "helm", "stern":
		args = append([]string{"--namespace", k.ns}, args...)
	}
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+k.c.Nodes()[0].Kubeconfig(), "HOME="+shared.Dir, "NO_COLOR=1")
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

// run runs a tool with something on its standard input.
func (k *kit) run(stdin, tool string, args ...string) (stdout, stderr string, code int) {
	k.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(k.Context()), testTimeout+30*time.Second)
	defer cancel()
	cmd := k.command(ctx, tool, args...)
	stdout, stderr, code, err := clustertest.Finish(cmd, stdin)
	if err != nil {
		k.Fatalf("%s: %v", cmd, err)
	}
	return stdout, stderr, code
}

// ok runs a tool, which must succeed, and returns its standard output.
func (k *kit) ok(tool string, args ...string) string {
	k.Helper()
	return k.okIn("", tool, args...)
}

// okIn is ok with something on standard input.
func (k *kit) okIn(stdin, tool string, args ...string) string {
	k.Helper()
	out, errs, code := k.run(stdin, tool, args...)
	if code != 0 {
		k.Fatalf("%s %s: exit %d: %s%s", tool, strings.Join(args, " "), code, out, errs)
	}
	return out
}

// fails runs a tool, which must not succeed, and returns what it says.
func (k *kit) fails(tool string, args ...string) string {
	k.Helper()
	out, errs, code := k.run("", tool, args...)
	if code == 0 {
		k.Fatalf("%s %s passed: %s%s", tool, strings.Join(args, " "), out, errs)
	}
	return out + errs
}

// has fails the test unless the text has all the words.
func (k *kit) has(text string, words ...string) {
	k.Helper()
	for _, w := range words {
		if !strings.Contains(text, w) {
			k.Errorf("%q is not in:\n%s", w, text)
		}
	}
}

// lacks fails the test if the text has one of the words.
func (k *kit) lacks(text string, words ...string) {
	k.Helper()
	for _, w := range words {
		if strings.Contains(text, w) {
			k.Errorf("%q is in:\n%s", w, text)
		}
	}
}

// is fails the test unless both are the same.
func (k *kit) is(what, got, want string) {
	k.Helper()
	if got != want {
		k.Errorf("%s is %q, want %q", what, got, want)
	}
}

// field is one field of an object, as jsonpath prints it.
func (k *kit) field(object, path string) string {
	k.Helper()
	return k.ok("clusterctl", "get", object, "-o", "jsonpath="+path)
}

// eventually waits until check has nothing to complain of.
func (k *kit) eventually(what string, check func(context.Context) error) {
	k.Helper()
	ctx, cancel := context.WithTimeout(k.Context(), testTimeout)
	defer cancel()
	if err := clustertest.Poll(ctx, check); err != nil {
		k.Fatalf("waited %s for: %s; but: %v", testTimeout, what, err)
	}
}

// eventuallyHas waits until a tool succeeds and what it prints has all the words.
func (k *kit) eventuallyHas(words []string, stdin, tool string, args ...string) {
	k.Helper()
	k.eventually(fmt.Sprintf("%q in the output of %s %q", words, tool, args), func(context.Context) error {
		out, errs, code := k.run(stdin, tool, args...)
		if code != 0 {
			return fmt.Errorf("exit %d: %s%s", code, out, errs)
		}
		for _, w := range words {
			if !strings.Contains(out, w) {
				return fmt.Errorf("%q is not in:\n%s%s", w, out, errs)
			}
		}
		return nil
	})
}

// eventuallyIs waits until a field of an object has a value.
func (k *kit) eventuallyIs(object, path, want string) {
	k.Helper()
	k.eventually(fmt.Sprintf("%s of %s is %q", path, object, want), func(context.Context) error {
		out, errs, code := k.run("", "clusterctl", "get", object, "-o", "jsonpath="+path)
		if code != 0 || out != want {
			return fmt.Errorf("%q %s", out, errs)
		}
		return nil
	})
}
