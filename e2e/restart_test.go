package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	agentpod "github.com/clusterd/clusterd/agent/pod"
	"github.com/clusterd/clusterd/agent/podstate"
	"github.com/clusterd/clusterd/e2e/cluster"
	"github.com/clusterd/clusterd/features"
)

// TestE2ERestart kills clusterd under running pods and starts it again: the
// same processes go on, no log line is missing, and an exit code from the time
// without clusterd is reported.
func TestE2ERestart(t *testing.T) {
	features.Shows(t, 80, 192, 270)
	e := start(t)
	ns := e.namespace("restart")
	node := e.other("n1")
	on := func(p *corev1.Pod) *corev1.Pod { p.Spec.NodeName = node; return p }
	e.create(ns, on(pod("count", "count")))
	e.create(ns, on(pod("web")))
	// It ends while clusterd is down.
	short := on(pod("short", "exit", "7", "600"))
	short.Spec.RestartPolicy = corev1.RestartPolicyNever
	e.create(ns, short)
	for _, name := range []string{"count", "web", "short"} {
		e.podReady(ns, name)
	}
	// Before it says so, a signal would end it with the Go runtime's own code.
	e.eventually("the program listens for signals", func(context.Context) error {
		if log := e.ctl("-n", ns, "logs", "short"); !strings.Contains(log, "ending with 7") {
			return fmt.Errorf("it says %q", log)
		}
		return nil
	})
	before := e.containers(node)
	if len(before) < 6 { // three pauses, three programs
		t.Fatalf("processes: %v", before)
	}
	startedAt := e.get(ns, "count").Status.ContainerStatuses[0].State.Running.StartedAt

	if err := e.Kill(node); err != nil {
		t.Fatal(err)
	}
	if got := e.containers(node); !slices.Equal(got, before) {
		t.Fatalf("processes with clusterd gone: %v, before %v", got, before)
	}
	e.listedWithout(node, e.get(ns, "short"))
	e.end(node, "exit 7 600")
	if err := e.Start(t.Context(), node); err != nil {
		t.Fatal(err)
	}
	ended := e.podIs(ns, "short", "Failed", func(p *corev1.Pod) error {
		if p.Status.Phase != corev1.PodFailed {
			return errors.New("phase " + string(p.Status.Phase))
		}
		return nil
	})
	// Asked to end, the program exits with 7: only podmon got that from the kernel.
	if s := ended.Status.ContainerStatuses[0].State.Terminated; s == nil || s.ExitCode != 7 {
		t.Errorf("the exit code was lost: %s", brief(ended))
	}
	// Sooner or later the node is Ready and says the same of the others.
	for _, name := range []string{"count", "web"} {
		p := e.podReady(ns, name)
		if s := p.Status.ContainerStatuses[0]; s.RestartCount != 0 || s.State.Running == nil {
			t.Errorf("%s: %s", name, brief(p))
		}
	}
	if got := e.get(ns, "count").Status.ContainerStatuses[0].State.Running.StartedAt; !got.Equal(&startedAt) {
		t.Errorf("count started at %s, before %s", got, startedAt)
	}
	for _, pid := range e.containers(node) {
		if !slices.Contains(before, pid) {
			t.Errorf("process %d is new", pid)
		}
	}
	var lines []string
	e.eventually("the log goes on", func(context.Context) error {
		out, errs, code := e.run("clusterctl", "", "-n", ns, "logs", "count") // the node has just started
		if code != 0 {
			return errors.New(errs)
		}
		lines = strings.Split(strings.TrimSpace(out), "\n")
		if len(lines) < 200 {
			return fmt.Errorf("%d lines", len(lines))
		}
		return nil
	})
	for i, l := range lines {
		if l != strconv.Itoa(i) {
			t.Fatalf("line %d of the log is %q", i, l)
		}
	}
	e.eventually("the web server answers", func(context.Context) error {
		_, err := e.page("n1", e.get(ns, "web").Status.PodIP)
		return err
	})
	e.cases("volumes of a CSI driver", nil, (*env).csiVolumes)
}

// listedWithout asks for a pod's containers on a node where clusterd is down.
func (e *env) listedWithout(node string, p *corev1.Pod) {
	e.t.Helper()
	i := slices.IndexFunc(e.Nodes(), func(n cluster.Node) bool { return n.Name == node })
	out, err := e.Exec(e.t.Context(), node, e.Bin("clusterd"), "containers", "--data", e.Nodes()[i].Data, "--pod-uid", string(p.UID), "-o", "json").Output()
	if err != nil {
		e.t.Fatalf("clusterd containers: %v: %s", err, out)
	}
	var list []agentpod.RuntimeRecord
	if err := json.Unmarshal(out, &list); err != nil || len(list) != 2 {
		e.t.Fatalf("a sandbox and its container were wanted: %v: %s", err, out)
	}
	sandbox, c := list[0], list[1]
	if sandbox.Type != agentpod.TypeSandbox || !sandbox.Running || sandbox.Pod != p.Name || sandbox.PodUID != string(p.UID) {
		e.t.Errorf("sandbox: %+v", sandbox)
	}
	log, err := os.ReadFile(c.LogPath)
	if c.Type != string(podstate.KindApp) || !c.Running || c.SandboxID != sandbox.ID || c.Pid == 0 || err != nil || !strings.Contains(string(log), "ending with 7") {
		e.t.Errorf("container: %+v; its log: %q, %v", c, log, err)
	}
}

// TestE2EAllRestart kills clusterd on every node at once: after the restart
// every object is there and nothing was started twice.
func TestE2EAllRestart(t *testing.T) {
	features.Shows(t, 81)
	e := start(t)
	ns := e.namespace("all")
	e.createDeployment(ns, deployment("web", 6))
	before := map[string]string{}
	for _, p := range e.podsReady(ns, "app=web", 6) {
		before[p.Name] = p.Spec.NodeName + " " + p.Status.PodIP
	}
	for _, n := range e.Nodes() {
		if err := e.Kill(n.Name); err != nil {
			t.Fatal(err)
		}
	}
	began := time.Now()
	for _, n := range e.Nodes() {
		if err := e.Start(t.Context(), n.Name); err != nil {
			t.Fatal(err)
		}
	}
	e.backSince(began, "n1", "n2", "n3")
	for _, p := range e.podsReady(ns, "app=web", 6) {
		if got := p.Spec.NodeName + " " + p.Status.PodIP; before[p.Name] != got || p.Status.ContainerStatuses[0].RestartCount != 0 {
			t.Errorf("%s is at %q, was at %q: %s", p.Name, got, before[p.Name], brief(&p))
		}
	}
}

// containers are the pids of a node's pauses and containers, sorted.
func (e *env) containers(node string) []int {
	e.t.Helper()
	var root string
	for _, n := range e.Nodes() {
		if n.Name == node {
			root = n.CgroupRoot
		}
	}
	pids, err := e.Processes(node)
	if err != nil {
		e.t.Fatal(err)
	}
	pids = slices.DeleteFunc(pids, func(pid int) bool {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
		return !strings.Contains(string(b), ":"+root+"/")
	})
	slices.Sort(pids)
	return pids
}

// end tells the node's process with these arguments to end.
func (e *env) end(node, args string) {
	e.t.Helper()
	for _, pid := range e.containers(node) {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if strings.Contains(strings.ReplaceAll(string(b), "\x00", " "), args) {
			p, err := os.FindProcess(pid)
			if err == nil {
				err = p.Signal(os.Interrupt)
			}
			if err != nil {
				e.t.Fatal(err)
			}
			return
		}
	}
	e.t.Fatalf("no process %q on %s", args, node)
}
