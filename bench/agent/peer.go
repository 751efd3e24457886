package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

const peerName = "containerd"

// errNoPeer: there is nothing to compare with on this machine.
var errNoPeer = errors.New("containerd, runc, the CNI plugins and gcc are not all installed")

const pauseImage = "bench.local/pause:1"

// containerd is a containerd of our own, asked through its CRI as a kubelet
// asks: everything it makes lies in dir and in cgroup.
type containerd struct {
	dir    string
	cgroup string
	daemon *exec.Cmd
	conn   *grpc.ClientConn
	pods   cri.RuntimeServiceClient

	mu   sync.Mutex // guards made
	made map[string]criPod
}

type criPod struct{ sandbox, container string }

// newContainerd starts it and brings it the image. It works in the calling
// process's network namespace.
func newContainerd(ctx context.Context, boxTar []byte) (_ *containerd, err error) {
	plugins := "/usr/lib/cni"
	if _, err := os.Stat(plugins + "/bridge"); err != nil {
		plugins = "/opt/cni/bin"
	}
	if _, err := os.Stat(plugins + "/bridge"); err != nil {
		return nil, errNoPeer
	}
	for _, program := range []string{"containerd", "ctr", "runc", "gcc"} {
		if _, err := exec.LookPath(program); err != nil {
			return nil, errNoPeer
		}
	}
	c := &containerd{made: map[string]criPod{}, cgroup: fmt.Sprintf("/clusterd-bench-%d-peer", os.Getpid())}
	if c.dir, err = os.MkdirTemp("", "clusterd-bench-peer-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.end())
		}
	}()
	if err := c.configure(plugins); err != nil {
		return nil, err
	}
	if err := c.start(ctx); err != nil {
		return nil, err
	}
	pause, err := pauseTar(ctx, c.dir)
	if err != nil {
		return nil, fmt.Errorf("pause image: %w", err)
	}
	for name, content := range map[string][]byte{"pause.tar": pause, "box.tar": boxTar} {
		file := filepath.Join(c.dir, name)
		if err := os.WriteFile(file, content, 0o600); err != nil {
			return nil, err
		}
		out, err := exec.CommandContext(ctx, "ctr", "--address", c.socket(), "--namespace", "k8s.io", "images", "import", file).CombinedOutput()
		if err != nil {
			return nil, fmt.Errorf("import %s: %w: %s", name, err, out)
		}
	}
	return c, nil
}

func (c *containerd) socket() string { return filepath.Join(c.dir, "sock") }

// configure writes what containerd reads: its directories, the plain cgroup driver,
// and a bridge for the pods.
func (c *containerd) configure(plugins string) error {
	config := fmt.Sprintf(`version = 2
root = %q
state = %q
disabled_plugins = ["io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs", "io.containerd.snapshotter.v1.zfs", "io.containerd.snapshotter.v1.devmapper"]
[grpc]
  address = %q
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = %q
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"
  stream_server_port = "0"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = %q
    conf_dir = %q
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
`, filepath.Join(c.dir, "root"), filepath.Join(c.dir, "state"), c.socket(), pauseImage, plugins, filepath.Join(c.dir, "cni"))
	network := fmt.Sprintf(`{"cniVersion": "0.4.0", "name": "bench", "plugins": [{"type": "bridge", "bridge": "benchpeer0",
"isGateway": true, "hairpinMode": true, "ipam": {"type": "host-local", "dataDir": %q,
"ranges": [[{"subnet": "10.98.0.0/16"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}`, filepath.Join(c.dir, "ipam"))
	return errors.Join(
		os.WriteFile(filepath.Join(c.dir, "config.toml"), []byte(config), 0o600),
		os.Mkdir(filepath.Join(c.dir, "cni"), 0o700),
		os.WriteFile(filepath.Join(c.dir, "cni", "10-bench.conflist"), []byte(network), 0o600),
	)
}

// start runs containerd in the cgroup in which it is measured, and waits until
// it is ready for pods.
func (c *containerd) start(ctx context.Context) error {
	log, err := os.Create(filepath.Join(c.dir, "log"))
	if err != nil {
		return err
	}
	defer log.Close()
	c.daemon = exec.Command("containerd", "--config", filepath.Join(c.dir, "config.toml"))
	c.daemon.Stdout, c.daemon.Stderr = log, log
	if err := c.daemon.Start(); err != nil {
		return err
	}
	for _, dir := range cgroupDirs(c.cgroup + "/daemon") {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		if strings.HasPrefix(dir, "/sys/fs/cgroup/cpuset/") { // has no processors until set
			for _, d := range []string{filepath.Dir(dir), dir} {
				for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
					b, err := os.ReadFile(filepath.Join(filepath.Dir(d), file))
					if err == nil {
						err = os.WriteFile(filepath.Join(d, file), b, 0)
					}
					if err != nil {
						return err
					}
				}
			}
		}
		if err := os.WriteFile(filepath.Join(dir, "cgroup.procs"), []byte(strconv.Itoa(c.daemon.Process.Pid)), 0); err != nil {
			return err
		}
	}
	c.conn, err = grpc.NewClient("unix://"+c.socket(), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	c.pods = cri.NewRuntimeServiceClient(c.conn)
	var last error
	err = await(ctx, "containerd", func() bool {
		st, err := c.pods.Status(ctx, &cri.StatusRequest{})
		if err != nil {
			last = err
			return false
		}
		for _, cond := range st.Status.Conditions {
			if !cond.Status {
				last = fmt.Errorf("%s: %s: %s", cond.Type, cond.Reason, cond.Message)
				return false
			}
		}
		return true
	})
	if err != nil {
		said, _ := os.ReadFile(log.Name())
		return fmt.Errorf("%w: %w; its log: %s", err, last, said)
	}
	return nil
}

// end stops containerd and takes away all that it made.
func (c *containerd) end() error {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	var errs []error
	c.mu.Lock()
	left := make([]string, 0, len(c.made))
	for name := range c.made {
		left = append(left, name)
	}
	c.mu.Unlock()
	for _, name := range left { // of an interrupted run
		_, err := c.down(ctx, name)
		errs = append(errs, err)
	}
	if c.conn != nil {
		errs = append(errs, c.conn.Close())
	}
	if c.daemon != nil && c.daemon.Process != nil {
		errs = append(errs, c.daemon.Process.Signal(syscall.SIGTERM))
		_ = c.daemon.Wait() // it tells of the signal
	}
	errs = append(errs, await(ctx, "end of containerd's cgroups", func() bool { return removeCgroup(c.cgroup) }))
	return errors.Join(append(errs, os.RemoveAll(c.dir))...)
}

func (c *containerd) up(ctx context.Context, name string) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	logs := c.logs(name)
	if err := os.MkdirAll(logs, 0o700); err != nil {
		return 0, err
	}
	seccomp := &cri.SecurityProfile{ProfileType: cri.SecurityProfile_RuntimeDefault}
	sandbox := &cri.PodSandboxConfig{
		Metadata:     &cri.PodSandboxMetadata{Name: name, Namespace: "default", Uid: "uid-" + name},
		Hostname:     name,
		LogDirectory: logs,
		Linux: &cri.LinuxPodSandboxConfig{CgroupParent: c.cgroup + "/pod-" + name,
			SecurityContext: &cri.LinuxSandboxSecurityContext{Seccomp: seccomp}},
	}
	container := &cri.ContainerConfig{
		Metadata: &cri.ContainerMetadata{Name: "box"},
		Image:    &cri.ImageSpec{Image: boxImage},
		LogPath:  "box.log",
		Linux:    &cri.LinuxContainerConfig{SecurityContext: &cri.LinuxContainerSecurityContext{Seccomp: seccomp}},
	}
	began := time.Now()
	pod, err := c.pods.RunPodSandbox(ctx, &cri.RunPodSandboxRequest{Config: sandbox})
	if err != nil {
		return 0, fmt.Errorf("run sandbox: %w", err)
	}
	c.note(name, criPod{sandbox: pod.PodSandboxId})
	made, err := c.pods.CreateContainer(ctx, &cri.CreateContainerRequest{PodSandboxId: pod.PodSandboxId, Config: container, SandboxConfig: sandbox})
	if err != nil {
		return 0, fmt.Errorf("create container: %w", err)
	}
	if _, err := c.pods.StartContainer(ctx, &cri.StartContainerRequest{ContainerId: made.ContainerId}); err != nil {
		return 0, fmt.Errorf("start container: %w", err)
	}
	took := time.Since(began)
	c.note(name, criPod{sandbox: pod.PodSandboxId, container: made.ContainerId})
	return took, nil
}

func (c *containerd) note(name string, p criPod) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.made[name] = p
}

func (c *containerd) pod(name string) criPod {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.made[name]
}

// settle has nothing to wait for: the CRI's calls return when all is done.
func (c *containerd) settle(context.Context, string) error { return nil }

func (c *containerd) hears(ctx context.Context, name string) error {
	return logHas(ctx, filepath.Join(c.logs(name), "box.log"))
}

func (c *containerd) logs(name string) string { return filepath.Join(c.dir, "logs", name) }

func (c *containerd) down(ctx context.Context, name string) (time.Duration, error) {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	p := c.pod(name)
	began := time.Now()
	if p.container != "" {
		if _, err := c.pods.StopContainer(ctx, &cri.StopContainerRequest{ContainerId: p.container, Timeout: 1}); err != nil {
			return 0, fmt.Errorf("stop container: %w", err)
		}
		if _, err := c.pods.RemoveContainer(ctx, &cri.RemoveContainerRequest{ContainerId: p.container}); err != nil {
			return 0, fmt.Errorf("remove container: %w", err)
		}
	}
	if _, err := c.pods.StopPodSandbox(ctx, &cri.StopPodSandboxRequest{PodSandboxId: p.sandbox}); err != nil {
		return 0, fmt.Errorf("stop sandbox: %w", err)
	}
	if _, err := c.pods.RemovePodSandbox(ctx, &cri.RemovePodSandboxRequest{PodSandboxId: p.sandbox}); err != nil {
		return 0, fmt.Errorf("remove sandbox: %w", err)
	}
	took := time.Since(began)
	c.mu.Lock()
	delete(c.made, name)
	c.mu.Unlock()
	return took, nil
}

func (c *containerd) exec(ctx context.Context, name string) (time.Duration, error) {
	began := time.Now()
	r, err := c.pods.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: c.pod(name).container, Cmd: []string{"/bin/box", "true"}, Timeout: 10})
	if err != nil {
		return 0, fmt.Errorf("exec: %w", err)
	}
	if r.ExitCode != 0 {
		return 0, fmt.Errorf("exec: exit code %d", r.ExitCode)
	}
	return time.Since(began), nil
}

func (c *containerd) cpu() (time.Duration, error) { return cgroupCPU(c.cgroup) }

func (c *containerd) pss() (float64, error) { return cgroupPSS(c.cgroup) }

// pauseC is a pause as small as the usual ones.
const pauseC = `#include <signal.h>
#include <stdlib.h>
#include <unistd.h>
static void end(int sig) { (void)sig; _exit(0); }
int main(void) { signal(SIGTERM, end); signal(SIGINT, end); for (;;) pause(); }
`

// pauseTar packs a pause as an image.
func pauseTar(ctx context.Context, dir string) ([]byte, error) {
	source, program := filepath.Join(dir, "pause.c"), filepath.Join(dir, "pause")
	if err := os.WriteFile(source, []byte(pauseC), 0o600); err != nil {
		return nil, err
	}
	if out, err := exec.CommandContext(ctx, "gcc", "-Os", "-static", "-s", "-o", program, source).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("gcc: %w: %s", err, out)
	}
	b, err := os.ReadFile(program)
	if err != nil {
		return nil, err
	}
	var layer bytes.Buffer
	w := tar.NewWriter(&layer)
	err = w.WriteHeader(&tar.Header{Name: "pause", Mode: 0o755, Size: int64(len(b))})
	if err == nil {
		_, err = w.Write(b)
	}
	if err = errors.Join(err, w.Close()); err != nil {
		return nil, err
	}
	return imageTar(pauseImage, layer.Bytes(), "/pause")
}
