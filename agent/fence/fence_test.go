package fence_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/record"

	"github.com/clusterd/clusterd/agent/agenttest"
	"github.com/clusterd/clusterd/agent/fence"
	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/apis/names"
)

func volumeOn(hosts ...string) *v1.PersistentVolume {
	v := &v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "v"}}
	var terms []v1.NodeSelectorTerm
	for _, h := range hosts {
		terms = append(terms, v1.NodeSelectorTerm{MatchExpressions: []v1.NodeSelectorRequirement{{Key: v1.LabelHostname, Operator: v1.NodeSelectorOpIn, Values: strings.Split(h, ",")}}})
	}
	if terms != nil {
		v.Spec.NodeAffinity = &v1.VolumeNodeAffinity{Required: &v1.NodeSelector{NodeSelectorTerms: terms}}
	}
	return v
}

func TestNodeBound(t *testing.T) {
	local := volumeOn()
	local.Spec.Local = &v1.LocalVolumeSource{Path: "/x"}
	zone := volumeOn("z")
	zone.Spec.NodeAffinity.Required.NodeSelectorTerms[0].MatchExpressions[0].Key = v1.LabelTopologyZone
	field := volumeOn("n1")
	term := &field.Spec.NodeAffinity.Required.NodeSelectorTerms[0]
	term.MatchFields, term.MatchExpressions = term.MatchExpressions, nil
	term.MatchFields[0].Key = "metadata.name"
	for name, c := range map[string]struct {
		v    *v1.PersistentVolume
		want bool
	}{
		"anywhere": {volumeOn(), false}, "local": {local, true}, "one host": {volumeOn("n1"), true}, "one host, twice": {volumeOn("n1", "n1"), true},
		"two hosts": {volumeOn("n1", "n2"), false}, "one of two hosts": {volumeOn("n1,n2"), false}, "a zone": {zone, false}, "one node by name": {field, true},
	} {
		if got := fence.NodeBound(c.v); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}

func pod(uid string, change ...func(*v1.Pod)) *v1.Pod {
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: uid, Namespace: "d", UID: types.UID(uid)}, Spec: v1.PodSpec{NodeName: "n1"}, Status: v1.PodStatus{Phase: v1.PodRunning}}
	for _, f := range change {
		f(p)
	}
	return p
}

func asks(value string) func(*v1.Pod) {
	return func(p *v1.Pod) { p.Annotations = map[string]string{names.SelfFencing: value} }
}

func claims(p *v1.Pod) {
	p.Spec.Volumes = append(p.Spec.Volumes, v1.Volume{Name: "a", VolumeSource: v1.VolumeSource{PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: "c"}}})
}

func promised(p *v1.Pod) {
	p.Status.Conditions = []v1.PodCondition{{Type: names.SelfFencingCondition, Status: v1.ConditionTrue}}
}

type kit struct {
	*fence.Fence
	runtime *agenttest.Runtime
	api     *fake.Clientset
	events  *record.FakeRecorder
	volume  *v1.PersistentVolume
	now     int64
	failed  map[types.UID]bool
}

func newKit(change func(*fence.Config), pods ...*v1.Pod) *kit {
	k := &kit{runtime: agenttest.NewRuntime(), api: fake.NewClientset(), events: record.NewFakeRecorder(9), volume: volumeOn(), now: 1e9, failed: map[types.UID]bool{}}
	for _, p := range pods {
		_ = k.api.Tracker().Add(p)
	}
	cfg := fence.Config{
		NodeName: "n1", Client: k.api, Podmon: k.runtime, RenewDeadline: 30 * time.Second, Recorder: k.events, Now: func() int64 { return k.now },
		Volume: func(context.Context, *v1.Pod, string) (*v1.PersistentVolume, error) {
			if k.volume == nil {
				return nil, errors.New("not bound")
			}
			return k.volume, nil
		},
		Dirs: func(uid types.UID) []string { return []string{"/pods/" + string(uid)} },
		Fail: func(uid types.UID) { k.failed[uid] = true },
	}
	if change != nil {
		change(&cfg)
	}
	k.Fence = fence.New(cfg)
	return k
}

func TestGuard(t *testing.T) {
	every := func(c *fence.Config) { c.Claims = true }
	for name, c := range map[string]struct {
		change func(*fence.Config)
		pod    *v1.Pod
		volume *v1.PersistentVolume
		want   bool
		fails  bool
	}{
		"does not ask":                    {pod: pod("u", claims), volume: volumeOn()},
		"asks":                            {pod: pod("u", claims, asks("true")), volume: volumeOn(), want: true},
		"asks, without claims":            {pod: pod("u", asks("true")), want: true},
		"asks, and is bound to the node":  {pod: pod("u", claims, asks("true")), volume: volumeOn("n1")},
		"asks, its claim is not bound":    {pod: pod("u", claims, asks("true")), fails: true},
		"any other value":                 {pod: pod("u", claims, asks("yes")), volume: volumeOn()},
		"every pod with claims":           {change: every, pod: pod("u", claims), volume: volumeOn(), want: true},
		"no pod without":                  {change: every, pod: pod("u")},
		"it does not want to":             {change: every, pod: pod("u", claims, asks("false")), volume: volumeOn()},
		"it was promised by a former one": {pod: pod("u", claims, promised), volume: volumeOn(), want: true},
	} {
		t.Run(name, func(t *testing.T) {
			k := newKit(c.change)
			k.volume = c.volume
			k.Renewed(t.Context(), k.now)
			got, err := k.Guard(t.Context(), c.pod)
			if got != c.want || (err != nil) != c.fails {
				t.Errorf("%v, %v", got, err)
			}
			st, err := k.runtime.Fence(t.Context(), api.Fence{})
			if err != nil || (len(st.Pods) == 1) != c.want {
				t.Errorf("podmon's list: %+v, %v", st, err)
			}
			if told := len(k.events.Events) > 0; told != (name == "asks, and is bound to the node") {
				t.Errorf("events: %v", told)
			}
		})
	}
}

// No pod begins while the node has no Lease; one that was fenced never again.
func TestGuardWithoutLease(t *testing.T) {
	k := newKit(nil)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := k.Guard(ctx, pod("u", asks("true"))); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("before the first renewal: %v", err)
	}
	if k.Held(t.Context()) {
		t.Error("it has a Lease that nobody has renewed")
	}
	k.Renewed(t.Context(), k.now)
	if _, err := k.Guard(t.Context(), pod("u", asks("true"))); err != nil || !k.Held(t.Context()) {
		t.Errorf("after it: %v", err)
	}
	if st, _ := k.runtime.Fence(t.Context(), api.Fence{}); st.Deadline != k.now+int64(30*time.Second) {
		t.Errorf("podmon's deadline is %d", st.Deadline)
	}
	k.now += int64(30 * time.Second)
	if k.Held(t.Context()) {
		t.Error("it has a Lease that has run out")
	}
	if err := k.End(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !k.failed["u"] {
		t.Error("nobody was told that the pod has ended")
	}
	k.Renewed(t.Context(), k.now)
	if _, err := k.Guard(t.Context(), pod("u", asks("true"))); err == nil {
		t.Error("a fenced pod begins again")
	}
	if err := k.Drop(t.Context(), "u"); err != nil {
		t.Fatal(err)
	}
	if _, err := k.Guard(t.Context(), pod("w", asks("true"))); err != nil {
		t.Error(err)
	}
	if err := k.Sweep(t.Context(), func(types.UID) bool { return false }); err != nil {
		t.Fatal(err)
	}
	if st, _ := k.runtime.Fence(t.Context(), api.Fence{}); len(st.Pods) != 0 {
		t.Errorf("podmon's list: %+v", st)
	}
}

// What may have been replaced has failed, whatever this node knows of it.
func TestSettle(t *testing.T) {
	done := pod("done", promised)
	done.Status.Phase = v1.PodSucceeded
	k := newKit(nil, pod("p", promised), pod("q"), done)
	if err := k.Settle(t.Context()); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]v1.PodPhase{"p": v1.PodFailed, "q": v1.PodRunning, "done": v1.PodSucceeded} {
		p, err := k.api.CoreV1().Pods("d").Get(t.Context(), name, metav1.GetOptions{})
		if err != nil || p.Status.Phase != want || (p.Status.Reason == fence.Reason) != (name == "p") {
			t.Errorf("%s: %+v, %v", name, p.Status, err)
		}
	}
	if !k.failed["p"] || len(k.failed) != 1 || len(k.events.Events) != 1 {
		t.Errorf("failed %v, events %d", k.failed, len(k.events.Events))
	}
}

// old is a podmon that knows nothing of fencing.
type old struct{}

func (old) Fence(context.Context, api.Fence) (api.FenceStatus, error) {
	return api.FenceStatus{}, &api.Error{Code: api.CodeInvalid, Message: `unknown op "fence": this podmon speaks version 1`}
}

func TestOldPodmon(t *testing.T) {
	k := newKit(func(c *fence.Config) { c.Podmon = old{} })
	if k.Promises(t.Context()) || k.Held(t.Context()) {
		t.Error("a promise that nobody keeps")
	}
	if err := errors.Join(k.End(t.Context()), k.Drop(t.Context(), "u"), k.Settle(t.Context())); err != nil {
		t.Error(err)
	}
}
