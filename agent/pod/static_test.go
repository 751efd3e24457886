package pod_test

import (
	"context"
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
	})
}
