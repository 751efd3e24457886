package kubectl

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/clusterd/clusterd/features"
)

// TestE2EXEveryday is what controllers, limits and the node do with everyday
// objects.
func TestE2EXEveryday(t *testing.T) {
	t.Parallel()
	k := start(t, "everyday")
	k.sub("the root certificate", rootCertificate)
	k.sub("an event", eventLife)
	k.sub("limits", limits)
	k.sub("a Deployment", deploymentLife)
	k.sub("one port of the node", onePort)
	k.sub("a token in a volume", tokenVolume)
	k.sub("many ConfigMaps", manyConfigMaps)
}

func rootCertificate(k *kit) {
	features.Conforms(k, 173)
	const name = "kube-root-ca.crt"
	maps := k.api.CoreV1().ConfigMaps(k.ns)
	is := func(what string, uid types.UID, certificate string) *corev1.ConfigMap {
		k.Helper()
		var m *corev1.ConfigMap
		k.eventually(what, func(ctx context.Context) (err error) {
			if m, err = maps.Get(ctx, name, metav1.GetOptions{}); err != nil {
				return err
			}
			if got := m.Data["ca.crt"]; m.UID == uid || !strings.HasPrefix(got, "-----BEGIN CERTIFICATE-----") || certificate != "" && got != certificate {
				return fmt.Errorf("%s %q", m.UID, got)
			}
			return nil
		})
		return m
	}
	first := is("it is there", "", "")
	k.must(maps.Delete(k.Context(), name, metav1.DeleteOptions{}))
	second := is("it is made anew", first.UID, first.Data["ca.crt"])
	second.Data = map[string]string{"ca.crt": "none"}
	_, err := maps.Update(k.Context(), second, metav1.UpdateOptions{})
	k.must(err)
	is("it is repaired", "", first.Data["ca.crt"])
}

func eventLife(k *kit) {
	features.Conforms(k, 209)
	events, ctx := k.api.CoreV1().Events(k.ns), k.Context()
	e, err := events.Create(ctx, &corev1.Event{
		ObjectMeta:     metav1.ObjectMeta{Name: "told", Labels: map[string]string{"told": "by-a-test"}},
		InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: k.ns, Name: "none"},
		Reason:         "Test", Message: "before", Type: corev1.EventTypeNormal, Count: 1,
	}, metav1.CreateOptions{})
	k.must(err)
	all := metav1.ListOptions{LabelSelector: "told=by-a-test"}
	listed := func(want int) []corev1.Event {
		k.Helper()
		list, err := k.api.CoreV1().Events(metav1.NamespaceAll).List(ctx, all)
		k.must(err)
		if len(list.Items) != want {
			k.Errorf("%d events of all namespaces, want %d", len(list.Items), want)
		}
		return list.Items
	}
	listed(1)
	_, err = events.Patch(ctx, e.Name, types.StrategicMergePatchType, []byte(`{"message":"after"}`), metav1.PatchOptions{})
	k.must(err)
	e, err = events.Get(ctx, e.Name, metav1.GetOptions{})
	k.must(err)
	k.is("message", e.Message, "after")
	e.Series = &corev1.EventSeries{Count: 100, LastObservedTime: metav1.MicroTime{Time: time.Unix(1_700_000_000, 123_456_000)}}
	_, err = events.Update(ctx, e, metav1.UpdateOptions{})
	k.must(err)
	if got := listed(1); got[0].Series == nil || got[0].Series.Count != 100 || !got[0].Series.LastObservedTime.Equal(&e.Series.LastObservedTime) {
		k.Errorf("series %+v", got[0].Series)
	}
	k.must(events.Delete(ctx, e.Name, metav1.DeleteOptions{}))
	listed(0)
}

func limits(k *kit) {
	features.Conforms(k, 361)
	k.ns = "everyday-limits"
	k.ok("create", "namespace", k.ns)
	k.Cleanup(func() { k.in("", "delete", "namespace", k.ns, "--wait=false") })
	limit := func(least string) string {
		return `apiVersion: v1
kind: LimitRange
metadata: {name: l}
spec:
  limits:
  - type: Container
    min: {cpu: ` + least + `, memory: 100Mi, ephemeral-storage: 50Gi}
    max: {cpu: 500m, memory: 500Mi, ephemeral-storage: 500Gi}
    default: {cpu: 500m, memory: 500Mi, ephemeral-storage: 500Gi}
    defaultRequest: {cpu: 100m, memory: 200Mi, ephemeral-storage: 200Gi}
`
	}
	k.apply(limit("50m"))
	resources := func(name, own, want string) {
		k.Helper()
		k.eventually("the limits are in force", func(context.Context) error {
			out, errs, code := k.in(gated(name, "", own), "create", "-f", "-", "-o", "jsonpath={.spec.containers[0].resources}")
			if code != 0 {
				k.Fatal(errs)
			}
			if out != want {
				k.ok("delete", "pod", name)
				return errors.New(out)
			}
			return nil
		})
	}
	resources("plain", "", `{"limits":{"cpu":"500m","ephemeral-storage":"500Gi","memory":"500Mi"},"requests":{"cpu":"100m","ephemeral-storage":"200Gi","memory":"200Mi"}}`)
	// What is said stays; a request that is not said is the limit that is.
	resources("partial", "requests: {cpu: 300m, memory: 150Mi}, limits: {cpu: 300m, ephemeral-storage: 50Gi}",
		`{"limits":{"cpu":"300m","ephemeral-storage":"50Gi","memory":"500Mi"},"requests":{"cpu":"300m","ephemeral-storage":"50Gi","memory":"150Mi"}}`)
	k.has(k.failsIn(gated("small", "", "requests: {cpu: 10m}"), "create", "-f", "-"), "minimum cpu usage per Container is 50m, but request is 10m")
	k.has(k.failsIn(gated("large", "", "requests: {cpu: 600m}, limits: {cpu: 600m}"), "create", "-f", "-"), "maximum cpu usage per Container is 500m, but limit is 600m")
	k.apply(limit("5m"))
	k.eventually("the new limits are in force", func(context.Context) error {
		_, errs, code := k.in(gated("small", "", "requests: {cpu: 10m}"), "create", "-f", "-")
		return complaint(code, errs)
	})
	k.has(k.failsIn(gated("large", "", "requests: {cpu: 600m}, limits: {cpu: 600m}"), "create", "-f", "-"), "maximum cpu usage per Container is 500m, but limit is 600m")
	k.ok("delete", "limitrange", "l")
	k.eventually("no limits are in force", func(context.Context) error {
		_, errs, code := k.in(gated("large", "", "requests: {cpu: 600m}, limits: {cpu: 600m}"), "create", "-f", "-")
		return complaint(code, errs)
	})
}

func deploymentLife(k *kit) {
	features.Conforms(k, 120)
	deployments, ctx := k.api.AppsV1().Deployments(k.ns), k.Context()
	w, err := deployments.Watch(ctx, metav1.ListOptions{LabelSelector: "life=watched"})
	k.must(err)
	defer w.Stop()
	sees := func(what string, is func(watch.EventType, *appsv1.Deployment) bool) {
		k.Helper()
		late := time.After(testTimeout)
		for {
			select {
			case e := <-w.ResultChan():
				d, ok := e.Object.(*appsv1.Deployment)
				if !ok {
					k.Fatalf("%s: the watch ended with %v", what, e.Object)
				}
				if is(e.Type, d) {
					return
				}
			case <-late:
				k.Fatalf("not seen: %s", what)
			}
		}
	}
	ready := func(n int32) func(watch.EventType, *appsv1.Deployment) bool {
		return func(_ watch.EventType, d *appsv1.Deployment) bool {
			return d.Status.ReadyReplicas == n && d.Status.Replicas == n && d.Status.ObservedGeneration == d.Generation
		}
	}
	k.okIn(strings.Replace(web("watched", 1), "metadata: {name: watched}", "metadata: {name: watched, labels: {life: watched}}", 1), "create", "-f", "-")
	sees("it is made", func(t watch.EventType, _ *appsv1.Deployment) bool { return t == watch.Added })
	sees("one pod is ready", ready(1))
	_, err = deployments.Patch(ctx, "watched", types.StrategicMergePatchType, []byte(`{"metadata":{"labels":{"patched":"yes"}},"spec":{"template":{"spec":{"terminationGracePeriodSeconds":1}}}}`), metav1.PatchOptions{})
	k.must(err)
	sees("it is patched", func(t watch.EventType, d *appsv1.Deployment) bool {
		return t == watch.Modified && d.Labels["patched"] == "yes"
	})
	k.eventually("the scale is written", func(ctx context.Context) error { // the controller writes its status meanwhile
		scale, err := deployments.GetScale(ctx, "watched", metav1.GetOptions{})
		if err != nil {
			return err
		}
		scale.Spec.Replicas = 2
		_, err = deployments.UpdateScale(ctx, "watched", scale, metav1.UpdateOptions{})
		return err
	})
	sees("two pods are ready", ready(2))
	_, err = deployments.Patch(ctx, "watched", types.StrategicMergePatchType, []byte(`{"status":{"conditions":[{"type":"Tried","status":"True","reason":"Test","message":"by a test"}]}}`), metav1.PatchOptions{}, "status")
	k.must(err)
	sees("its status is patched", func(_ watch.EventType, d *appsv1.Deployment) bool {
		for _, c := range d.Status.Conditions {
			if c.Type == "Tried" && c.Status == corev1.ConditionTrue {
				return true
			}
		}
		return false
	})
	k.must(deployments.Delete(ctx, "watched", metav1.DeleteOptions{}))
	sees("it is deleted", func(t watch.EventType, _ *appsv1.Deployment) bool { return t == watch.Deleted })
}

func onePort(k *kit) {
	features.Conforms(k, 366)
	with := func(name, port string) string {
		return strings.Replace(simple(name, "sleep"), "args:", "ports: [{containerPort: 8080, hostPort: 18097, "+port+"}], args:", 1)
	}
	k.apply(with("everywhere", "hostIP: 0.0.0.0"))
	k.ready("everywhere")
	k.apply(with("here", "hostIP: 127.0.0.1"))
	k.event("here", "FailedScheduling", "didn't have free ports")
	k.is("its node", k.field("pod/here", "{.spec.nodeName}"), "")
	k.ok("delete", "pod", "everywhere")
	k.ready("here") // it had waited for the port alone
	k.ok("delete", "pod", "here", "--wait=false")
}

func tokenVolume(k *kit) {
	features.Conforms(k, 175)
	k.apply(strings.Replace(simple("token", "sleep", "volumes:", "- {name: t, projected: {sources: [{serviceAccountToken: {path: token, expirationSeconds: 7200, audience: elsewhere}}]}}"),
		"args:", "volumeMounts: [{name: t, mountPath: /t}], args:", 1))
	k.ready("token")
	if token := k.exec("token", "main", "cat", "/t/token"); strings.Count(token, ".") != 2 {
		k.Errorf("%d bytes that are no token", len(token))
	}
	k.ok("delete", "pod", "token", "--wait=false")
}

func manyConfigMaps(k *kit) {
	features.Conforms(k, 413)
	const volumes, pods = 50, 5
	var maps, list, mounts strings.Builder
	for i := range volumes {
		fmt.Fprintf(&maps, "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: many-%d}\ndata: {number: \"%d\"}\n---\n", i, i)
		fmt.Fprintf(&list, "      - {name: v%d, configMap: {name: many-%d}}\n", i, i)
		fmt.Fprintf(&mounts, "{name: v%d, mountPath: /v%d}, ", i, i)
	}
	k.apply(maps.String())
	k.apply(fmt.Sprintf(`apiVersion: v1
kind: ReplicationController
metadata: {name: many}
spec:
  replicas: %d
  selector: {app: many}
  template:
    metadata: {labels: {app: many}}
    spec:
      terminationGracePeriodSeconds: 1
      containers: [{name: main, image: %q, args: [sleep], volumeMounts: [%s]}]
      volumes:
%s`, pods, image, strings.TrimSuffix(mounts.String(), ", "), list.String()))
	k.eventually("all are ready", func(context.Context) error {
		if got := k.field("rc/many", "{.status.readyReplicas}"); got != fmt.Sprint(pods) {
			return errors.New(got)
		}
		return nil
	})
	for _, pod := range strings.Fields(k.ok("get", "pods", "-l", "app=many", "-o", "name")) {
		k.is("a file of "+pod, k.exec(strings.TrimPrefix(pod, "pod/"), "main", "cat", "/v49/number"), "49")
	}
	k.ok("delete", "rc", "many", "--wait=false")
}
