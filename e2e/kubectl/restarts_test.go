package kubectl

import (
	"context"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health/grpc_health_v1"
	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/features"
)

// ending is a pod whose containers end, each with a code or not at all, and what
// becomes of it.
type ending struct {
	row    int // of FEATURES
	policy corev1.RestartPolicy
	exits  []int // stays: it does not end
	phase  corev1.PodPhase
	again  []bool // whether the container is started again
}

const stays = -1

// endings is FEATURES area N.
var endings = []ending{
	{221, corev1.RestartPolicyAlways, []int{0}, corev1.PodRunning, []bool{true}},
	{222, corev1.RestartPolicyOnFailure, []int{0}, corev1.PodSucceeded, []bool{false}},
	{223, corev1.RestartPolicyNever, []int{0}, corev1.PodSucceeded, []bool{false}},
	{224, corev1.RestartPolicyAlways, []int{1}, corev1.PodRunning, []bool{true}},
	{225, corev1.RestartPolicyOnFailure, []int{1}, corev1.PodRunning, []bool{true}},
	{226, corev1.RestartPolicyNever, []int{1}, corev1.PodFailed, []bool{false}},
	{227, corev1.RestartPolicyAlways, []int{1, stays}, corev1.PodRunning, []bool{true, false}},
	{228, corev1.RestartPolicyOnFailure, []int{1, stays}, corev1.PodRunning, []bool{true, false}},
	{229, corev1.RestartPolicyNever, []int{1, stays}, corev1.PodRunning, []bool{false, false}},
	{230, corev1.RestartPolicyAlways, []int{0, 1}, corev1.PodRunning, []bool{true, true}},
	{231, corev1.RestartPolicyOnFailure, []int{0, 1}, corev1.PodRunning, []bool{false, true}},
	{232, corev1.RestartPolicyNever, []int{0, 1}, corev1.PodFailed, []bool{false, false}},
}

// name is the pod's.
func (e ending) name() string { return fmt.Sprintf("row-%d", e.row) }

// pod is the pod as a manifest.
func (e ending) pod() string {
	var b strings.Builder
	fmt.Fprintf(&b, "apiVersion: v1\nkind: Pod\nmetadata: {name: %s}\nspec:\n  terminationGracePeriodSeconds: 1\n  restartPolicy: %s\n  containers:\n", e.name(), e.policy)
	for i, code := range e.exits {
		args := "sleep"
		if code != stays {
			args = fmt.Sprintf("exit, %q", strconv.Itoa(code))
		}
		fmt.Fprintf(&b, "  - {name: c%d, image: %q, args: [%s]}\n", i, image, args)
	}
	return b.String()
}

// came reports whether all that is to happen has: each container that ends has
// ended, and those that are started again were.
func (e ending) came(p *corev1.Pod) bool {
	if len(p.Status.ContainerStatuses) != len(e.exits) || p.Status.Phase != e.phase {
		return false
	}
	for i, code := range e.exits {
		s := p.Status.ContainerStatuses[i]
		switch {
		case code == stays:
			if s.State.Running == nil {
				return false
			}
		case e.again[i]:
			if s.RestartCount == 0 || s.LastTerminationState.Terminated == nil || s.LastTerminationState.Terminated.ExitCode != int32(code) {
				return false
			}
		case s.State.Terminated == nil || s.State.Terminated.ExitCode != int32(code):
			return false
		}
	}
	return true
}

// TestE2EXEndings: what a restart policy makes of containers that end.
func TestE2EXEndings(t *testing.T) {
	t.Parallel()
	k := start(t, "endings")
	manifests := make([]string, len(endings))
	for i, e := range endings {
		manifests[i] = e.pod()
	}
	k.applyAll(manifests...)
	for _, e := range endings {
		k.podIs(e.name(), fmt.Sprintf("is %s, started again: %v", e.phase, e.again), e.came)
	}
	// By now each that was to be started again was; the others were not.
	for _, e := range endings {
		k.sub(fmt.Sprintf("%s %v", e.policy, e.exits), func(k *kit) {
			features.Shows(k, e.row)
			p := k.pod(e.name())
			if p.Status.Phase != e.phase {
				k.Errorf("phase %s", p.Status.Phase)
			}
			for i, s := range p.Status.ContainerStatuses {
				if (s.RestartCount > 0) != e.again[i] {
					k.Errorf("%s: %d restarts", s.Name, s.RestartCount)
				}
			}
		})
	}
	k.sub("each end is an event", func(k *kit) {
		features.Shows(k, 220)
		k.apply(with("oom", `alloc, "96"`, "resources: {limits: {memory: 32Mi}}", "restartPolicy: Never"))
		k.event("row-226", "Exited", "Container c0 exited with code 1")
		k.event("row-223", "Exited", "Container c0 exited with code 0")
		k.event("row-224", "BackOff", "Back-off restarting failed container c0")
		k.event("oom", "OOMKilling", "Container main was killed")
	})
	k.sub("the acts in their order, and no runtime's socket", func(k *kit) {
		features.Shows(k, 255)
		var acts []string
		list := k.events("row-223")
		slices.SortStableFunc(list, func(a, b corev1.Event) int { return resourceVersion(k, a) - resourceVersion(k, b) })
		for _, e := range list {
			if e.Reason != "Scheduled" {
				acts = append(acts, e.Reason)
			}
		}
		if got := strings.Join(acts, " "); got != "Pulled Created Started Exited" {
			k.Errorf("events: %s", got)
		}
		for _, path := range k.sockets() {
			if k.answersCRI(path) {
				k.Errorf("%s answers as a container runtime", path)
			}
		}
	})
	k.ok("delete", "pod", "--all", "--wait=false")
}

// sockets are those in the node's directory, beside its pods' own.
func (k *kit) sockets() (found []string) {
	k.Helper()
	err := filepath.WalkDir(k.c.Nodes()[0].Data, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return nil // it went in the meantime
		case d.IsDir() && (d.Name() == "pods" || d.Name() == "images"):
			return fs.SkipDir
		case d.Type() == fs.ModeSocket:
			found = append(found, path)
		}
		return nil
	})
	if err != nil || len(found) == 0 {
		k.Fatalf("sockets of the node: %v %v", found, err)
	}
	return found
}

// answersCRI asks a socket for its version as crictl does, with an empty message.
func (k *kit) answersCRI(path string) bool {
	k.Helper()
	conn, err := grpc.NewClient("unix://"+path, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		k.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	ctx, cancel := context.WithTimeout(k.Context(), 2*time.Second)
	defer cancel()
	return conn.Invoke(ctx, "/runtime.v1.RuntimeService/Version", &grpc_health_v1.HealthCheckRequest{}, &grpc_health_v1.HealthCheckResponse{}) == nil
}

// resourceVersion orders events as they were written.
func resourceVersion(k *kit, e corev1.Event) int {
	n, err := strconv.Atoi(e.ResourceVersion)
	if err != nil {
		k.Fatal(err)
	}
	return n
}

// lists is how often the agent has asked podmon for all it holds.
func (k *kit) lists() int {
	k.Helper()
	for line := range strings.Lines(k.ok("get", "--raw", "/api/v1/nodes/"+node+"/proxy/metrics")) {
		if v, ok := strings.CutPrefix(line, `kubelet_runtime_operations_total{operation_type="list"} `); ok {
			n, err := strconv.ParseFloat(strings.TrimSpace(v), 64)
			if err != nil {
				k.Fatal(err)
			}
			return int(n)
		}
	}
	k.Fatal("the agent counts no lists")
	return 0
}

// TestE2EXEvented is not parallel: other pods' starts and the minute's look at
// everything would be counted too.
func TestE2EXEvented(t *testing.T) {
	k := start(t, "evented")
	features.Shows(k, 177, 178)
	quiet := false
	k.best("an end by an event alone is seen", time.Second, func(i int) time.Duration {
		name := fmt.Sprintf("evented-%d", i) // each has its first restart, without a back-off
		k.apply(simple(name, "sleep"))
		pid := k.process(string(k.ready(name).UID), "sleep")
		before, began := k.lists(), time.Now()
		k.kill(pid)
		k.podIs(name, "is seen to have ended", func(p *corev1.Pod) bool {
			s := p.Status.ContainerStatuses[0]
			return s.State.Running == nil || s.RestartCount > 0
		})
		took := time.Since(began)
		alone := k.lists() == before
		quiet = quiet || alone
		k.podIs(name, "was started again", restarts(1))
		k.ok("delete", "pod", name)
		if !alone {
			return time.Hour
		}
		return took
	})
	if !quiet {
		k.Error("each end was seen with a list of all containers, none by an event alone")
	}
}
