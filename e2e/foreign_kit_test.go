package e2e

import (
	"archive/tar"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/features"
)

// foreign is a container of podman on the machine that the nodes are on; nil: there
// is no podman.
type foreign struct {
	podman []string // the program, with the directories that are its own for this test
	state  foreignState
}

type foreignState struct {
	ID    string
	State struct {
		Running   bool
		Pid       int
		StartedAt time.Time
	}
}

const (
	// foreignName is its name, and part of no other.
	foreignName = "not-of-clusterd"
	// foreignCgroup is above those that podman makes, and bears no mark of a cluster.
	foreignCgroup = "/not-of-clusterd"
)

// startForeign starts the container, before there is a cluster. It is removed after
// the cluster is, and has to run until then.
func startForeign(t *testing.T) *foreign {
	t.Helper()
	program, err := exec.LookPath("podman")
	if err != nil {
		return nil
	}
	dir, err := os.MkdirTemp("", "podman") // beside nothing that the cluster cleans up
	if err != nil {
		t.Fatal(err)
	}
	root := filepath.Join(dir, "rootfs")
	if err := unpack(filepath.Join(bin(t), "hello.tar"), root); err != nil {
		t.Fatal(err)
	}
	f := &foreign{podman: []string{program, "--root", filepath.Join(dir, "root"), "--runroot", filepath.Join(dir, "run"), "--tmpdir", filepath.Join(dir, "tmp"), "--storage-driver", "vfs", "--cgroup-manager", "cgroupfs", "--events-backend", "none"}}
	if runc, err := exec.LookPath("runc"); err == nil { // crun wants one version of cgroups alone
		f.podman = append(f.podman, "--runtime", runc)
	}
	if _, err := f.run(t.Context(), "run", "--detach", "--name", foreignName, "--network", "none", "--cgroup-parent", foreignCgroup, "--log-driver", "none", "--ulimit", "nofile=1024:1024", "--ulimit", "nproc=1024:1024", // the default is more than some machines give
		"--rootfs", root, "/hello", "sleep"); err != nil {
		t.Fatal(err)
	}
	if f.state, err = f.inspect(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), testTimeout)
		defer cancel()
		if now, err := f.inspect(ctx); err != nil || now != f.state {
			t.Errorf("after the cluster is gone: %+v (%v)", now, err)
		}
		if _, err := f.run(ctx, "rm", "--force", "--time", "0", foreignName); err != nil {
			t.Error(err)
		}
		if err := errors.Join(os.RemoveAll(dir), removeCgroups(foreignCgroup)); err != nil {
			t.Error(err)
		}
	})
	return f
}

func (f *foreign) run(ctx context.Context, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, f.podman[0], slices.Concat(f.podman[1:], args)...)
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = fmt.Errorf("podman %s: %w: %s", args[0], err, exit.Stderr)
	}
	return out, err
}

func (f *foreign) inspect(ctx context.Context) (state foreignState, err error) {
	out, err := f.run(ctx, "inspect", foreignName)
	if err != nil {
		return state, err
	}
	var all []foreignState
	if err := json.Unmarshal(out, &all); err != nil || len(all) != 1 {
		return state, fmt.Errorf("%w: %s", err, out)
	}
	return all[0], nil
}

// show: the container runs as it did, and no list of a node has it.
func (f *foreign) show(t *testing.T, e *env) {
	if f == nil {
		t.Skip("there is no podman: apt-get install podman")
	}
	features.Shows(t, 154)
	now, err := f.inspect(t.Context())
	if err != nil || !now.State.Running || now != f.state {
		t.Errorf("it was %+v and is %+v (%v)", f.state, now, err)
	}
	lists := map[string]string{"pods": e.ctl("get", "pods", "-A", "-o", "yaml")}
	raw := func(path string) (text string) {
		e.eventually(path+" is answered", func(context.Context) error { // the agent may be about to reach the server again
			out, errs, code := e.run("clusterctl", "", "get", "--raw", path)
			if text = out; code != 0 {
				return fmt.Errorf("exit %d: %s", code, errs)
			}
			return nil
		})
		return text
	}
	for _, n := range e.Nodes() {
		out, err := exec.CommandContext(t.Context(), e.Bin("clusterd"), "containers", "--data", n.Data, "-o", "json").Output()
		if err != nil {
			t.Fatal(err)
		}
		lists["containers of "+n.Name] = string(out)
		for _, path := range []string{"pods", "stats/summary", "metrics/cadvisor"} {
			lists[path+" of "+n.Name] = raw("/api/v1/nodes/" + n.Name + "/proxy/" + path)
		}
		node, err := e.api.CoreV1().Nodes().Get(t.Context(), n.Name, metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		lists["Node "+n.Name] = node.String()
	}
	pid := fmt.Sprintf(`"pid": %d,`, f.state.State.Pid)
	for what, text := range lists {
		if text == "" {
			t.Errorf("%s: nothing is listed", what)
		}
		for _, word := range []string{foreignName, f.state.ID, f.state.ID[:12], pid} {
			if strings.Contains(text, word) {
				t.Errorf("%s has %q:\n%s", what, word, text)
			}
		}
	}
}

// removeCgroups removes a cgroup that has no processes any more, and those below it,
// from each hierarchy.
func removeCgroups(name string) error {
	var dirs []string
	for _, pattern := range []string{"/sys/fs/cgroup" + name, "/sys/fs/cgroup/*" + name} {
		roots, err := filepath.Glob(pattern)
		if err != nil {
			return err
		}
		for _, root := range roots {
			if err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
				if err == nil && d.IsDir() {
					dirs = append(dirs, path)
				}
				return err
			}); err != nil {
				return err
			}
		}
	}
	for _, dir := range slices.Backward(dirs) { // those below come first
		if err := os.Remove(dir); err != nil {
			return err
		}
	}
	return nil
}

// unpack writes the files of an image to a directory.
func unpack(image, dir string) error {
	img, err := tarball.ImageFromPath(image, nil)
	if err != nil {
		return err
	}
	layers := mutate.Extract(img)
	defer layers.Close()
	for r := tar.NewReader(layers); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		path := filepath.Join(dir, filepath.Clean("/"+h.Name))
		if h.Typeflag == tar.TypeDir {
			if err := os.MkdirAll(path, 0o755); err != nil {
				return err
			}
			continue
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		b, err := io.ReadAll(r)
		if err != nil {
			return err
		}
		if err := os.WriteFile(path, b, h.FileInfo().Mode().Perm()); err != nil {
			return err
		}
	}
}
