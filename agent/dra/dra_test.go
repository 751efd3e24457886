package dra

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
	drabeta "k8s.io/kubelet/pkg/apis/dra/v1beta1"
	"k8s.io/utils/ptr"
)

func TestPreparedOnceAndTakenBack(t *testing.T) {
	for _, service := range []string{dra.DRAPluginService, drabeta.DRAPluginService} {
		t.Run(service, func(t *testing.T) {
			b := setup(t, claim("a", []string{gpus}, "p1"), claim("b", []string{gpus, nics}, "p1"))
			g, n := b.driver(gpus, service), b.driver(nics, service)
			p := pod("p1", "a", "b")
			if b.m.Held(p.UID) {
				t.Error("something is held before anything was prepared")
			}
			for range 2 {
				if err := b.m.Prepare(t.Context(), p); err != nil {
					t.Fatal(err)
				}
			}
			if diff := cmp.Diff([]call{{"prepare", []string{"a", "b"}}}, g.got("prepare"), cmp.AllowUnexported(call{})); diff != "" {
				t.Error("claims of one driver are one call:", diff)
			}
			if diff := cmp.Diff([]call{{"prepare", []string{"b"}}}, n.got("prepare"), cmp.AllowUnexported(call{})); diff != "" {
				t.Error(diff)
			}
			ids, err := b.m.CDI(p, &p.Spec.Containers[0])
			want := []string{gpus + "/dev=a", gpus + "/dev=side-a", gpus + "/dev=b", gpus + "/dev=side-b", nics + "/dev=b", nics + "/dev=side-b"}
			if diff := cmp.Diff(want, ids); diff != "" || err != nil {
				t.Error(err, diff)
			}
			if !b.m.Held(p.UID) {
				t.Error("nothing is held")
			}
			for range 2 {
				if err := b.m.Unprepare(t.Context(), p.UID); err != nil {
					t.Fatal(err)
				}
			}
			if len(g.got("unprepare")) != 1 || len(n.got("unprepare")) != 1 || g.holds()+n.holds() != 0 || b.m.Held(p.UID) {
				t.Errorf("taken back by %v and %v", g.got("unprepare"), n.got("unprepare"))
			}
			if left, err := os.ReadDir(b.dir); err != nil || len(left) > 0 {
				t.Errorf("records that stay: %v, %v", left, err)
			}
			if _, err := b.m.CDI(p, &p.Spec.Containers[0]); err == nil {
				t.Error("devices that were taken back are given")
			}
		})
	}
}

func TestRequestsOfContainers(t *testing.T) {
	b := setup(t, claim("a", []string{gpus}, "p1"))
	b.driver(gpus)
	p := pod("p1", "a")
	if err := b.m.Prepare(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		uses []v1.ResourceClaim
		want []string
	}{
		"all":                 {[]v1.ResourceClaim{{Name: "a"}}, []string{gpus + "/dev=a", gpus + "/dev=side-a"}},
		"a request":           {[]v1.ResourceClaim{{Name: "a", Request: "main"}}, []string{gpus + "/dev=a"}},
		"one chosen of a few": {[]v1.ResourceClaim{{Name: "a", Request: "side"}}, []string{gpus + "/dev=side-a"}},
		"twice":               {[]v1.ResourceClaim{{Name: "a", Request: "side"}, {Name: "a"}}, []string{gpus + "/dev=side-a", gpus + "/dev=a"}},
		"none":                {nil, nil},
	} {
		got, err := b.m.CDI(p, &v1.Container{Resources: v1.ResourceRequirements{Claims: c.uses}})
		if diff := cmp.Diff(c.want, got); diff != "" || err != nil {
			t.Error(name, err, diff)
		}
	}
	if _, err := b.m.CDI(p, &v1.Container{Resources: v1.ResourceRequirements{Claims: []v1.ResourceClaim{{Name: "z"}}}}); err == nil {
		t.Error("a claim that the pod has not")
	}
	all, err := b.m.Resources(p, &p.Spec.Containers[0])
	if err != nil || len(all) != 2 || all[0].ClaimNamespace != "d" || all[0].ClaimName != "a" || all[0].Driver != gpus || all[0].Pool != "pool" || all[0].Device != "dev-a" {
		t.Errorf("%v, %+v", err, all)
	}
}

func TestClaimSharedByPods(t *testing.T) {
	b := setup(t, claim("a", []string{gpus}, "p1", "p2"))
	g := b.driver(gpus)
	for _, name := range []string{"p1", "p2"} {
		if err := b.m.Prepare(t.Context(), pod(name, "a")); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.m.Unprepare(t.Context(), "p1"); err != nil {
		t.Fatal(err)
	}
	if len(g.got("prepare")) != 1 || len(g.got("unprepare")) != 0 || b.m.Held("p1") || !b.m.Held("p2") {
		t.Errorf("after the first: %v, %v", g.got("prepare"), g.got("unprepare"))
	}
	if err := b.m.Unprepare(t.Context(), "p2"); err != nil || len(g.got("unprepare")) != 1 || b.m.Held("p2") {
		t.Errorf("after the last: %v, %v", err, g.got("unprepare"))
	}
}

func TestDriverThatFailsForOneClaim(t *testing.T) {
	b := setup(t, claim("a", []string{gpus}, "p1"), claim("b", []string{gpus}, "p1"))
	g := b.driver(gpus)
	g.fail("b", "no such card")
	p := pod("p1", "a", "b")
	err := b.m.Prepare(t.Context(), p)
	if err == nil || !strings.Contains(err.Error(), "ResourceClaim b: driver "+gpus) || !strings.Contains(err.Error(), "no such card") {
		t.Errorf("claim, driver and its words are missing: %v", err)
	}
	g.fail("b", "")
	if err := b.m.Prepare(t.Context(), p); err != nil {
		t.Fatal(err)
	}
	if calls := g.got("prepare"); len(calls) != 2 || !slices.Equal(calls[1].claims, []string{"b"}) {
		t.Errorf("what was prepared is asked for again: %v", calls)
	}
	g.fail("a", "busy")
	err = b.m.Unprepare(t.Context(), p.UID)
	if err == nil || !strings.Contains(err.Error(), "ResourceClaim a") || !b.m.Held(p.UID) {
		t.Errorf("%v, held: %t", err, b.m.Held(p.UID))
	}
	g.fail("a", "")
	if err := b.m.Unprepare(t.Context(), p.UID); err != nil || b.m.Held(p.UID) {
		t.Errorf("%v, held: %t", err, b.m.Held(p.UID))
	}
	if calls := g.got("unprepare"); len(calls) != 2 || !slices.Equal(calls[1].claims, []string{"a"}) {
		t.Errorf("what was taken back is asked for again: %v", calls)
	}
}

func TestClaimsThatAPodMayNotUse(t *testing.T) {
	made := claim("made", []string{gpus}, "p1")
	other := claim("other", []string{gpus}, "p1")
	other.Status.Allocation.NodeSelector.NodeSelectorTerms[0].MatchFields[0].Values[0] = "n2"
	unallocated := claim("unallocated", nil)
	unallocated.Status.Allocation = nil
	b := setup(t, made, other, unallocated, claim("reserved", []string{gpus}, "p2"), claim("strange", []string{"nobody.example.com"}, "p1"))
	g := b.driver(gpus)
	template := pod("p1")
	template.Spec.ResourceClaims = []v1.PodResourceClaim{{Name: "gpu", ResourceClaimTemplateName: ptr.To("t")}}
	owned := template.DeepCopy()
	owned.Status.ResourceClaimStatuses = []v1.PodResourceClaimStatus{{Name: "gpu", ResourceClaimName: ptr.To("made")}}
	for want, p := range map[string]*v1.Pod{
		"not made for this pod":                           owned,
		`ResourceClaimTemplate "t"`:                       template,
		"ResourceClaim none":                              pod("p1", "none"),
		"ResourceClaim unallocated is not allocated":      pod("p1", "unallocated"),
		"ResourceClaim reserved is not reserved":          pod("p1", "reserved"),
		"does not match node n1":                          pod("p1", "other"),
		"driver nobody.example.com is not registered":     pod("p1", "strange"),
		"run its node plugin here (usually a DaemonSet);": pod("p1", "strange"),
	} {
		if err := b.m.Prepare(t.Context(), p); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v, want %q in it", err, want)
		}
	}
	if len(g.got("prepare")) > 0 || b.m.Held("p1") {
		t.Errorf("something is held: %v", g.got("prepare"))
	}
	none := template.DeepCopy()
	none.Status.ResourceClaimStatuses = []v1.PodResourceClaimStatus{{Name: "gpu"}}
	if err := b.m.Prepare(t.Context(), none); err != nil {
		t.Errorf("a claim that was not made is not needed: %v", err)
	}
}

// A claim is given up in the API while this node still has its device prepared.
func TestDeviceOfAnotherClaim(t *testing.T) {
	second := claim("b", []string{gpus}, "p2")
	second.Status.Allocation.Devices.Results[0].Device = "dev-a"
	admin := claim("c", []string{gpus}, "p3")
	admin.Status.Allocation.Devices.Results[0].Device, admin.Status.Allocation.Devices.Results[0].AdminAccess = "dev-a", ptr.To(true)
	b := setup(t, claim("a", []string{gpus}, "p1"), second, admin)
	b.driver(gpus)
	if err := b.m.Prepare(t.Context(), pod("p1", "a")); err != nil {
		t.Fatal(err)
	}
	if err := b.m.Prepare(t.Context(), pod("p2", "b")); err == nil || !strings.Contains(err.Error(), "pool/dev-a") || !strings.Contains(err.Error(), "ResourceClaim d/a") || b.m.Held("p2") {
		t.Errorf("a device of two claims: %v", err)
	}
	if err := b.m.Prepare(t.Context(), pod("p3", "c")); err != nil {
		t.Errorf("an administrator's look: %v", err)
	}
	if err := b.m.Unprepare(t.Context(), "p1"); err != nil {
		t.Fatal(err)
	}
	if err := b.m.Prepare(t.Context(), pod("p2", "b")); err != nil {
		t.Error(err)
	}
}

// The agent is killed while a driver prepares: the next one knows of it.
func TestAgentKilledWhileADriverPrepares(t *testing.T) {
	b := setup(t, claim("a", []string{gpus}, "p1"), claim("b", []string{gpus}, "p2"))
	g := b.driver(gpus)
	if err := b.m.Prepare(t.Context(), pod("p2", "b")); err != nil {
		t.Fatal(err)
	}
	g.hangIn("prepare")
	ctx, kill := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- b.m.Prepare(ctx, pod("p1", "a")) }()
	b.until("the driver is asked", func() bool { return len(g.got("prepare")) == 2 })
	kill()
	if err := <-done; err == nil {
		t.Error("it was prepared")
	}
	b.stop()
	g.resume("prepare")
	b.until("the driver has ended its call", func() bool { return g.busy() == 0 })
	// What a write has left that a power cut ended.
	if err := os.WriteFile(filepath.Join(b.dir, ".uid-a.json.123"), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	b.run()
	b.answers(gpus)
	if pods, err := b.m.Pods(); err != nil || !slices.Equal(pods, []types.UID{"p1", "p2"}) {
		t.Errorf("held for %v, %v", pods, err)
	}
	// What is prepared needs no API.
	b.client.PrependReactor("get", "resourceclaims", refuse)
	if err := b.m.Prepare(t.Context(), pod("p2", "b")); err != nil || len(g.got("prepare")) != 2 {
		t.Errorf("%v, calls %v", err, g.got("prepare"))
	}
	if ids, err := b.m.CDI(pod("p2", "b"), &pod("p2", "b").Spec.Containers[0]); err != nil || len(ids) != 2 {
		t.Errorf("%v, %v", ids, err)
	}
	if err := b.m.Prepare(t.Context(), pod("p1", "a")); err == nil {
		t.Error("what was not prepared needs an API")
	}
	for _, uid := range []types.UID{"p1", "p2"} {
		if err := b.m.Unprepare(t.Context(), uid); err != nil {
			t.Error(err)
		}
	}
	if g.holds() != 0 || len(g.got("unprepare")) != 2 {
		t.Errorf("the driver holds %d claims after %v", g.holds(), g.got("unprepare"))
	}
}

// A driver that hangs holds up its own pods, and those for the deadline only.
func TestDriverThatHangs(t *testing.T) {
	b := setup(t, claim("a", []string{gpus}, "p1"), claim("b", []string{nics}, "p2"), claim("c", []string{gpus, nics}, "p3"))
	g, n := b.driver(gpus), b.driver(nics)
	g.hangIn("prepare")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	first, both := make(chan error, 1), make(chan error, 1)
	go func() { first <- b.m.Prepare(ctx, pod("p1", "a")) }()
	go func() { both <- b.m.Prepare(ctx, pod("p3", "c")) }()
	b.until("the driver is asked twice", func() bool { return len(g.got("prepare")) == 2 })
	if err := b.m.Prepare(t.Context(), pod("p2", "b")); err != nil {
		t.Error(err)
	}
	b.until("the other driver of the claim has done its part", func() bool { return n.holds() == 2 })
	g.resume("prepare")
	if err := <-first; err != nil {
		t.Error(err)
	}
	if err := <-both; err != nil {
		t.Error(err)
	}
	g.hangIn("unprepare")
	// A busy machine may need longer than the first limits to come to the call.
	for limit := 50 * time.Millisecond; len(g.got("unprepare")) == 0; limit *= 2 {
		short, stop := context.WithTimeout(t.Context(), limit)
		err := b.m.Unprepare(short, "p1")
		stop()
		if limit > time.Minute {
			t.Fatalf("within %s the driver was not asked: %v", limit, err)
		}
		if err == nil || !b.m.Held("p1") || len(g.got("unprepare")) > 0 && !strings.Contains(err.Error(), gpus) {
			t.Errorf("%v, held: %t", err, b.m.Held("p1"))
		}
	}
	if err := b.m.Unprepare(t.Context(), "p2"); err != nil {
		t.Error(err)
	}
	g.resume("unprepare")
	for _, uid := range []types.UID{"p1", "p3"} {
		if err := b.m.Unprepare(t.Context(), uid); err != nil {
			t.Error(err)
		}
	}
}

func TestDriverThatIsKilledAndComesBack(t *testing.T) {
	b := setup(t, claim("a", []string{gpus}, "p1"), claim("b", []string{gpus}, "p2"))
	g := b.driver(gpus)
	if err := b.m.Prepare(t.Context(), pod("p1", "a")); err != nil {
		t.Fatal(err)
	}
	g.kill()
	if err := b.m.Prepare(t.Context(), pod("p2", "b")); err == nil || !strings.Contains(err.Error(), "does not answer") {
		t.Errorf("of a dead driver: %v", err)
	}
	g.remove()
	b.until("it is forgotten", func() bool { return b.m.drivers.get(gpus) == nil })
	if err := b.m.Unprepare(t.Context(), "p1"); err == nil || !strings.Contains(err.Error(), "run its node plugin here again") {
		t.Errorf("of a driver that has gone: %v", err)
	}
	g.start()
	b.answers(gpus)
	for _, uid := range []types.UID{"p1", "p2"} {
		if err := b.m.Unprepare(t.Context(), uid); err != nil || b.m.Held(uid) {
			t.Error(err)
		}
	}
}

// While a driver is exchanged two of its name are there; the newer one counts,
// and the older one when that has gone.
func TestDriverThatIsExchanged(t *testing.T) {
	b := setup(t, claim("a", []string{gpus}, "p1"), claim("b", []string{gpus}, "p2"))
	before := b.driver(gpus)
	next := newDriver(b, gpus)
	next.instance = "-2"
	next.start()
	if err := <-next.registrationOK; err != nil {
		t.Fatal(err)
	}
	b.until("the next one counts", func() bool { return strings.Contains(b.m.drivers.get(gpus).Endpoint, "-2") })
	if err := b.m.Prepare(t.Context(), pod("p1", "a")); err != nil || len(next.got("prepare")) != 1 {
		t.Errorf("%v, %v", err, next.got("prepare"))
	}
	next.kill()
	b.until("the one that answers counts", func() bool { return !strings.Contains(b.m.drivers.get(gpus).Endpoint, "-2") })
	if err := b.m.Prepare(t.Context(), pod("p2", "b")); err != nil || len(before.got("prepare")) != 1 {
		t.Errorf("%v, %v", err, before.got("prepare"))
	}
}

func TestDriverOfAnotherAge(t *testing.T) {
	b := setup(t)
	old := newDriver(b, gpus, "v1alpha3.Node")
	old.start()
	if err := <-old.registrationOK; err == nil || !strings.Contains(err.Error(), "v1alpha3.Node") || !strings.Contains(err.Error(), dra.DRAPluginService) {
		t.Errorf("%v", err)
	}
	if b.m.drivers.get(gpus) != nil {
		t.Error("it is registered")
	}
}

func TestRecordThatIsDamaged(t *testing.T) {
	b := setup(t)
	b.stop()
	if err := os.MkdirAll(b.dir, 0o750); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(b.dir, "uid-a.json")
	for _, text := range []string{"{", `{"version":2,"uid":"uid-a"}`, `{"version":1,"uid":"other"}`} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		m := New(b.m.cfg)
		if err := m.Run(t.Context()); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", text, err)
		}
		if !m.Held("p1") {
			t.Error("what is not known may be held")
		}
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	b.run()
}

func TestSlicesOfDriversThatHaveGone(t *testing.T) {
	slice := func(name, node, driver string) *resourcev1.ResourceSlice {
		return &resourcev1.ResourceSlice{ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name)}, Spec: resourcev1.ResourceSliceSpec{NodeName: &node, Driver: driver}}
	}
	b := setup(t, slice("never-came", "n1", "old.example.com"), slice("elsewhere", "n2", "old.example.com"))
	b.stop()
	b.grace = 300 * time.Millisecond
	g, n := newDriver(b, gpus), newDriver(b, nics)
	g.start()
	n.start()
	there := func(name string) bool {
		_, err := b.client.ResourceV1().ResourceSlices().Get(t.Context(), name, metav1.GetOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			t.Fatal(err)
		}
		return err == nil
	}
	b.run()
	b.answers(gpus)
	b.answers(nics)
	for _, s := range []*resourcev1.ResourceSlice{slice("here", "n1", gpus), slice("dies", "n1", nics)} {
		if _, err := b.client.ResourceV1().ResourceSlices().Create(t.Context(), s, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	b.until("what no driver offers is deleted", func() bool { return !there("never-came") })
	if !there("elsewhere") {
		t.Error("what another node offers is deleted")
	}
	n.kill()
	b.until("what a dead driver offers is deleted", func() bool { return !there("dies") })
	if !there("here") {
		t.Error("what a driver offers that is here is deleted")
	}
	g.remove()
	b.until("what a driver offers that has gone is deleted", func() bool { return !there("here") })
}
