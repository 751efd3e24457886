package pod_test

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	k8stesting "k8s.io/client-go/testing"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/static"
)

// staticSource is a source of static pods that the test fills.
type staticSource chan staticSet

type staticSet struct {
	pods     []*v1.Pod
	complete bool
}

func (s staticSource) Run(ctx context.Context, set func([]*v1.Pod, bool)) error {
	for {
		select {
		case now := <-s:
			set(now.pods, now.complete)
		case <-ctx.Done():
			return nil
		}
	}
}

// inStaticBubble is inBubble with a source of static pods.
func inStaticBubble(t *testing.T, fn func(n *node)) {
	synctest.Test(t, func(t *testing.T) {
		n := newNode(t, make(staticSource))
		defer func() { n.stop() }()
		synctest.Wait()
		fn(n)
	})
}

// staticPod is one as a static.Reader gives it; version is part of its UID.
func staticPod(name, version string) *v1.Pod {
	p := testPod(name+"-n1", v1.RestartPolicyAlways, ctr("app"))
	p.UID = types.UID(name + version)
	p.Annotations = map[string]string{static.SourceAnnotation: "file", static.HashAnnotation: string(p.UID)}
	return p
}

func (n *node) reads(complete bool, pods ...*v1.Pod) {
	n.statics <- staticSet{pods, complete}
	n.after(time.Second)
}

func (n *node) running() []string {
	var out []string
	for _, v := range n.pods.Views() {
		for _, c := range v.Containers {
			if c.Running {
				out = append(out, string(v.Pod.UID))
			}
		}
	}
	slices.Sort(out)
	return out
}

// TestStaticPod: it runs, its mirror shows it, changes and removal follow.
func TestStaticPod(t *testing.T) {
	inStaticBubble(t, func(n *node) {
		n.reads(true, staticPod("web", "1"))
		p := n.get("web-n1")
		if p == nil || p.Status.Phase != v1.PodRunning || condition(p, v1.PodReady) != v1.ConditionTrue {
			t.Fatalf("mirror: %+v", p)
		}
		if p.Annotations[v1.MirrorPodAnnotationKey] != "web1" || len(p.OwnerReferences) != 1 || p.OwnerReferences[0].Kind != "Node" {
			t.Errorf("mirror's metadata: %+v", p.ObjectMeta)
		}
		// The API's name for it finds it as well.
		if _, ok := n.pods.Find("default", "web-n1", p.UID); !ok {
			t.Error("not found by its mirror's UID")
		}
		// What happens to it is told.
		n.runtime.Exit("app", 1)
		n.after(time.Second)
		if r := n.get("web-n1").Status.ContainerStatuses[0].RestartCount; r != 1 {
			t.Errorf("mirror: %d restarts", r)
		}
		// Deleting the mirror brings another one and stops nothing.
		n.delete("web-n1", 30)
		n.after(time.Second)
		if p := n.get("web-n1"); p == nil || p.DeletionTimestamp != nil || p.Status.Phase != v1.PodRunning {
			t.Errorf("after a deletion: %+v", p)
		}
		if starts := strings.Count(strings.Join(n.runtime.Calls(), " "), "start app"); starts != 2 {
			t.Errorf("%d starts, want 2", starts)
		}
		// Another version replaces it.
		n.reads(true, staticPod("web", "2"))
		n.after(time.Second)
		if got := n.running(); !slices.Equal(got, []string{"web2"}) || n.get("web-n1").Annotations[v1.MirrorPodAnnotationKey] != "web2" {
			t.Errorf("running %v, mirror %+v", got, n.get("web-n1").ObjectMeta)
		}
		n.reads(true)
		n.after(time.Second)
		if got := n.running(); len(got) > 0 || n.get("web-n1") != nil {
			t.Errorf("running %v, mirror %+v", got, n.get("web-n1"))
		}
		if s, c := n.runtime.Counts(); s+c > 0 {
			t.Errorf("%d sandboxes and %d containers are left", s, c)
		}
	})
}

// TestStaticPodWithoutAPI: neither start nor end of a static pod waits for an
// API, and it is shown once there is one.
func TestStaticPodWithoutAPI(t *testing.T) {
	inStaticBubble(t, func(n *node) {
		var down atomic.Bool
		down.Store(true)
		n.api.PrependReactor("*", "pods", func(a k8stesting.Action) (bool, kruntime.Object, error) {
			if down.Load() {
				return refuse(a)
			}
			return false, nil, nil
		})
		n.reads(true, staticPod("web", "1"), staticPod("db", "1"))
		if got := n.running(); !slices.Equal(got, []string{"db1", "web1"}) {
			t.Fatalf("running %v", got)
		}
		n.reads(true, staticPod("web", "2"))
		n.after(time.Second)
		if got := n.running(); !slices.Equal(got, []string{"web2"}) {
			t.Fatalf("running %v", got)
		}
		down.Store(false)
		n.after(2 * time.Minute)
		if p := n.get("web-n1"); p == nil || p.Status.Phase != v1.PodRunning {
			t.Errorf("mirror: %+v", p)
		}
		if n.get("db-n1") != nil {
			t.Error("a mirror of a pod that is no more")
		}
	})
}

// TestStaticPodSurvives: a new agent takes it up, and kills nothing as long
// as a source has not been read.
func TestStaticPodSurvives(t *testing.T) {
	inStaticBubble(t, func(n *node) {
		n.reads(true, staticPod("web", "1"), staticPod("db", "1"))
		n.stop()
		n.start()
		n.after(time.Second)
		if s, _ := n.runtime.Counts(); s != 2 {
			t.Fatalf("%d sandboxes before the sources were read", s)
		}
		n.reads(false, staticPod("web", "1"))
		if got := n.running(); !slices.Equal(got, []string{"web1"}) {
			t.Errorf("running %v", got)
		}
		if s, _ := n.runtime.Counts(); s != 2 {
			t.Errorf("%d sandboxes before all sources were read", s)
		}
		n.reads(true, staticPod("web", "1")) // db is no more
		n.after(time.Minute)
		if s, _ := n.runtime.Counts(); s != 1 || n.get("db-n1") != nil {
			t.Errorf("%d sandboxes at the end, db's mirror %v", s, n.get("db-n1"))
		}
		if starts := strings.Count(strings.Join(n.runtime.Calls(), " "), "start app"); starts != 2 {
			t.Errorf("%d starts, want 2", starts)
		}
	})
}

// TestStaticPodStaysEnded: one that has ended for good is not run again by a new
// agent, be there an API or not, until its file changes or goes and comes back.
func TestStaticPodStaysEnded(t *testing.T) {
	inStaticBubble(t, func(n *node) {
		job := func(version string) *v1.Pod {
			p := staticPod("job", version)
			p.Spec.RestartPolicy = v1.RestartPolicyOnFailure
			return p
		}
		never := staticPod("never", "1")
		never.Spec.RestartPolicy = v1.RestartPolicyNever
		never.Spec.Containers[0].Name = "fails"
		starts := func(name string) int {
			return strings.Count(strings.Join(n.runtime.Calls(), "\n")+"\n", "start "+name+"\n")
		}
		ended := func(name string, phase v1.PodPhase, code int32) {
			t.Helper()
			p := n.get(name)
			if p == nil || p.Status.Phase != phase || len(p.Status.ContainerStatuses) != 1 {
				t.Fatalf("mirror: %+v", p)
			}
			if s := p.Status.ContainerStatuses[0].State.Terminated; s == nil || s.ExitCode != code {
				t.Errorf("state of %s: %+v", name, p.Status.ContainerStatuses[0].State)
			}
		}
		n.reads(true, job("1"), never)
		n.runtime.Exit("app", 1) // tried again
		n.after(time.Minute)
		n.runtime.Exit("app", 0)
		n.runtime.Exit("fails", 3)
		n.after(time.Minute)
		ended("job-n1", v1.PodSucceeded, 0)
		ended("never-n1", v1.PodFailed, 3)
		for range 2 {
			n.stop()
			n.delete("job-n1", 0) // the API need not remember it
			n.start()
			n.reads(true, job("1"), never)
			n.after(time.Minute)
			ended("job-n1", v1.PodSucceeded, 0)
			ended("never-n1", v1.PodFailed, 3)
		}
		if starts("app") != 2 || starts("fails") != 1 {
			t.Errorf("%d and %d starts, want 2 and 1: %q", starts("app"), starts("fails"), n.runtime.Calls())
		}
		if s, c := n.runtime.Counts(); s+c > 0 {
			t.Errorf("%d sandboxes and %d containers are left of what has ended", s, c)
		}
		n.reads(true, job("2"), never)
		n.after(time.Minute)
		if got := n.running(); !slices.Equal(got, []string{"job2"}) {
			t.Errorf("running %v", got)
		}
		n.reads(true, job("2")) // never goes
		n.after(time.Minute)
		n.reads(true, job("2"), never)
		n.after(time.Minute)
		if got := n.running(); !slices.Equal(got, []string{"job2", "never1"}) {
			t.Errorf("running %v", got)
		}
		n.stop()
		n.start()
		n.reads(true)
		n.after(time.Minute)
		if left, err := os.ReadDir(filepath.Join(n.dir, "ended")); err != nil || len(left) > 0 {
			t.Errorf("left of static pods that are no more: %v %v", left, err)
		}
	})
}

// TestStaticPodEndedBefore reads the record as it was first shipped; one that
// cannot be read does not keep a pod from running.
func TestStaticPodEndedBefore(t *testing.T) {
	inStaticBubble(t, func(n *node) {
		for name, content := range map[string]string{
			"done1.json": `{"version":1,"status":{"phase":"Failed","containerStatuses":[{"name":"app","state":{"terminated":{"exitCode":4,"reason":"Error"}},"lastState":{},"ready":false,"restartCount":0,"image":"app:1","imageID":""}]}}`,
			"torn1.json": `{"version":1,"sta`,
			"next1.json": `{"version":2,"status":{"phase":"Failed"}}`,
		} {
			if err := os.WriteFile(filepath.Join(n.dir, "ended", name), []byte(content), 0o600); err != nil {
				t.Fatal(err)
			}
		}
		n.reads(true, staticPod("done", "1"), staticPod("torn", "1"), staticPod("next", "1"))
		n.after(time.Second)
		if got := n.running(); !slices.Equal(got, []string{"next1", "torn1"}) {
			t.Errorf("running %v", got)
		}
		if st := n.get("done-n1").Status; st.Phase != v1.PodFailed || st.ContainerStatuses[0].State.Terminated.ExitCode != 4 {
			t.Errorf("mirror of what has ended: %+v", st)
		}
	})
}

// TestSameNameFromTwoSources: a pod of the API and a static one of the same
// name run side by side.
func TestSameNameFromTwoSources(t *testing.T) {
	inStaticBubble(t, func(n *node) {
		n.create(testPod("web-n1", v1.RestartPolicyAlways, ctr("app")))
		n.reads(true, staticPod("web", "1"))
		if got := n.running(); !slices.Equal(got, []string{"uid-web-n1", "web1"}) {
			t.Errorf("running %v", got)
		}
		if p := n.get("web-n1"); p.UID != "uid-web-n1" || p.Annotations[v1.MirrorPodAnnotationKey] != "" {
			t.Errorf("the API's pod: %+v", p.ObjectMeta)
		}
		// An annotation alone makes no static pod.
		p := testPod("posing", v1.RestartPolicyAlways, ctr("app"))
		p.Annotations = map[string]string{static.SourceAnnotation: "file"}
		n.create(p)
		n.after(time.Second)
		if n.get("posing").Status.Phase != v1.PodRunning {
			t.Errorf("posing: %+v", n.get("posing").Status)
		}
		// Nor does a mirror without a static pod stay.
		p = testPod("ghost", v1.RestartPolicyAlways, ctr("app"))
		p.Annotations = map[string]string{v1.MirrorPodAnnotationKey: "x"}
		n.create(p)
		n.after(time.Second)
		if _, err := n.api.CoreV1().Pods("default").Get(t.Context(), "ghost", metav1.GetOptions{}); err == nil {
			t.Error("a mirror of no static pod stays")
		}
		// What runs here is no mirror, whatever is written on it later.
		p = n.get("posing").DeepCopy()
		p.Annotations[v1.MirrorPodAnnotationKey] = "x"
		n.update(p)
		n.after(time.Second)
		n.get("posing")
		if err := n.api.CoreV1().Pods("default").Delete(t.Context(), "posing", metav1.DeleteOptions{GracePeriodSeconds: ptr.To(int64(0))}); err != nil {
			t.Fatal(err)
		}
		n.after(time.Minute)
		if got := n.running(); slices.Contains(got, string(p.UID)) {
			t.Errorf("%s was deleted and runs: %v", p.UID, got)
		}
	})
}
