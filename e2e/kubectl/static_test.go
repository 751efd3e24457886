package kubectl

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/features"
	"github.com/clusterd/clusterd/netsetup/netns"
	"github.com/clusterd/clusterd/netsetup/netnstest"
)

// put writes a file as careful programs do: nobody sees half of it.
func put(t *testing.T, path, text string) {
	t.Helper()
	tmp := filepath.Join(filepath.Dir(path), "."+filepath.Base(path))
	if err := os.WriteFile(tmp, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(tmp, path); err != nil {
		t.Fatal(err)
	}
}

// TestE2EXStaticPod: a file in the node's directory is a pod.
func TestE2EXStaticPod(t *testing.T) {
	t.Parallel()
	k := start(t, "static")
	features.Shows(k, 182, 185, 186)
	file := filepath.Join(k.c.Nodes()[0].Data, "static-pods", "web.yaml")
	inNS := func(text string) string {
		return strings.Replace(text, "metadata: {", "metadata: {namespace: static, ", 1)
	}
	// A pod of the API has the name already: both run.
	k.apply(simple("web-"+node, "sleep"))
	k.ready("web-" + node)
	put(t, file, inNS(simple("web", "serve")))
	k.eventually("both run", func(context.Context) error {
		pids, err := k.c.Processes(node)
		if err != nil {
			return err
		}
		for _, pid := range pids {
			line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
			env, _ := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
			if string(line) == "/hello\x00serve\x00" && strings.Contains(string(env), "HOSTNAME=web-"+node) {
				return nil
			}
		}
		return errors.New("the static pod does not run yet")
	})
	k.ok("delete", "pod", "web-"+node, "--grace-period=1")
	p := k.podIs("web-"+node, "shown by its mirror", func(p *corev1.Pod) bool {
		return p.Annotations[corev1.MirrorPodAnnotationKey] != "" && condition(p, corev1.PodReady) == corev1.ConditionTrue
	})
	// It has no probe: it may be Ready before it listens.
	k.eventuallyHas([]string{"exec", p.Name, "-c", "main", "--", "/hello", "fetch", "http://127.0.0.1:8080/healthz"}, "ok\n")
	k.eventuallyHas([]string{"logs", p.Name}, "serving on :8080")
	pid := k.process(p.Annotations["kubernetes.io/config.hash"], "serve")

	// Deleting it through the API only brings another mirror.
	k.ok("delete", "pod", p.Name, "--wait=false")
	again := k.podIs(p.Name, "mirrored again", func(now *corev1.Pod) bool {
		return now.UID != p.UID && now.DeletionTimestamp == nil && condition(now, corev1.PodReady) == corev1.ConditionTrue
	})
	if s := again.Status.ContainerStatuses[0]; s.RestartCount != 0 || k.process(p.Annotations["kubernetes.io/config.hash"], "serve") != pid {
		k.Errorf("the container was touched: %+v", s)
	}
	// A slip is told and stops nothing; a change replaces the pod.
	put(t, file, "kind: Pod\n")
	k.eventuallyHas([]string{"get", "events", "-A", "--field-selector", "reason=FailedStaticPod"}, "web.yaml: apiVersion")
	if k.process(p.Annotations["kubernetes.io/config.hash"], "serve") != pid {
		k.Error("a wrong file stopped the pod")
	}
	put(t, file, inNS(simple("web", `sleep, "100000"`)))
	k.podIs(p.Name, "changed", func(now *corev1.Pod) bool {
		return len(now.Spec.Containers[0].Args) == 2 && condition(now, corev1.PodReady) == corev1.ConditionTrue
	})
	if err := os.Remove(file); err != nil {
		t.Fatal(err)
	}
	k.gone(p.Name)
}

// TestE2EXStandalone: static pods from a directory and from an address, with no
// API anywhere.
func TestE2EXStandalone(t *testing.T) {
	t.Parallel()
	k := start(t, "standalone") // for its programs and its way of waiting
	features.Shows(k, 141, 184)
	space := netnstest.New(t)
	dir := t.TempDir()
	folder := filepath.Join(dir, "pods")
	if err := os.Mkdir(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	var text atomic.Value
	text.Store(simple("remote", "serve"))
	var ln net.Listener
	inside := func(fn func() error) {
		t.Helper()
		if err := netns.Do(space.Path, fn); err != nil {
			t.Fatal(err)
		}
	}
	inside(func() (err error) {
		ln, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	})
	web := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, text.Load()) })}
	go web.Serve(ln)
	defer web.Close()
	put(t, filepath.Join(folder, "local.yaml"), simple("local", "sleep"))
	put(t, filepath.Join(folder, "bad.yaml"), "nonsense: true\n")

	bin, err := binDir()
	if err != nil {
		t.Fatal(err)
	}
	data := filepath.Join(dir, "data")
	common := []string{"--data", data, "--cgroup-root", fmt.Sprintf("/standalone-%d", os.Getpid()), "--name", "solo", "--advertise", "127.0.0.1"}
	run := func() *exec.Cmd {
		cmd := exec.Command(filepath.Join(bin, "clusterd"), append([]string{"standalone", "--static-pods", folder,
			"--static-pods-url", "http://" + ln.Addr().String(), "--image", filepath.Join(bin, "hello.tar")}, common...)...)
		log, err := os.Create(filepath.Join(dir, "log"))
		if err != nil {
			t.Fatal(err)
		}
		defer log.Close()
		cmd.Stderr = log
		inside(cmd.Start)
		return cmd
	}
	client := &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return new(net.Dialer).DialContext(ctx, "unix", filepath.Join(data, "agent.sock"))
	}}}
	get := func(path string) (string, error) {
		res, err := client.Get("http://node" + path)
		if err != nil {
			return "", err
		}
		defer res.Body.Close()
		b, err := io.ReadAll(res.Body)
		return string(b), err
	}
	// starts are the containers by pod, with the time they started: equal means
	// untouched.
	ready := func(want ...string) map[string]string {
		t.Helper()
		starts := map[string]string{}
		k.eventually(fmt.Sprintf("the pods %q are ready", want), func(context.Context) error {
			body, err := get("/pods")
			if err != nil {
				return err
			}
			var pods corev1.PodList
			if err := json.Unmarshal([]byte(body), &pods); err != nil {
				return fmt.Errorf("%w: %s", err, body)
			}
			clear(starts)
			for _, p := range pods.Items {
				if condition(&p, corev1.PodReady) != corev1.ConditionTrue {
					return fmt.Errorf("%s is %+v", p.Name, p.Status)
				}
				starts[p.Name] = p.Status.ContainerStatuses[0].ContainerID
			}
			if got := slices.Sorted(maps.Keys(starts)); !slices.Equal(got, want) {
				return fmt.Errorf("there are %q", got)
			}
			return nil
		})
		return maps.Clone(starts)
	}
	cmd := run()
	end := func(sig os.Signal) {
		_ = cmd.Process.Signal(sig)
		_ = cmd.Wait()
	}
	defer func() {
		end(os.Interrupt)
		if t.Failed() {
			b, _ := os.ReadFile(filepath.Join(dir, "log"))
			t.Logf("clusterd standalone:\n%s", b)
		}
		reset := exec.Command(filepath.Join(bin, "clusterd"), append([]string{"reset"}, common...)...)
		inside(func() error {
			out, err := reset.CombinedOutput()
			if err != nil {
				return fmt.Errorf("reset: %w: %s", err, out)
			}
			return nil
		})
	}()
	first := ready("local-solo", "remote-solo")
	k.eventually("its log", func(context.Context) error {
		out, err := get("/containerLogs/default/remote-solo/main")
		if err == nil && !strings.Contains(out, "serving on :8080") {
			err = errors.New(out)
		}
		return err
	})
	told, err := os.ReadFile(filepath.Join(dir, "log"))
	if err != nil {
		t.Fatal(err)
	}
	k.has(string(told), `bad.yaml: apiVersion`, "FailedStaticPod")

	// Killed and started again, it finds its containers.
	end(os.Kill)
	cmd = run()
	if again := ready("local-solo", "remote-solo"); !maps.Equal(again, first) {
		t.Errorf("containers %v, before %v", again, first)
	}
	// Both sources are followed.
	put(t, filepath.Join(folder, "more.json"), `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"more"},"spec":{"terminationGracePeriodSeconds":1,"containers":[{"name":"main","image":"`+image+`","args":["sleep"]}]}}`)
	ready("local-solo", "more-solo", "remote-solo")
	text.Store(simple("other", "sleep"))
	ready("local-solo", "more-solo", "other-solo")
}
