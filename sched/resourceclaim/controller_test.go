package resourceclaim

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/informers"
	clienttesting "k8s.io/client-go/testing"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/loop"
	"github.com/clusterd/clusterd/sched/schedtest"
)

const ns = schedtest.Namespace

// run runs the loop on the cluster until stop is called.
func run(t *testing.T, c *schedtest.Cluster) (stop func()) {
	t.Helper()
	env := loop.Env{Client: c.Client, Clock: clock.RealClock{}, Informers: informers.NewSharedInformerFactory(c.Client, 0), Events: loop.NewEvents(c.Client, clock.RealClock{})}
	l, err := New(env)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	env.Informers.StartWithContext(ctx)
	wg.Go(func() {
		if err := l.Run(ctx); err != nil {
			t.Errorf("the loop ended with %v", err)
		}
	})
	wg.Go(func() {
		if err := env.Events.Run(ctx); err != nil {
			t.Errorf("events ended with %v", err)
		}
	})
	stop = sync.OnceFunc(func() { cancel(); wg.Wait(); env.Informers.Shutdown() })
	t.Cleanup(stop)
	return stop
}

// user is a pod that has one claim by the template and one that others have, too.
func user(name string) *schedtest.PodBuilder {
	p := schedtest.Pod(name)
	p.P.Spec.ResourceClaims = []corev1.PodResourceClaim{{Name: "own", ResourceClaimTemplateName: ptr.To("gpu")}, {Name: "shared", ResourceClaimName: ptr.To("shared")}}
	return p
}

func template() *resourcev1.ResourceClaimTemplate {
	t := &resourcev1.ResourceClaimTemplate{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: "gpu"}}
	t.Spec.Labels, t.Spec.Annotations = map[string]string{"l": "1"}, map[string]string{"a": "1"}
	t.Spec.Spec.Devices.Requests = []resourcev1.DeviceRequest{{Name: "r", Exactly: &resourcev1.ExactDeviceRequest{DeviceClassName: "c"}}}
	return t
}

func claims(t *testing.T, c *schedtest.Cluster) map[string]*resourcev1.ResourceClaim {
	t.Helper()
	list, err := c.Client.ResourceV1().ResourceClaims(ns).List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]*resourcev1.ResourceClaim{}
	for i := range list.Items {
		out[list.Items[i].Name] = &list.Items[i]
	}
	return out
}

// ownClaim is the name of the pod's claim, as its status has it.
func ownClaim(t *testing.T, c *schedtest.Cluster, pod string) string {
	t.Helper()
	p, err := c.Client.CoreV1().Pods(ns).Get(t.Context(), pod, metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range p.Status.ResourceClaimStatuses {
		if s.Name == "own" && s.ResourceClaimName != nil {
			return *s.ResourceClaimName
		}
	}
	return ""
}

// TestClaimOfATemplate follows the claim of a pod from its making to its end; a
// template that comes late, a claim that is deleted, an answer that is lost.
func TestClaimOfATemplate(t *testing.T) {
	c := schedtest.New(t, user("p").Obj())
	run(t, c)
	schedtest.Eventually(t, func() string { // it is said what is missing
		list, err := c.Client.CoreV1().Events(ns).List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err.Error()
		}
		for _, e := range list.Items {
			if e.Reason == "FailedResourceClaimCreation" && e.Message == `PodResourceClaim own: resourceclaimtemplate "gpu" not found` {
				return ""
			}
		}
		return fmt.Sprintf("%d other events", len(list.Items))
	})
	if _, err := c.Client.ResourceV1().ResourceClaimTemplates(ns).Create(t.Context(), template(), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	var name string
	named := func() string {
		if name = ownClaim(t, c, "p"); name == "" || claims(t, c)[name] == nil {
			return fmt.Sprintf("the pod has claim %q; there are %d", name, len(claims(t, c)))
		}
		return ""
	}
	schedtest.Eventually(t, named)
	made := claims(t, c)[name]
	if owner := metav1.GetControllerOf(made); owner == nil || owner.UID != "uid-p" || made.Annotations[resourcev1.PodResourceClaimAnnotation] != "own" ||
		made.Annotations["a"] != "1" || made.Labels["l"] != "1" || len(made.Spec.Devices.Requests) != 1 {
		t.Errorf("made %+v", made)
	}
	if err := c.Client.ResourceV1().ResourceClaims(ns).Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	schedtest.Eventually(t, func() string {
		if again := claims(t, c)[name]; again == nil || again.UID == made.UID {
			return "the claim that was deleted is not made again"
		}
		return ""
	})
	if len(claims(t, c)) != 1 {
		t.Errorf("%d claims, want one", len(claims(t, c)))
	}
}

// TestOneClaimAPod: the pod's status is not written, the loop is replaced, and
// there is still one claim.
func TestOneClaimAPod(t *testing.T) {
	c := schedtest.New(t, user("p").Obj(), template())
	var mu sync.Mutex
	fails, tries := true, 0
	c.Client.PrependReactor("patch", "pods", func(clienttesting.Action) (bool, runtime.Object, error) {
		mu.Lock()
		defer mu.Unlock()
		tries++
		return fails, nil, apierrors.NewInternalError(fmt.Errorf("lost"))
	})
	stop := run(t, c)
	schedtest.Eventually(t, func() string {
		mu.Lock()
		defer mu.Unlock()
		if tries < 3 {
			return "the status was not tried three times"
		}
		return ""
	})
	stop()
	mu.Lock()
	fails = false
	mu.Unlock()
	run(t, c)
	schedtest.Eventually(t, func() string {
		if ownClaim(t, c, "p") == "" {
			return "the pod has no claim"
		}
		return ""
	})
	if n := len(claims(t, c)); n != 1 {
		t.Errorf("%d claims, want one", n)
	}
}

// TestNameThatIsTaken: a claim of the name that is not the pod's is not used.
func TestNameThatIsTaken(t *testing.T) {
	pod := user("p").Obj()
	foreign := &resourcev1.ResourceClaim{ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: claimName(pod, "own", 0)}}
	c := schedtest.New(t, pod, template(), foreign)
	run(t, c)
	schedtest.Eventually(t, func() string {
		if got := ownClaim(t, c, "p"); got != claimName(pod, "own", 1) {
			return fmt.Sprintf("the pod has %q", got)
		}
		return ""
	})
}

// TestReservationsEnd: pods that have ended, are gone, or are others of the name
// give their devices back; the claim that was made for one of them goes.
func TestReservationsEnd(t *testing.T) {
	running, ended, replaced := user("running").On("n").Phase(corev1.PodRunning), user("ended").On("n").Phase(corev1.PodSucceeded), user("replaced").On("n").Phase(corev1.PodRunning)
	allocated := func(name string, users ...resourcev1.ResourceClaimConsumerReference) *resourcev1.ResourceClaim {
		return &resourcev1.ResourceClaim{
			ObjectMeta: metav1.ObjectMeta{Namespace: ns, Name: name, Finalizers: []string{resourcev1.Finalizer}},
			Status:     resourcev1.ResourceClaimStatus{Allocation: &resourcev1.AllocationResult{}, ReservedFor: users},
		}
	}
	shared := allocated("shared", podOf(running.P), podOf(ended.P),
		resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: "gone", UID: "gone"},
		resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: "replaced", UID: "of-before"})
	unused := allocated("unused", resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: "gone", UID: "gone"})
	own := newClaim(ended.P, "own", template(), 0)
	own.Finalizers, own.Status = []string{resourcev1.Finalizer}, resourcev1.ResourceClaimStatus{Allocation: &resourcev1.AllocationResult{}, ReservedFor: []resourcev1.ResourceClaimConsumerReference{podOf(ended.P)}}
	ended.P.Status.ResourceClaimStatuses = []corev1.PodResourceClaimStatus{{Name: "own", ResourceClaimName: &own.Name}}
	c := schedtest.New(t, running.Obj(), ended.Obj(), replaced.Obj(), template(), shared, unused, own)
	run(t, c)
	users := func(name string) (out []string) {
		for _, user := range claims(t, c)[name].Status.ReservedFor {
			out = append(out, string(user.UID))
		}
		slices.Sort(out)
		return out
	}
	schedtest.Eventually(t, func() string {
		// "replaced" uses the claim, too: it is bound, so it is reserved here.
		if got := users("shared"); !slices.Equal(got, []string{"uid-replaced", "uid-running"}) || claims(t, c)["shared"].Status.Allocation == nil {
			return fmt.Sprintf("shared is reserved for %v", got)
		}
		if u := claims(t, c)["unused"]; u.Status.Allocation != nil || len(u.Finalizers) != 0 {
			return fmt.Sprintf("what nobody uses has %v, finalizers %v", u.Status, u.Finalizers)
		}
		if claims(t, c)[own.Name] != nil {
			return "the claim of the pod that has ended is there"
		}
		return ""
	})
	// A claim that is in use waits for its last pod.
	if err := c.Client.ResourceV1().ResourceClaims(ns).Delete(t.Context(), "shared", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"running", "replaced"} {
		if claims(t, c)["shared"] == nil {
			t.Fatalf("the claim went while %s had it", name)
		}
		if err := c.Client.CoreV1().Pods(ns).Delete(t.Context(), name, *metav1.NewDeleteOptions(0)); err != nil {
			t.Fatal(err)
		}
	}
	schedtest.Eventually(t, func() string {
		if claims(t, c)["shared"] != nil {
			return "the deleted claim is still there"
		}
		return ""
	})
}
