package conformance

import (
	"flag"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/e2e/cluster/clustertest"
)

var (
	focus  = flag.String("focus", `\[Conformance\]`, "which tests are run: a `regexp` of their names")
	skip   = flag.String("skip", "", "which of them are not: a `regexp`")
	procs  = flag.Int("procs", 6, "how many are run at a time")
	report = flag.String("report", "", "`folder` of the reports")
)

// shared has three servers and two agents, all of which run pods. One test waits ten
// minutes for a list's continuation to expire, which etcd would have compacted after five.
var shared = clustertest.Shared{
	Name: "clusterd-conformance", Bridge: "cdconform", Subnet: netip.MustParsePrefix("10.82.0.0/24"),
	Servers: 3, Agents: 2, Args: []string{"--store-history-age=5m"},
}

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(shared.Main(m))
}

// TestConformance passes if every test does that focus and skip leave. What failed is
// listed by its name; the reports have the rest.
func TestConformance(t *testing.T) {
	kit := os.Getenv("CLUSTERD_CONFORMANCE")
	if kit == "" {
		t.Skip("needs root and Kubernetes' tests: make conformance-upstream")
	}
	if os.Geteuid() != 0 {
		t.Fatal("CLUSTERD_CONFORMANCE is set, but this is not root")
	}
	if *report == "" {
		t.Fatal("-report: name the folder of the reports")
	}
	if err := os.MkdirAll(*report, 0o755); err != nil {
		t.Fatal(err)
	}
	images, err := filepath.Glob(filepath.Join(kit, "images", "*.tar"))
	if err != nil || len(images) == 0 {
		t.Fatalf("no images in %s (%v): run `make conformance-upstream`", kit, err)
	}
	bin := filepath.Dir(kit)
	if err := shared.Start(bin); err != nil {
		t.Fatal(err)
	}
	serve(t, images)
	for _, image := range images {
		load := exec.CommandContext(t.Context(), shared.Cluster.Bin("clusterctl"), "image", "load", image)
		load.Env = environ()
		if out, err := load.CombinedOutput(); err != nil {
			t.Fatalf("clusterctl image load %s: %v: %s", image, err, out)
		}
	}
	results := suite(t, bin, kit)
	t.Logf("reports: %s\n%s", *report, results)
	if results.failed() > 0 || results.passed() == 0 {
		t.Errorf("%d passed, %d failed", results.passed(), results.failed())
	}
}

// environ is the administrator's, with a home that goes with the cluster.
func environ() []string {
	return append(os.Environ(), "KUBECONFIG="+shared.Cluster.Nodes()[0].Kubeconfig(), "HOME="+shared.Dir)
}

// serve is the registry that every node asks instead of registry.k8s.io, at the
// host's address: some tests have pods whose images are pulled always.
func serve(t *testing.T, images []string) {
	t.Helper()
	var listen net.ListenConfig
	l, err := listen.Listen(t.Context(), "tcp", net.JoinHostPort(shared.Subnet.Masked().Addr().Next().String(), "0"))
	if err != nil {
		t.Fatal(err)
	}
	host := l.Addr().String()
	server := &http.Server{Handler: registry.New(registry.Logger(log.New(io.Discard, "", 0))), ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { _ = server.Close() })
	for _, path := range images {
		if err := push(host, path); err != nil {
			t.Fatalf("push %s: %v", path, err)
		}
	}
	text := fmt.Sprintf("registries:\n  registry.k8s.io: {mirrors: [%q]}\n  %q: {plainHTTP: true}\n", host, host)
	for _, n := range shared.Cluster.Nodes() {
		if err := durable.ReplaceFile(filepath.Join(n.Data, "registries.yaml"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// push copies an archive's only image to the registry.
func push(host, path string) error {
	manifest, err := tarball.LoadManifest(opener(path))
	if err != nil {
		return err
	}
	if len(manifest) != 1 || len(manifest[0].RepoTags) != 1 {
		return fmt.Errorf("%d images, want one with one name", len(manifest))
	}
	tag, err := name.NewTag(manifest[0].RepoTags[0])
	if err != nil {
		return err
	}
	img, err := tarball.Image(opener(path), &tag)
	if err != nil {
		return err
	}
	to, err := name.NewTag(host+"/"+tag.RepositoryStr()+":"+tag.TagStr(), name.Insecure)
	if err != nil {
		return err
	}
	return remote.Write(to, img)
}

// suite runs Kubernetes' program, and reads its report. That tests failed is said by
// the report, not by an error.
func suite(t *testing.T, bin, kit string) results {
	t.Helper()
	out, err := os.Create(filepath.Join(*report, "log"))
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	file := filepath.Join(*report, "report.json")
	if err := os.RemoveAll(file); err != nil {
		t.Fatal(err)
	}
	// Tests that have to be alone are last, one at a time.
	cmd := exec.CommandContext(t.Context(), filepath.Join(kit, "ginkgo"), "run", "--procs="+strconv.Itoa(*procs), "--no-color", "--silence-skips",
		"--timeout=6h", "--focus="+*focus, "--skip="+*skip, "--output-dir="+*report, "--json-report=report.json", "--junit-report=junit.xml",
		filepath.Join(kit, "e2e.test"), "--",
		"--provider=skeleton", "--kubeconfig="+shared.Cluster.Nodes()[0].Kubeconfig(), "--kubectl-path="+filepath.Join(bin, "kubectl"), "--disable-log-dump")
	cmd.Dir, cmd.Env = shared.Dir, environ()
	cmd.Stdout, cmd.Stderr = out, out
	cmd.Cancel = func() error { return cmd.Process.Signal(unix.SIGINT) }
	cmd.WaitDelay = time.Minute
	ran := cmd.Run()
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatalf("the suite wrote no report (%v; %v); the end of its log:\n%s", ran, err, end(out.Name()))
	}
	r, err := parse(text)
	if err != nil {
		t.Fatal(err)
	}
	if ran != nil && r.failed() == 0 {
		t.Errorf("the suite: %v; the end of its log:\n%s", ran, end(out.Name()))
	}
	return r
}

// end is the last lines of a file.
func end(path string) string {
	text, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	lines := strings.Split(strings.TrimSpace(string(text)), "\n")
	return strings.Join(lines[max(0, len(lines)-20):], "\n")
}
