package gateway

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/e2e/cluster/clustertest"
)

// startTimeout is how long it may take until the class is there.
const startTimeout = 3 * time.Minute

// profiles are what is claimed as a whole. What is claimed beyond them the suite
// reads from the class's status.supportedFeatures.
const profiles = "GATEWAY-HTTP,GATEWAY-GRPC"

var (
	suite  = flag.String("suite", "", "further `flags` of the suite, such as '-run-test HTTPRouteWeight'")
	report = flag.String("report", "", "`file` that the suite's report is written to")
)

// shared has three servers, so that a change has to reach three proxies.
var shared = clustertest.Shared{Name: "clusterd-gateway", Bridge: "cdgateway", Subnet: netip.MustParsePrefix("10.83.0.0/24"), Servers: 3}

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(shared.Main(m))
}

// TestConformance passes if every test of the suite does that the class claims, and
// those of the profiles.
func TestConformance(t *testing.T) {
	peers := os.Getenv("CLUSTERD_GATEWAY")
	if peers == "" {
		t.Skip("needs root and the suite: make gateway-conformance")
	}
	if os.Geteuid() != 0 {
		t.Fatal("CLUSTERD_GATEWAY is set, but this is not root")
	}
	if err := shared.Start(filepath.Dir(peers)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			out, _ := ctl("get", "gateways,httproutes,grpcroutes,services,pods", "-A", "-o", "wide")
			t.Logf("%s\n--- %s:\n%s", out, clustertest.Node, shared.LastLog(40))
		}
	})
	images, err := filepath.Glob(filepath.Join(peers, "echo-*.tar"))
	if err != nil || len(images) == 0 {
		t.Fatalf("no images echo-*.tar in %s (%v): run `make gateway-conformance`", peers, err)
	}
	for _, i := range images {
		must(t, "image", "load", i)
	}
	net := strings.TrimSuffix(shared.Subnet.Masked().Addr().String(), "0")
	must(t, "-n", "kube-system", "create", "configmap", "clusterd-load-balancer", "--from-literal=addresses="+net+"100-"+net+"199")
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	if err := clustertest.Poll(ctx, func(context.Context) error {
		out, err := ctl("get", "gatewayclass", "clusterd", "-o", `jsonpath={.status.conditions[?(@.type=="Accepted")].status}`)
		if err == nil && out != "True" {
			err = errors.New("Accepted is " + out)
		}
		return err
	}); err != nil {
		t.Fatalf("waited %s for the class clusterd: %v", startTimeout, err)
	}
	out := *report
	if out == "" {
		out = filepath.Join(shared.Dir, "report.yaml")
	}
	// The addresses are reached over the bridge, whose end this process has.
	args := append([]string{
		"-test.v", "-test.timeout=90m", "-gateway-class=clusterd", "-conformance-profiles=" + profiles, "-report-output=" + out,
		"-organization=clusterd", "-project=clusterd", "-url=https://github.com/clusterd/clusterd", "-version=" + version(t), "-contact=@clusterd",
		"-usable-address=" + net + "199", "-unusable-address=" + net + "250", // of the pool, and not
	}, strings.Fields(*suite)...)
	cmd := exec.CommandContext(t.Context(), filepath.Join(peers, "gateway-conformance"), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+shared.Cluster.Nodes()[0].Kubeconfig(), "HOME="+shared.Dir)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		t.Errorf("the suite: %v", err)
	}
}

func version(t *testing.T) string {
	t.Helper()
	out, err := exec.CommandContext(t.Context(), shared.Cluster.Bin("clusterd"), "version").Output()
	if err != nil {
		t.Fatalf("clusterd version: %v", err)
	}
	first, _, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	return first
}

// ctl runs clusterctl as the administrator.
func ctl(args ...string) (string, error) {
	cmd := exec.Command(shared.Cluster.Bin("clusterctl"), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+shared.Cluster.Nodes()[0].Kubeconfig(), "HOME="+shared.Dir)
	out, errs, code, err := clustertest.Finish(cmd, "")
	if err == nil && code != 0 {
		err = fmt.Errorf("clusterctl %s: exit %d: %s", strings.Join(args, " "), code, errs)
	}
	return out, err
}

func must(t *testing.T, args ...string) {
	t.Helper()
	if out, err := ctl(args...); err != nil {
		t.Fatal(err, out)
	}
}
