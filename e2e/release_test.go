package e2e

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/member/releases"
)

// TestE2ERelease takes signed releases over a cluster of three servers and an agent
// with `clusterctl upgrade`, under running pods: nodes refuse what is not signed or
// not whole; releases that end at once or never become Ready are taken back by the
// node itself, and the roll-out stops there; a good one arrives everywhere, also when
// the command is killed in between; and no container is ever started again. It takes
// minutes, and builds another clusterd.
func TestE2ERelease(t *testing.T) {
	need(t)
	if os.Getenv("CLUSTERD_UPGRADE") == "" {
		t.Skip("takes minutes: make upgrade-test, or make release-test for this one alone")
	}
	e := startBare(t, 3, func(c *cluster.Config) {
		c.Agents, c.OwnBin = 1, true
		// A node that is slow to come back on a busy machine keeps its pods.
		c.Args = []string{"--eviction-delay", "10m"}
	})
	e.ready(4)
	ns := e.namespace("release")
	for _, n := range e.Nodes() {
		p := pod("on-" + n.Name)
		p.Spec.NodeName = n.Name
		e.create(ns, p)
	}
	for _, n := range e.Nodes() {
		e.podReady(ns, "on-"+n.Name)
	}
	before := e.runs(ns)
	unchanged := func(t *testing.T, what string) {
		t.Helper()
		if after := e.runs(ns); !maps.Equal(before, after) {
			t.Errorf("%s: containers are not the same:\nbefore %v\nafter  %v", what, before, after)
		}
	}
	old := versionOf(t, e, e.binDir())
	f := newReleaseMaker(t)
	e.ctl("upgrade", "key", f.path("release.key"))
	e.ctl("upgrade", "key", f.path("stranger.key"))
	mustContain(t, "trust", e.ctl("upgrade", "trust", f.path("release.key.pub")), "is trusted")

	good := f.pack("good.tar.gz", f.clusterd("v0.1.0-next"))
	mustContain(t, "sign", e.ctl("upgrade", "sign", good, "--key", f.path("release.key")), "release v0.1.0-next for linux/"+runtime.GOARCH)

	t.Run("rights", func(t *testing.T) {
		mustContain(t, "a user's question", e.refused("", "--as", "jane", "upgrade", "status"), `User "jane" cannot get path "/clusterd/v1/upgrade"`)
		mustContain(t, "a user's key", e.refused("", "--as", "jane", "upgrade", "trust", f.path("release.key.pub")), "cannot post path")
	})
	t.Run("refusals", func(t *testing.T) { testReleaseRefusals(t, e, f, good) })
	unchanged(t, "refusals")

	t.Run("a release that ends at once", func(t *testing.T) {
		file := f.pack("exits.tar.gz", f.broken("v0.1.0-exits", "exits"))
		e.ctl("upgrade", "sign", file, "--key", f.path("release.key"))
		said := e.refused("", "upgrade", "--to", file)
		mustContain(t, "the roll-out", said, "a1 did not become well with v0.1.0-exits and is back at "+old, "it ended by itself")
		e.allRun(old)
		mustContain(t, "its status", e.ctl("upgrade", "status"), "stopped: a1", v1.RolloutTookBack, v1.RolloutWaiting)
	})
	unchanged(t, "a release that ends at once")

	t.Run("a release that is never Ready", func(t *testing.T) {
		file := f.pack("idles.tar.gz", f.broken("v0.1.0-idles", "idles"))
		e.ctl("upgrade", "sign", file, "--key", f.path("release.key"))
		follower := e.follower()
		said := e.ctlLong(t, 5*time.Minute, false, "upgrade", "--to", file, "--canary", follower, "--start-timeout", "10s")
		mustContain(t, "the roll-out", said, follower+" did not become well with v0.1.0-idles and is back at "+old, "it was not up within 10s")
		e.allRun(old)
	})
	unchanged(t, "a release that is never Ready")

	t.Run("taken back on request", func(t *testing.T) { testReleaseTakenBack(t, e, good, old) })
	unchanged(t, "taken back on request")

	t.Run("a good release", func(t *testing.T) {
		plan := e.ctl("upgrade", "--to", good, "--dry-run")
		lines := strings.Split(strings.TrimSpace(plan), "\n")
		leader := e.leader()
		if len(lines) != 5 || !strings.HasPrefix(lines[1], "a1 ") || !strings.HasPrefix(lines[4], leader+" ") {
			t.Errorf("%s leads, and the plan is\n%s", leader, plan)
		}
		e.allRun(old)
		// The command is killed as soon as the first node is on trial.
		cmd := exec.CommandContext(t.Context(), e.Bin("clusterctl"), "upgrade", "--to", good, "--start-timeout", "3m")
		cmd.Env = append(os.Environ(), "KUBECONFIG="+e.kubeconfig())
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		e.eventually("a1 is on trial or has passed", func(ctx context.Context) error {
			r, err := e.nodeRelease(ctx, "a1")
			if err == nil && r.Version == old && r.Trial == nil {
				err = errors.New("it is as it was")
			}
			return err
		})
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		e.eventually("the killed command is not taken for one that goes on", func(context.Context) error {
			out, errs, code := e.run("clusterctl", "", "upgrade", "--to", good, "--dry-run")
			if code != 0 {
				return errors.New(out + errs)
			}
			return nil
		})
		said := e.ctlLong(t, 10*time.Minute, true, "upgrade", "--to", good, "--start-timeout", "3m")
		t.Log("\n" + said)
		e.allRun("v0.1.0-next")
		unchanged(t, "a good release")
		if after := e.ctl("upgrade", "--to", good); strings.Count(after, "has it already") != 4 {
			t.Errorf("a second run: %s", after)
		}
		mustContain(t, "its status", e.ctl("upgrade", "status"), "State:   done")
		// The nodes are nodes: they take pods.
		p := pod("after")
		e.create(ns, p)
		e.podReady(ns, "after")
	})
}

// testReleaseRefusals sends files to nodes as a client of a server could.
func testReleaseRefusals(t *testing.T, e *env, f *releaseMaker, good string) {
	content := readFile(t, good)
	signed := readFile(t, good+".minisig")
	key, err := releases.ParseSecretKey(readFile(t, f.path("release.key")))
	if err != nil {
		t.Fatal(err)
	}
	sign := func(file []byte, m releases.Manifest) []byte {
		sig, err := key.Sign(bytes.NewReader(file), m)
		if err != nil {
			t.Fatal(err)
		}
		return sig
	}
	stranger, err := releases.ParseSecretKey(readFile(t, f.path("stranger.key")))
	if err != nil {
		t.Fatal(err)
	}
	forged, err := stranger.Sign(bytes.NewReader(content), releases.Manifest{Version: "v0.1.0-next", Arch: runtime.GOARCH})
	if err != nil {
		t.Fatal(err)
	}
	foreign := bytes.Clone(readFile(t, f.broken("v0.1.0-foreign", "exits")))
	foreign[18], foreign[19] = 22, 0 // ELF's machine: s390
	other := readFile(t, f.packBytes("foreign.tar.gz", foreign))
	for _, node := range []string{"a1", "n1", "n2"} {
		for _, tt := range []struct {
			what      string
			file, sig []byte
			want      string
		}{
			{"not signed", content, nil, "there is none"},
			{"signed by a stranger", content, forged, "is not trusted"},
			{"another file", append(bytes.Clone(content), 0), signed, "is not what key"},
			{"cut short", content[:len(content)/2], signed, "cut short"},
			{"signed for another architecture", content, sign(content, releases.Manifest{Version: "v0.1.0-next", Arch: "s390x"}), "is for linux/s390x"},
			{"a program of another architecture", other, sign(other, releases.Manifest{Version: "v0.1.0-foreign", Arch: runtime.GOARCH}), "EM_S390"},
		} {
			code, said := e.sendRelease(t, node, tt.file, tt.sig)
			if code != http.StatusUnprocessableEntity || !strings.Contains(said, tt.want) {
				t.Errorf("%s, %s: %d %s, want 422 and %q", node, tt.what, code, said, tt.want)
			}
		}
		r, err := e.nodeRelease(t.Context(), node)
		if err != nil || r.Staged != nil {
			t.Errorf("%s has staged %+v (%v)", node, r.Staged, err)
		}
	}
	unsigned := f.path("unsigned.tar.gz")
	if err := os.WriteFile(unsigned, content, 0o644); err != nil {
		t.Fatal(err)
	}
	mustContain(t, "no signature", e.refused("", "upgrade", "--to", unsigned), "unsigned.tar.gz.minisig", "clusterctl upgrade sign")
	if err := os.WriteFile(unsigned+".minisig", forged, 0o644); err != nil {
		t.Fatal(err)
	}
	mustContain(t, "a stranger's signature", e.refused("", "upgrade", "--to", unsigned), "a1: it does not trust key "+stranger.Public().Name())
}

// testReleaseTakenBack has a server go on with a release that works, and back, as
// `clusterctl upgrade` does when a node does not pass: in the same process.
func testReleaseTakenBack(t *testing.T, e *env, good, old string) {
	node := e.follower()
	pid, err := e.Pid(node)
	if err != nil {
		t.Fatal(err)
	}
	if code, said := e.sendRelease(t, node, readFile(t, good), readFile(t, good+".minisig")); code != http.StatusOK {
		t.Fatalf("%d %s", code, said)
	}
	r, err := e.nodeRelease(t.Context(), node)
	if err != nil || r.Staged == nil {
		t.Fatalf("%+v %v", r, err)
	}
	post := func(what string, in any) error {
		b, err := json.Marshal(in)
		if err != nil {
			t.Fatal(err)
		}
		return e.api.Discovery().RESTClient().Post().AbsPath(v1.Upgrade + "/nodes/" + node + "/" + what).Body(b).Do(t.Context()).Error()
	}
	if err := post("switch", v1.SwitchRequest{Digest: r.Staged.Digest, Limit: "30m", StartLimit: "10m"}); err != nil {
		t.Fatal(err)
	}
	e.eventually(node+" is on trial with the release", func(ctx context.Context) error {
		r, err := e.nodeRelease(ctx, node)
		if err == nil && (r.Version != "v0.1.0-next" || r.Trial == nil || !r.AgentRuns) {
			err = fmt.Errorf("%+v", r)
		}
		return err
	})
	if err := post("confirm", v1.TrialRequest{Version: "v0.1.0-other"}); err == nil {
		t.Error("another version was confirmed")
	}
	if err := post("back", v1.TrialRequest{Version: "v0.1.0-next", Why: "a test said so"}); err != nil {
		t.Fatal(err)
	}
	e.allRun(old)
	if r, err := e.nodeRelease(t.Context(), node); err != nil || r.Failure == nil || r.Failure.Why != "a test said so" {
		t.Errorf("%+v %v", r, err)
	}
	if now, err := e.Pid(node); err != nil || now != pid {
		t.Errorf("process %d has become %d (%v)", pid, now, err)
	}
}

// sendRelease puts a file to a node, past clusterctl.
func (e *env) sendRelease(t *testing.T, node string, file, sig []byte) (code int, said string) {
	t.Helper()
	client, err := rest.HTTPClientFor(e.config)
	if err != nil {
		t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, e.config.Host+v1.Upgrade+"/nodes/"+node+"/file", bytes.NewReader(file))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set(v1.ReleaseSignature, base64.StdEncoding.EncodeToString(sig))
	res, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return res.StatusCode, string(b)
}

func (e *env) nodeRelease(ctx context.Context, node string) (r v1.NodeRelease, err error) {
	b, err := e.api.Discovery().RESTClient().Get().AbsPath(v1.Upgrade + "/nodes/" + node).DoRaw(ctx)
	if err != nil {
		return r, err
	}
	return r, json.Unmarshal(b, &r)
}

// allRun waits until every node runs the version, has nothing on trial and is Ready.
func (e *env) allRun(version string) {
	e.t.Helper()
	e.eventually("every node runs "+version, func(ctx context.Context) error {
		for _, n := range e.Nodes() {
			r, err := e.nodeRelease(ctx, n.Name)
			if err != nil {
				return err
			}
			if r.Version != version || r.Trial != nil || !r.AgentRuns || !r.StoreReady {
				return fmt.Errorf("%+v", r)
			}
			node, err := e.api.CoreV1().Nodes().Get(ctx, n.Name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if !nodeReady(node) {
				return fmt.Errorf("%s is not Ready", n.Name)
			}
		}
		return nil
	})
}

// follower is a server that does not lead, and is not the one that is asked.
func (e *env) follower() string {
	leader := e.leader()
	if leader == "n3" {
		return "n2"
	}
	return "n3"
}

// ctlLong runs a clusterctl that may take longer than others, and returns all that it
// says.
func (e *env) ctlLong(t *testing.T, limit time.Duration, passes bool, args ...string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, e.Bin("clusterctl"), args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+e.kubeconfig())
	out, err := cmd.CombinedOutput()
	if (err == nil) != passes {
		t.Fatalf("clusterctl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// releaseMaker makes the files of releases.
type releaseMaker struct {
	t   *testing.T
	dir string
}

func newReleaseMaker(t *testing.T) *releaseMaker { return &releaseMaker{t, t.TempDir()} }

func (f *releaseMaker) path(name string) string { return filepath.Join(f.dir, name) }

var releaseFlag = regexp.MustCompile(`-X main\.release=\S+`)

// clusterd builds this tree's clusterd as another version, with the flags of the one
// under test.
func (f *releaseMaker) clusterd(version string) string {
	f.t.Helper()
	flags := os.Getenv("CLUSTERD_LDFLAGS")
	if !releaseFlag.MatchString(flags) {
		f.t.Fatalf("CLUSTERD_LDFLAGS is %q: it must be the linker flags of the clusterd under test, as make gives them", flags)
	}
	return f.build("../cmd/clusterd", version, releaseFlag.ReplaceAllString(flags, "-X main.release="+version))
}

// broken builds a clusterd that is none.
func (f *releaseMaker) broken(version, how string) string {
	f.t.Helper()
	return f.build("./testdata/brokenrelease", version, "-s -w -X main.version="+version+" -X main.how="+how)
}

func (f *releaseMaker) build(pkg, name, ldflags string) string {
	f.t.Helper()
	to := f.path("program-" + name)
	cmd := exec.Command("go", "build", "-ldflags", ldflags, "-o", to, pkg)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		f.t.Fatalf("go build %s: %v\n%s", pkg, err, out)
	}
	return to
}

// pack makes a tarball of a program.
func (f *releaseMaker) pack(name, program string) string {
	f.t.Helper()
	return f.packBytes(name, readFile(f.t, program))
}

func (f *releaseMaker) packBytes(name string, program []byte) string {
	f.t.Helper()
	var b bytes.Buffer
	z, err := gzip.NewWriterLevel(&b, gzip.BestSpeed)
	if err != nil {
		f.t.Fatal(err)
	}
	w := tar.NewWriter(z)
	err = w.WriteHeader(&tar.Header{Name: "./usr/bin/clusterd", Mode: 0o755, Size: int64(len(program)), Typeflag: tar.TypeReg})
	if err == nil {
		_, err = w.Write(program)
	}
	if err = errors.Join(err, w.Close(), z.Close(), os.WriteFile(f.path(name), b.Bytes(), 0o644)); err != nil {
		f.t.Fatal(err)
	}
	return f.path(name)
}

func readFile(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}
