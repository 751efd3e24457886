package kubectl

import (
	"context"
	"errors"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	nodev1 "k8s.io/api/node/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/features"
)

// TestE2EXRuntimeClass: a pod runs by the handler that its class names, with
// the class's overhead in its cgroup; without the class it is refused, and
// without the handler it says so.
func TestE2EXRuntimeClass(t *testing.T) {
	t.Parallel()
	k := start(t, "runtimeclass")
	features.Shows(k, 176)
	features.Conforms(k, 330, 331, 332, 333)
	k.apply(`
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: e2e-usual}
handler: runc
overhead: {podFixed: {cpu: 100m, memory: 16Mi}}
scheduling: {nodeSelector: {kubernetes.io/os: linux}}
---
apiVersion: node.k8s.io/v1
kind: RuntimeClass
metadata: {name: e2e-strong}
handler: kata
`)
	k.has(k.ok("get", "runtimeclasses"), "NAME", "HANDLER", "e2e-strong", "kata")
	k.has(k.ok("explain", "runtimeclass.overhead"), "podFixed")
	k.has(k.field("node/"+node, "{.status.runtimeHandlers[*].name}"), "runc")
	of := func(name, class string) string {
		return strings.Replace(simple(name, "sleep", "runtimeClassName: "+class), "args:", `resources: {limits: {cpu: 100m, memory: 32Mi}}, args:`, 1)
	}

	k.has(k.failsIn(of("ghost", "e2e-none"), "apply", "-f", "-"), "Forbidden", `pod rejected: RuntimeClass "e2e-none" not found`)
	k.apply(of("usual", "e2e-usual"))
	k.apply(of("strong", "e2e-strong"))
	p := k.ready("usual")
	k.is("the class's overhead", p.Spec.Overhead.Memory().String(), "16Mi")
	k.is("the class's node selector", p.Spec.NodeSelector["kubernetes.io/os"], "linux")
	pid := k.process(string(p.UID), "sleep")
	dir := k.cgroup(pid, "memory")
	k.is("memory of the container", k.limit(dir, "memory.limit_in_bytes", "memory.max"), "33554432")
	k.is("memory of the pod", k.limit(filepath.Dir(dir), "memory.limit_in_bytes", "memory.max"), "50331648")
	k.eventuallyHas([]string{"describe", "pod", "strong"}, "FailedCreatePodSandBox", `no runtime for "kata" is configured`)
	k.eventuallyHas([]string{"get", "pod", "strong"}, "ContainerCreating")
	k.ok("delete", "runtimeclass", "e2e-usual", "e2e-strong")
	k.eventually("a pod of the deleted class is refused", func(context.Context) error {
		if _, errs, _ := k.in(of("after", "e2e-usual"), "create", "--dry-run=server", "-f", "-"); !strings.Contains(errs, `pod rejected: RuntimeClass "e2e-usual" not found`) {
			return errors.New(errs)
		}
		return nil
	})
	k.ok("delete", "pod", "usual", "strong", "--wait=false")
}

// TestE2EXRuntimeClassAPI: discovery and all verbs of the kind.
func TestE2EXRuntimeClassAPI(t *testing.T) {
	t.Parallel()
	k := start(t, "runtimeclass-api")
	features.Conforms(k, 334)
	ctx, classes := t.Context(), k.api.NodeV1().RuntimeClasses()
	resources, err := k.api.Discovery().ServerResourcesForGroupVersion("node.k8s.io/v1")
	if err != nil || !slices.ContainsFunc(resources.APIResources, func(r metav1.APIResource) bool {
		return r.Name == "runtimeclasses" && r.Kind == "RuntimeClass" && !r.Namespaced &&
			slices.Equal(slices.Sorted(slices.Values(r.Verbs)), []string{"create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"})
	}) {
		t.Errorf("discovery: %+v, %v", resources, err)
	}
	const label = "e2e=runtimeclass-api"
	added := func(name string) *nodev1.RuntimeClass {
		t.Helper()
		c, err := classes.Create(ctx, &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{"e2e": "runtimeclass-api"}}, Handler: "runc"}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	first := added("e2e-api-1")
	watch, err := classes.Watch(ctx, metav1.ListOptions{LabelSelector: label, ResourceVersion: first.ResourceVersion})
	if err != nil {
		t.Fatal(err)
	}
	defer watch.Stop()
	added("e2e-api-2")
	added("e2e-api-3")
	if _, err := classes.Create(ctx, &nodev1.RuntimeClass{ObjectMeta: metav1.ObjectMeta{Name: first.Name}, Handler: "runc"}, metav1.CreateOptions{}); !apierrors.IsAlreadyExists(err) {
		t.Errorf("created twice: %v", err)
	}
	patched, err := classes.Patch(ctx, first.Name, types.MergePatchType, []byte(`{"metadata":{"annotations":{"by":"patch"}}}`), metav1.PatchOptions{})
	if err != nil || patched.Annotations["by"] != "patch" {
		t.Fatalf("patch: %+v, %v", patched, err)
	}
	patched.Annotations["by"] = "update"
	if updated, err := classes.Update(ctx, patched, metav1.UpdateOptions{}); err != nil || updated.Annotations["by"] != "update" {
		t.Errorf("update: %+v, %v", updated, err)
	}
	if _, err := classes.Patch(ctx, first.Name, types.MergePatchType, []byte(`{"handler":"other"}`), metav1.PatchOptions{}); !apierrors.IsInvalid(err) {
		t.Errorf("another handler: %v", err)
	}
	if err := classes.Delete(ctx, first.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := classes.Get(ctx, first.Name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("get after delete: %v", err)
	}
	if list, err := classes.List(ctx, metav1.ListOptions{LabelSelector: label}); err != nil || len(list.Items) != 2 {
		t.Errorf("list: %+v, %v", list, err)
	}
	if err := classes.DeleteCollection(ctx, metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: label}); err != nil {
		t.Error(err)
	}
	if list, err := classes.List(ctx, metav1.ListOptions{LabelSelector: label}); err != nil || len(list.Items) != 0 {
		t.Errorf("list after all were deleted: %+v, %v", list, err)
	}
	var seen []string
	for range 7 {
		select {
		case e := <-watch.ResultChan():
			c, ok := e.Object.(*nodev1.RuntimeClass)
			if !ok {
				t.Fatalf("watch: %+v", e)
			}
			seen = append(seen, string(e.Type)+" "+strings.TrimPrefix(c.Name, "e2e-api-"))
		case <-time.After(testTimeout):
			t.Fatalf("watch: only %v", seen)
		}
	}
	slices.Sort(seen[5:]) // the order in which a collection is deleted is nobody's
	if got, want := strings.Join(seen, ", "), "ADDED 2, ADDED 3, MODIFIED 1, MODIFIED 1, DELETED 1, DELETED 2, DELETED 3"; got != want {
		t.Errorf("watch: %s, want %s", got, want)
	}
}
