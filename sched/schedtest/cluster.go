package schedtest

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"
	"sync"
	"testing"
	"time"

	jsonpatch "gopkg.in/evanphx/json-patch.v4"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/rand"
	"k8s.io/apimachinery/pkg/util/strategicpatch"
	"k8s.io/apimachinery/pkg/util/uuid"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/clusterd/clusterd/apis/core"
)

// Cluster is a fake API server with nodes that obey it.
type Cluster struct {
	// Client speaks to the server. Reactors may be prepended to inject faults.
	Client *fake.Clientset

	mu      sync.Mutex // guards below; taken inside the clientset's own lock
	version int64
}

// New returns a cluster that holds the objects.
func New(t testing.TB, objects ...runtime.Object) *Cluster {
	t.Helper()
	c := &Cluster{Client: fake.NewSimpleClientset()}
	for _, obj := range objects {
		o := obj.(metav1.Object)
		o.SetResourceVersion(c.next())
		if o.GetUID() == "" {
			o.SetUID(uuid.NewUUID())
		}
		if created := o.GetCreationTimestamp(); created.IsZero() {
			o.SetCreationTimestamp(metav1.Now())
		}
		if err := c.Client.Tracker().Add(obj); err != nil {
			t.Fatalf("add %T: %v", obj, err)
		}
	}
	SeeAll(&c.Client.Fake, c.Client.Tracker())
	c.Client.PrependReactor("create", "*", c.create)
	c.Client.PrependReactor("update", "*", c.update)
	c.Client.PrependReactor("patch", "*", c.patch)
	c.Client.PrependReactor("delete", "*", c.delete)
	return c
}

func (c *Cluster) next() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.version++
	return strconv.FormatInt(c.version, 10)
}

func (c *Cluster) create(action clienttesting.Action) (bool, runtime.Object, error) {
	a := action.(clienttesting.CreateAction)
	if action.GetSubresource() == "binding" {
		obj, err := c.bind(a)
		return true, obj, err
	}
	if action.GetSubresource() != "" {
		return false, nil, nil
	}
	obj := a.GetObject().DeepCopyObject()
	o := obj.(metav1.Object)
	if o.GetName() == "" && o.GetGenerateName() != "" {
		o.SetName(o.GetGenerateName() + rand.String(5))
	}
	o.SetNamespace(action.GetNamespace())
	o.SetUID(uuid.NewUUID())
	o.SetResourceVersion(c.next())
	o.SetCreationTimestamp(metav1.Now())
	o.SetGeneration(1)
	return true, obj, c.Client.Tracker().Create(action.GetResource(), obj, action.GetNamespace())
}

func (c *Cluster) bind(a clienttesting.CreateAction) (runtime.Object, error) {
	binding := a.GetObject().(*corev1.Binding)
	gvr := a.GetResource()
	obj, err := c.Client.Tracker().Get(gvr, a.GetNamespace(), binding.Name)
	if err != nil {
		return nil, err
	}
	pod := obj.(*corev1.Pod).DeepCopy()
	if binding.UID != "" && binding.UID != pod.UID || pod.Spec.NodeName != "" || pod.DeletionTimestamp != nil {
		return nil, apierrors.NewConflict(gvr.GroupResource(), pod.Name, fmt.Errorf("pod is bound, deleted or another"))
	}
	pod.Spec.NodeName = binding.Target.Name
	core.SetPodCondition(&pod.Status, corev1.PodCondition{Type: corev1.PodScheduled, Status: corev1.ConditionTrue}, time.Now())
	pod.ResourceVersion = c.next()
	return binding, c.Client.Tracker().Update(gvr, pod, pod.Namespace)
}

func (c *Cluster) update(action clienttesting.Action) (bool, runtime.Object, error) {
	a := action.(clienttesting.UpdateAction)
	obj := a.GetObject().DeepCopyObject()
	old, err := c.Client.Tracker().Get(action.GetResource(), action.GetNamespace(), obj.(metav1.Object).GetName())
	if err != nil {
		return true, nil, err
	}
	return c.store(action, old, obj)
}

func (c *Cluster) patch(action clienttesting.Action) (bool, runtime.Object, error) {
	a := action.(clienttesting.PatchAction)
	old, err := c.Client.Tracker().Get(action.GetResource(), action.GetNamespace(), a.GetName())
	if err != nil {
		return true, nil, err
	}
	before, err := json.Marshal(old)
	if err != nil {
		return true, nil, err
	}
	var after []byte
	switch a.GetPatchType() {
	case types.MergePatchType:
		after, err = jsonpatch.MergePatch(before, a.GetPatch())
	case types.StrategicMergePatchType:
		after, err = strategicpatch.StrategicMergePatch(before, a.GetPatch(), old)
	default:
		err = fmt.Errorf("patch type %s is not supported here", a.GetPatchType())
	}
	if err != nil {
		return true, nil, err
	}
	obj := reflect.New(reflect.TypeOf(old).Elem()).Interface().(runtime.Object)
	if err := json.Unmarshal(after, obj); err != nil {
		return true, nil, err
	}
	return c.store(action, old, obj)
}

// store does what the server's update strategies do.
func (c *Cluster) store(action clienttesting.Action, old, obj runtime.Object) (bool, runtime.Object, error) {
	gvr := action.GetResource()
	before, after := old.(metav1.Object), obj.(metav1.Object)
	if rv := after.GetResourceVersion(); rv != "" && rv != before.GetResourceVersion() {
		return true, nil, apierrors.NewConflict(gvr.GroupResource(), before.GetName(), fmt.Errorf("object was modified"))
	}
	if uid := after.GetUID(); uid != "" && uid != before.GetUID() {
		return true, nil, apierrors.NewConflict(gvr.GroupResource(), before.GetName(), fmt.Errorf("uid mismatch"))
	}
	switch action.GetSubresource() {
	case "":
		copyField(obj, old, "Status")
		if !sameField(obj, old, "Spec") {
			after.SetGeneration(before.GetGeneration() + 1)
		}
	case "status":
		copyField(obj, old, "Spec")
		after.SetGeneration(before.GetGeneration())
		after.SetLabels(before.GetLabels())
		after.SetAnnotations(before.GetAnnotations())
		after.SetOwnerReferences(before.GetOwnerReferences())
	case "finalize":
		copyField(obj, old, "Status")
	}
	after.SetUID(before.GetUID())
	after.SetCreationTimestamp(before.GetCreationTimestamp())
	if before.GetDeletionTimestamp() != nil {
		after.SetDeletionTimestamp(before.GetDeletionTimestamp())
		if len(after.GetFinalizers()) == 0 && len(before.GetFinalizers()) > 0 {
			return true, obj, c.Client.Tracker().Delete(gvr, before.GetNamespace(), before.GetName())
		}
	}
	if apiequality.Semantic.DeepEqual(old, obj) {
		return true, obj, nil
	}
	after.SetResourceVersion(c.next())
	return true, obj, c.Client.Tracker().Update(gvr, obj, before.GetNamespace())
}

func copyField(dst, src runtime.Object, name string) {
	d, s := reflect.ValueOf(dst).Elem().FieldByName(name), reflect.ValueOf(src).Elem().FieldByName(name)
	if d.IsValid() && s.IsValid() {
		d.Set(s)
	}
}

func sameField(a, b runtime.Object, name string) bool {
	x, y := reflect.ValueOf(a).Elem().FieldByName(name), reflect.ValueOf(b).Elem().FieldByName(name)
	return !x.IsValid() || apiequality.Semantic.DeepEqual(x.Interface(), y.Interface())
}

func (c *Cluster) delete(action clienttesting.Action) (bool, runtime.Object, error) {
	a := action.(clienttesting.DeleteActionImpl)
	gvr := action.GetResource()
	obj, err := c.Client.Tracker().Get(gvr, action.GetNamespace(), a.GetName())
	if err != nil {
		return true, nil, err
	}
	o, err := meta.Accessor(obj)
	if err != nil {
		return true, nil, err
	}
	if p := a.DeleteOptions.Preconditions; p != nil {
		if p.UID != nil && *p.UID != o.GetUID() || p.ResourceVersion != nil && *p.ResourceVersion != o.GetResourceVersion() {
			return true, nil, apierrors.NewConflict(gvr.GroupResource(), a.GetName(), fmt.Errorf("precondition failed"))
		}
	}
	if wait := c.graceful(gvr, obj, a.DeleteOptions); !wait && len(o.GetFinalizers()) == 0 {
		return true, obj, c.Client.Tracker().Delete(gvr, action.GetNamespace(), a.GetName())
	}
	if o.GetDeletionTimestamp() != nil {
		return true, obj, nil
	}
	now := metav1.Now()
	o.SetDeletionTimestamp(&now)
	o.SetResourceVersion(c.next())
	return true, obj, c.Client.Tracker().Update(gvr, obj, action.GetNamespace())
}

// graceful reports whether deletion only marks the object: pods on a node.
func (c *Cluster) graceful(gvr schema.GroupVersionResource, obj runtime.Object, options metav1.DeleteOptions) bool {
	pod, ok := obj.(*corev1.Pod)
	return ok && pod.Spec.NodeName != "" && pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed &&
		(options.GracePeriodSeconds == nil || *options.GracePeriodSeconds > 0)
}

// RunNodes plays the agents until ctx ends; see RunNodes.
func (c *Cluster) RunNodes(ctx context.Context, t testing.TB, dead func(node string) bool) {
	RunNodes(ctx, t, c.Client, dead)
}

// Deadline of Eventually. It is long because it costs nothing when all is well
// and machines that run tests are busy.
const Deadline = 60 * time.Second

// Eventually waits until check returns "", and fails with its last answer if it
// does not in time.
func Eventually(t testing.TB, check func() string) {
	t.Helper()
	end := time.After(Deadline)
	again := time.NewTicker(5 * time.Millisecond)
	defer again.Stop()
	for {
		answer := check()
		if answer == "" {
			return
		}
		select {
		case <-end:
			t.Fatalf("not within %v: %s", Deadline, answer)
		case <-again.C:
		}
	}
}
