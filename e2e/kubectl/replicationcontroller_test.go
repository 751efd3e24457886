package kubectl

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/clusterd/clusterd/features"
)

// controller is a ReplicationController of the hello program, which serves.
func controller(name string, replicas int) string {
	return fmt.Sprintf(`apiVersion: v1
kind: ReplicationController
metadata: {name: %[1]s, labels: {app: %[1]s}}
spec:
  replicas: %[2]d
  selector: {app: %[1]s}
  template:
    metadata: {labels: {app: %[1]s}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - {name: main, image: %[3]q, ports: [{containerPort: 8080}], readinessProbe: {periodSeconds: 1, httpGet: {path: /healthz, port: 8080}}}
`, name, replicas, image)
}

// answers asks each pod through the API server's proxy.
func (k *kit) answers(pods []string) {
	k.Helper()
	for _, name := range pods {
		k.ready(name)
		code, body := k.ask("GET", "/api/v1/namespaces/"+k.ns+"/pods/"+name+":8080/proxy/", "")
		if code != 200 || !strings.Contains(body, "I am pod "+name) {
			k.Errorf("%s answers %d %q", name, code, body)
		}
	}
}

// TestE2EXReplicationController looks at the oldest controller of pods.
func TestE2EXReplicationController(t *testing.T) {
	t.Parallel()
	k := start(t, "replicationcontroller")
	k.sub("runs, answers, scales", func(k *kit) {
		features.Shows(k, 101)
		features.Conforms(k, 148, 150, 196, 203, 204)
		k.okIn(controller("web", 2), "create", "-f", "-")
		k.answers(k.owns("web", 2))
		k.has(k.ok("get", "rc", "web"), "DESIRED", "CURRENT", "READY")
		k.ok("scale", "rc", "web", "--replicas=1")
		k.answers(k.owns("web", 1))
		scales := k.api.CoreV1().ReplicationControllers(k.ns)
		k.eventually("the scale is read, and written", func(ctx context.Context) error {
			scale, err := scales.GetScale(ctx, "web", metav1.GetOptions{})
			if err != nil {
				return err
			}
			if got := fmt.Sprint(scale.Spec.Replicas, scale.Status.Replicas, " ", scale.Status.Selector); got != "1 1 app=web" {
				return errors.New(got)
			}
			scale.Spec.Replicas = 2
			_, err = scales.UpdateScale(ctx, "web", scale, metav1.UpdateOptions{})
			return err
		})
		pods := k.owns("web", 2)
		k.answers(pods)
		for _, name := range pods {
			k.ok("patch", "pod", name, "-p", `{"metadata":{"annotations":{"x":"y"}}}`)
			k.is("annotation", k.field("pod/"+name, "{.metadata.annotations.x}"), "y")
		}
	})
	k.sub("is described and exposed", func(k *kit) {
		features.Conforms(k, 194)
		k.eventuallyHas([]string{"describe", "rc", "web"}, "Name:", "Namespace:", "Image:", "Replicas:", "2 current / 2 desired", "Pods Status:", "2 Running / 0 Waiting / 0 Succeeded / 0 Failed", "Selector:", "SuccessfulCreate")
		k.ok("expose", "rc", "web", "--name=one", "--port=1234", "--target-port=8080")
		k.ok("expose", "service", "one", "--name=two", "--port=2345", "--target-port=8080")
		for name, port := range map[string]string{"one": "1234", "two": "2345"} {
			k.is("port of "+name, k.field("service/"+name, "{.spec.ports[0].port} {.spec.ports[0].targetPort}"), port+" 8080")
			k.eventually(name+" has two endpoints", func(ctx context.Context) error {
				e, err := k.api.CoreV1().Endpoints(k.ns).Get(ctx, name, metav1.GetOptions{}) //nolint:staticcheck // what clients of old still read
				if err == nil && (len(e.Subsets) != 1 || len(e.Subsets[0].Addresses) != 2 || e.Subsets[0].Ports[0].Port != 8080) {
					err = fmt.Errorf("%v", e.Subsets)
				}
				return err
			})
		}
		k.ok("delete", "service", "one", "two")
	})
	k.sub("adopts and releases", func(k *kit) {
		features.Conforms(k, 147, 149)
		k.apply(simple("orphan", "sleep"))
		k.ready("orphan")
		k.apply(controller("orphan", 1))
		k.is("adopted", k.owns("orphan", 1)[0], "orphan")
		k.ok("label", "pod", "orphan", "app=elsewhere", "--overwrite")
		k.eventually("it is released", func(context.Context) error {
			if got := k.field("pod/orphan", "{.metadata.ownerReferences}"); got != "" {
				return errors.New(got)
			}
			return nil
		})
		if got := k.owns("orphan", 1); got[0] == "orphan" {
			k.Error("the released pod is still owned")
		}
		k.ok("delete", "rc/orphan", "pod/orphan", "--wait=false")
	})
	k.sub("says why it cannot", func(k *kit) {
		features.Conforms(k, 80, 151)
		k.ok("create", "quota", "q", "--hard=pods=3,replicationcontrollers=2")
		k.eventually("the quota counts", func(context.Context) error {
			if got := k.field("quota/q", "{.status.used.pods} {.status.used.replicationcontrollers}"); got != "2 1" {
				return errors.New(got)
			}
			return nil
		})
		k.apply(controller("many", 3))
		failure := `{.status.conditions[?(@.type=="ReplicaFailure")].status} {.status.conditions[?(@.type=="ReplicaFailure")].reason}`
		k.eventually("the condition is there", func(context.Context) error {
			if got := k.field("rc/many", failure); got != "True FailedCreate" {
				return errors.New(got)
			}
			return nil
		})
		k.has(k.failsIn(controller("third", 0), "create", "-f", "-"), "exceeded quota: q", "replicationcontrollers=1")
		k.ok("scale", "rc", "many", "--replicas=1")
		k.eventually("the condition is gone", func(context.Context) error {
			if got := strings.TrimSpace(k.field("rc/many", failure)); got != "" {
				return errors.New(got)
			}
			return nil
		})
		k.ok("delete", "rc", "many")
		k.eventually("the quota is released", func(context.Context) error {
			if got := k.field("quota/q", "{.status.used.replicationcontrollers}"); got != "1" {
				return errors.New(got)
			}
			return nil
		})
		k.ok("delete", "quota", "q")
	})
	k.sub("is deleted with its pods, before them, or without", func(k *kit) {
		features.Conforms(k, 58, 59, 63)
		k.owns("web", 2)
		k.ok("delete", "rc", "web", "--cascade=orphan")
		k.eventually("the pods have no owner", func(context.Context) error {
			if got := k.ok("get", "pods", "-l", "app=web", "-o", "jsonpath={.items[*].metadata.ownerReferences}"); got != "" {
				return errors.New(got)
			}
			return nil
		})
		k.is("pods kept", fmt.Sprint(len(strings.Fields(k.ok("get", "pods", "-l", "app=web", "-o", "name")))), "2")
		k.apply(controller("web", 2)) // adopts them
		k.owns("web", 2)
		k.foreground("web")
		k.apply(controller("web", 2))
		k.owns("web", 2)
		k.ok("delete", "rc", "web")
		k.eventually("no pod is left", func(context.Context) error {
			if left := k.ok("get", "pods", "-l", "app=web", "-o", "name"); left != "" {
				return errors.New(left)
			}
			return nil
		})
	})
	k.sub("through its life, seen by a watch", func(k *kit) {
		features.Conforms(k, 152)
		k.life()
	})
}

// foreground deletes a ReplicationController in the foreground, and looks that
// it stays until its pods are gone.
func (k *kit) foreground(name string) {
	k.Helper()
	w, err := k.api.CoreV1().ReplicationControllers(k.ns).Watch(k.Context(), metav1.ListOptions{FieldSelector: "metadata.name=" + name})
	if err != nil {
		k.Fatal(err)
	}
	defer w.Stop()
	policy := metav1.DeletePropagationForeground
	if err := k.api.CoreV1().ReplicationControllers(k.ns).Delete(k.Context(), name, metav1.DeleteOptions{PropagationPolicy: &policy}); err != nil {
		k.Fatal(err)
	}
	waiting := false
	for e := range w.ResultChan() {
		rc, ok := e.Object.(*corev1.ReplicationController)
		if !ok {
			k.Fatalf("watch: %v", e.Object)
		}
		waiting = waiting || rc.DeletionTimestamp != nil && e.Type == watch.Modified
		if e.Type == watch.Deleted {
			break
		}
	}
	if !waiting {
		k.Error("it went without having waited for its pods")
	}
	k.is("pods left when it was gone", k.ok("get", "pods", "-l", "app="+name, "-o", "name"), "")
}

// life creates, reads, patches and deletes a ReplicationController.
func (k *kit) life() {
	k.Helper()
	rcs := k.api.CoreV1().ReplicationControllers(k.ns)
	w, err := rcs.Watch(k.Context(), metav1.ListOptions{LabelSelector: "app=life"})
	if err != nil {
		k.Fatal(err)
	}
	defer w.Stop()
	seen := func(what string, is func(watch.EventType, *corev1.ReplicationController) bool) {
		k.Helper()
		for e := range w.ResultChan() {
			if rc, ok := e.Object.(*corev1.ReplicationController); ok && is(e.Type, rc) {
				return
			}
		}
		k.Fatalf("the watch ended before %s", what)
	}
	k.okIn(controller("life", 1), "create", "-f", "-")
	seen("it was made", func(t watch.EventType, _ *corev1.ReplicationController) bool { return t == watch.Added })
	if _, err := rcs.Patch(k.Context(), "life", types.StrategicMergePatchType, []byte(`{"metadata":{"labels":{"stage":"two"}},"spec":{"replicas":2}}`), metav1.PatchOptions{}); err != nil {
		k.Fatal(err)
	}
	seen("both were ready", func(_ watch.EventType, rc *corev1.ReplicationController) bool {
		return rc.Labels["stage"] == "two" && rc.Status.ReadyReplicas == 2 && rc.Status.AvailableReplicas == 2
	})
	if _, err := rcs.Patch(k.Context(), "life", types.StrategicMergePatchType, []byte(`{"status":{"observedGeneration":1000}}`), metav1.PatchOptions{}, "status"); err != nil {
		k.Fatal(err)
	}
	seen("the status was patched", func(_ watch.EventType, rc *corev1.ReplicationController) bool {
		return rc.Status.ObservedGeneration == 1000
	})
	if err := rcs.DeleteCollection(k.Context(), metav1.DeleteOptions{}, metav1.ListOptions{LabelSelector: "stage=two"}); err != nil {
		k.Fatal(err)
	}
	seen("it was gone", func(t watch.EventType, _ *corev1.ReplicationController) bool { return t == watch.Deleted })
	if _, err := rcs.Get(k.Context(), "life", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		k.Errorf("afterwards: %v", err)
	}
}
