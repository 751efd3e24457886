package kubectl

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/e2e/cluster/clustertest"
	"github.com/clusterd/clusterd/features"
)

// replicaSet is one of the hello program.
func replicaSet(name, app string, replicas int) string {
	return fmt.Sprintf(`apiVersion: apps/v1
kind: ReplicaSet
metadata: {name: %s}
spec:
  replicas: %d
  selector: {matchLabels: {app: %[3]s}}
  template:
    metadata: {labels: {app: %[3]s}}
    spec: {terminationGracePeriodSeconds: 1, containers: [{name: main, image: %q, args: [sleep]}]}
`, name, replicas, app, image)
}

// owned are the names of the pods a ReplicaSet controls.
func (k *kit) owned(set string) []string {
	k.Helper()
	list, err := k.api.CoreV1().Pods(k.ns).List(k.Context(), metav1.ListOptions{})
	if err != nil {
		k.Fatal(err)
	}
	var names []string
	for _, p := range list.Items {
		if o := metav1.GetControllerOf(&p); o != nil && o.Name == set && p.DeletionTimestamp == nil {
			names = append(names, p.Name)
		}
	}
	return names
}

func (k *kit) owns(set string, n int) []string {
	k.Helper()
	var names []string
	k.eventually(fmt.Sprintf("%s has %d pods", set, n), func(context.Context) error {
		if names = k.owned(set); len(names) != n {
			return fmt.Errorf("it has %q", names)
		}
		return nil
	})
	return names
}

// TestE2EXControllers looks at who makes, keeps and removes what.
func TestE2EXControllers(t *testing.T) {
	t.Parallel()
	k := start(t, "controllers")
	k.sub("from Deployment to Pods", func(k *kit) {
		features.Shows(k, 90, 91, 95, 102)
		k.apply(web("web", 2))
		var set *appsv1.ReplicaSet
		k.eventually("there is a ReplicaSet", func(ctx context.Context) error {
			list, err := k.api.AppsV1().ReplicaSets(k.ns).List(ctx, metav1.ListOptions{LabelSelector: "app=web"})
			if err == nil && len(list.Items) != 1 {
				err = fmt.Errorf("there are %d", len(list.Items))
			}
			if err == nil {
				set = &list.Items[0]
			}
			return err
		})
		d, err := k.api.AppsV1().Deployments(k.ns).Get(k.Context(), "web", metav1.GetOptions{})
		if err != nil {
			k.Fatal(err)
		}
		k.best("a Deployment's ReplicaSet", time.Second, func(i int) time.Duration { // row 91
			name := fmt.Sprintf("soon-%d", i)
			k.apply(web(name, 0))
			made := time.Now()
			k.soon("there is its ReplicaSet", func(ctx context.Context) (bool, error) {
				list, err := k.api.AppsV1().ReplicaSets(k.ns).List(ctx, metav1.ListOptions{LabelSelector: "app=" + name})
				return err == nil && len(list.Items) == 1, err
			})
			took := time.Since(made)
			k.ok("delete", "deployment", name, "--wait=false")
			return took
		})
		tmpl := set.Spec.Template.DeepCopy()
		if tmpl.Labels["pod-template-hash"] == "" {
			k.Errorf("labels %v", tmpl.Labels)
		}
		delete(tmpl.Labels, "pod-template-hash")
		k.is("template", tmpl.String(), d.Spec.Template.String())
		old := k.owns(set.Name, 2)
		k.is("owner", k.field("pod/"+old[0], "{.metadata.ownerReferences[0].kind}/{.metadata.ownerReferences[0].name}/{.metadata.ownerReferences[0].controller}"), "ReplicaSet/"+set.Name+"/true")
		k.ok("delete", "pod", old[0])
		for _, name := range k.owns(set.Name, 2) {
			if name == old[0] {
				k.Errorf("%s is still there", name)
			}
		}
	})
	k.sub("a rollout that does not progress", func(k *kit) {
		features.Shows(k, 96)
		k.apply(strings.NewReplacer("replicas: 1", "replicas: 1\n  progressDeadlineSeconds: 10", image, "127.0.0.1:1/a/b:1").Replace(web("stuck", 1)))
		k.eventually("it says so", func(context.Context) error {
			got := k.field("deploy/stuck", `{.status.conditions[?(@.type=="Progressing")].status} {.status.conditions[?(@.type=="Progressing")].reason}`)
			if got != "False ProgressDeadlineExceeded" {
				return errors.New(got)
			}
			return nil
		})
		k.has(k.fails("rollout", "status", "deploy/stuck", timeoutFlag), `deployment "stuck" exceeded its progress deadline`)
		k.ok("delete", "deploy", "stuck", "--wait=false")
	})
	k.sub("deletion in cascades", func(k *kit) {
		features.Shows(k, 103, 104)
		features.Conforms(k, 57, 62)
		set := strings.TrimSpace(k.ok("get", "rs", "-l", "app=web", "-o", "name"))
		k.ok("delete", "deploy", "web", "--cascade=orphan")
		k.eventually("the ReplicaSet has no owner", func(context.Context) error {
			if got := k.field(set, "{.metadata.ownerReferences}"); got != "" {
				return errors.New(got)
			}
			return nil
		})
		k.owns(strings.TrimPrefix(set, "replicaset.apps/"), 2)
		// A Deployment of the same template takes it over.
		k.apply(web("web", 2))
		k.eventually("the ReplicaSet has an owner", func(context.Context) error {
			if got := k.field(set, "{.metadata.ownerReferences[*].kind}"); got != "Deployment" {
				return errors.New(got)
			}
			return nil
		})
		k.ok("delete", "deploy", "web", "--cascade=foreground", timeoutFlag)
		k.is("what is left at once", k.ok("get", "rs,pods", "-l", "app=web", "-o", "name"), "")
		k.apply(web("web", 1))
		k.ok("rollout", "status", "deploy/web", timeoutFlag)
		k.ok("delete", "deploy", "web")
		k.eventually("nothing is left", func(context.Context) error {
			if left := k.ok("get", "rs,pods", "-l", "app=web", "-o", "name"); left != "" {
				return errors.New(left)
			}
			return nil
		})
	})
	k.sub("orphans have one winner, others' pods are left alone", func(k *kit) {
		features.Shows(k, 105, 106)
		k.apply(strings.Replace(simple("orphan", "sleep"), "app: orphan", "app: shared", 1))
		k.ok("create", "configmap", "somebody")
		k.apply(strings.Replace(simple("taken", "sleep"), "labels: {app: taken}",
			"labels: {app: shared}, ownerReferences: [{apiVersion: v1, kind: ConfigMap, name: somebody, controller: true, uid: "+k.field("cm/somebody", "{.metadata.uid}")+"}]", 1))
		k.okIn(replicaSet("left", "shared", 1)+"---\n"+replicaSet("right", "shared", 1), "apply", "-f", "-")
		left, right := k.owns("left", 1), k.owns("right", 1)
		if (left[0] == "orphan") == (right[0] == "orphan") {
			k.Errorf("left has %q, right has %q", left, right)
		}
		k.is("the other's owner", k.field("pod/taken", "{.metadata.ownerReferences[*].kind}"), "ConfigMap")
		for _, set := range []string{"left", "right"} {
			k.ok("scale", "rs", set, "--replicas=0")
			k.owns(set, 0)
		}
		k.is("the other's owner", k.field("pod/taken", "{.metadata.ownerReferences[*].kind}"), "ConfigMap")
		k.ok("delete", "rs", "left", "right")
		k.ok("delete", "cm", "somebody")
		k.gone("taken") // with its owner
	})
	k.sub("a namespace takes all along", func(k *kit) {
		features.Conforms(k, 71)
		k.ok("create", "namespace", "short-lived")
		k.ok("create", "configmap", "x", "-n", "short-lived")
		k.ok("run", "p", "--image="+image, "-n", "short-lived")
		k.ok("delete", "namespace", "short-lived", timeoutFlag)
		k.has(k.fails("get", "namespace", "short-lived"), "not found")
		k.ok("create", "namespace", "short-lived")
		k.is("what is in the new one", k.ok("get", "pods,configmaps", "-n", "short-lived", "-o", "name", "--field-selector=metadata.name!=kube-root-ca.crt"), "")
		k.ok("delete", "namespace", "short-lived", "--wait=false")
	})
}

// TestE2EXCron lets minutes pass: what a CronJob does when its time comes and the
// Job before still runs.
func TestE2EXCron(t *testing.T) {
	t.Parallel()
	k := start(t, "cron")
	features.Conforms(k, 102, 103, 104, 105)
	for name, spec := range map[string]string{
		"suspended": "suspend: true", "forbid": "concurrencyPolicy: Forbid", "replace": "concurrencyPolicy: Replace", "allow": "concurrencyPolicy: Allow",
	} {
		k.apply(fmt.Sprintf(`apiVersion: batch/v1
kind: CronJob
metadata: {name: %s}
spec:
  schedule: "* * * * *"
  %s
  jobTemplate: {spec: {template: {spec: {restartPolicy: OnFailure, terminationGracePeriodSeconds: 1, containers: [{name: c, image: %q, args: [sleep]}]}}}}
`, name, spec, image))
	}
	jobs := func(ctx context.Context) map[string][]string {
		list, err := k.api.BatchV1().Jobs(k.ns).List(ctx, metav1.ListOptions{})
		k.must(err)
		of := map[string][]string{}
		for _, j := range list.Items {
			if owner := metav1.GetControllerOf(&j); owner != nil && j.DeletionTimestamp == nil {
				of[owner.Name] = append(of[owner.Name], string(j.UID))
			}
		}
		return of
	}
	ctx, cancel := context.WithTimeout(k.Context(), 4*testTimeout) // two full minutes have to come
	defer cancel()
	var replaced string
	k.must(clustertest.Poll(ctx, func(ctx context.Context) error {
		of := jobs(ctx)
		if replaced == "" && len(of["replace"]) == 1 {
			replaced = of["replace"][0]
		}
		if n := len(of["forbid"]); n > 1 {
			k.Fatalf("%d Jobs at once where that is forbidden", n)
		}
		if n := len(of["suspended"]); n > 0 {
			k.Fatalf("%d Jobs of one that is suspended", n)
		}
		if len(of["allow"]) < 2 || len(of["forbid"]) != 1 || replaced == "" || len(of["replace"]) != 1 || of["replace"][0] == replaced {
			return fmt.Errorf("%v; the first one of replace was %s", of, replaced)
		}
		return nil
	}))
	k.is("active", k.field("cronjob/forbid", "{.status.active[*].kind}"), "Job")
	k.is("never", k.field("cronjob/suspended", "{.status.active}{.status.lastScheduleTime}"), "")
	k.ok("delete", "cronjob", "--all")
}
