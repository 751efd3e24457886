package schedtest_test

import (
	"fmt"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	schedulingv1 "k8s.io/api/scheduling/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/sched/internal/pods"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// images waits until exactly the named pods are ready, each with its image.
func (l *line) images(selector string, want map[string]string) {
	l.t.Helper()
	schedtest.Eventually(l.t, func() string {
		list, err := l.client.CoreV1().Pods(ns).List(l.t.Context(), metav1.ListOptions{LabelSelector: selector})
		if err != nil {
			return err.Error()
		}
		got := map[string]string{}
		for i := range list.Items {
			pod := &list.Items[i]
			if pods.Ready(pod) && pod.DeletionTimestamp == nil {
				got[pod.Name] = pod.Spec.Containers[0].Image
			}
		}
		if fmt.Sprint(got) != fmt.Sprint(want) || len(list.Items) != len(want) {
			return fmt.Sprintf("%d pods, ready are %v, want %v", len(list.Items), got, want)
		}
		return ""
	})
}

// A StatefulSet as kubectl rolls, undoes and scales it.
func TestLineStatefulSet(t *testing.T) {
	l := newLine(t)
	replicas := int32(3)
	_, err := l.client.AppsV1().StatefulSets(ns).Create(t.Context(), &appsv1.StatefulSet{
		ObjectMeta: metav1.ObjectMeta{Name: "db"},
		Spec: appsv1.StatefulSetSpec{
			Replicas: &replicas, ServiceName: "db",
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "db"}},
			Template: schedtest.Template("db", "v1"),
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	l.images("app=db", map[string]string{"db-0": "v1", "db-1": "v1", "db-2": "v1"})
	l.kubectl("set", "image", "statefulset/db", "c=v2")
	if out := l.kubectl("rollout", "status", "statefulset/db", "--timeout=60s"); !strings.Contains(out, "partitioned roll out complete") && !strings.Contains(out, "rolling update complete") {
		t.Errorf("rollout status says %s", out)
	}
	l.images("app=db", map[string]string{"db-0": "v2", "db-1": "v2", "db-2": "v2"})
	l.kubectl("rollout", "undo", "statefulset/db")
	l.images("app=db", map[string]string{"db-0": "v1", "db-1": "v1", "db-2": "v1"})
	if out := l.kubectl("rollout", "history", "statefulset/db"); !strings.Contains(out, "\n2 ") || !strings.Contains(out, "\n3 ") || strings.Contains(out, "\n1 ") {
		t.Errorf("history is\n%s", out)
	}
	l.kubectl("scale", "statefulset/db", "--replicas=1")
	l.images("app=db", map[string]string{"db-0": "v1"})
	schedtest.Eventually(t, func() string { // the status follows the pods
		if out := l.kubectl("get", "sts,controllerrevisions"); !strings.Contains(out, "1/1") || !strings.Contains(out, "statefulset.apps/db") {
			return "tables:\n" + out
		}
		return ""
	})
	first, err := l.client.CoreV1().Pods(ns).Get(t.Context(), "db-0", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.client.CoreV1().Pods(ns).Delete(t.Context(), "db-0", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	schedtest.Eventually(t, func() string {
		again, err := l.client.CoreV1().Pods(ns).Get(t.Context(), "db-0", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if again.UID == first.UID || again.Status.Phase != corev1.PodRunning {
			return "the pod is not made anew"
		}
		return ""
	})
}

// A DaemonSet follows its nodes and rolls.
func TestLineDaemonSet(t *testing.T) {
	l := newLine(t)
	_, err := l.client.AppsV1().DaemonSets(ns).Create(t.Context(), &appsv1.DaemonSet{
		ObjectMeta: metav1.ObjectMeta{Name: "logs"},
		Spec: appsv1.DaemonSetSpec{
			Selector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "logs"}},
			Template: schedtest.Template("logs", "v1"),
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	on := func(image string, nodes ...string) {
		t.Helper()
		schedtest.Eventually(t, func() string {
			list, err := l.client.CoreV1().Pods(ns).List(t.Context(), metav1.ListOptions{LabelSelector: "app=logs"})
			if err != nil {
				return err.Error()
			}
			got := map[string]string{}
			for i := range list.Items {
				if pods.Ready(&list.Items[i]) && list.Items[i].DeletionTimestamp == nil {
					got[list.Items[i].Spec.NodeName] = list.Items[i].Spec.Containers[0].Image
				}
			}
			want := map[string]string{}
			for _, node := range nodes {
				want[node] = image
			}
			if fmt.Sprint(got) != fmt.Sprint(want) || len(list.Items) != len(want) {
				return fmt.Sprintf("%d pods, ready on %v, want %v", len(list.Items), got, want)
			}
			return ""
		})
	}
	on("v1", "n1", "n2", "n3")
	l.kubectl("set", "image", "daemonset/logs", "c=v2")
	if out := l.kubectl("rollout", "status", "daemonset/logs", "--timeout=60s"); !strings.Contains(out, "successfully rolled out") {
		t.Errorf("rollout status says %s", out)
	}
	on("v2", "n1", "n2", "n3")
	l.kubectl("rollout", "undo", "daemonset/logs")
	on("v1", "n1", "n2", "n3")
	l.kubectl("taint", "node", "n2", "gpu=yes:NoExecute")
	on("v1", "n1", "n3")
	l.kubectl("cordon", "n3") // daemons belong to their node
	l.kubectl("delete", "pod", "-l", "app=logs", "--wait=false")
	on("v1", "n1", "n3")
	schedtest.Eventually(t, func() string { // the status follows the pods
		if out := l.kubectl("get", "ds"); !strings.Contains(out, "2         2         2       2            2") {
			return "table:\n" + out
		}
		return ""
	})
}

// end makes the nodes' word of it that all running pods of the selector ended.
func (l *line) end(selector string, phase corev1.PodPhase) {
	l.t.Helper()
	list, err := l.client.CoreV1().Pods(ns).List(l.t.Context(), metav1.ListOptions{LabelSelector: selector})
	if err != nil {
		l.t.Fatal(err)
	}
	for _, pod := range list.Items {
		if pod.Status.Phase != corev1.PodRunning {
			continue
		}
		patch := fmt.Sprintf(`{"status":{"phase":%q,"conditions":[{"type":"Ready","status":"False"}]}}`, phase)
		if _, err := l.client.CoreV1().Pods(ns).Patch(l.t.Context(), pod.Name, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{}, "status"); err != nil && !apierrors.IsNotFound(err) { // one on its way out may have gone
			l.t.Fatal(err)
		}
	}
}

// Jobs run to their end, are suspended, and go with their pods.
func TestLineJob(t *testing.T) {
	l := newLine(t)
	template := schedtest.Template("pi", "v1")
	template.Spec.RestartPolicy = corev1.RestartPolicyNever
	indexed := batchv1.IndexedCompletion
	_, err := l.client.BatchV1().Jobs(ns).Create(t.Context(), &batchv1.Job{
		ObjectMeta: metav1.ObjectMeta{Name: "pi"},
		Spec:       batchv1.JobSpec{Template: template, CompletionMode: &indexed, Completions: ptr.To[int32](5), Parallelism: ptr.To[int32](2)},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	status := func(check func(s batchv1.JobStatus) bool, each func()) {
		t.Helper()
		schedtest.Eventually(t, func() string {
			j, err := l.client.BatchV1().Jobs(ns).Get(t.Context(), "pi", metav1.GetOptions{})
			if err != nil {
				return err.Error()
			}
			if !check(j.Status) {
				if each != nil {
					each()
				}
				return fmt.Sprintf("status %+v", j.Status)
			}
			return ""
		})
	}
	status(func(s batchv1.JobStatus) bool { return s.Active == 2 && *s.Ready == 2 }, nil)
	l.kubectl("patch", "job/pi", "-p", `{"spec":{"suspend":true}}`)
	status(func(s batchv1.JobStatus) bool { return s.Active == 0 && s.StartTime == nil && s.Failed == 0 }, nil)
	l.kubectl("patch", "job/pi", "-p", `{"spec":{"suspend":false}}`)
	status(func(s batchv1.JobStatus) bool {
		return s.CompletionTime != nil && s.CompletedIndexes == "0-4" && s.Succeeded == 5 && s.Failed == 0
	},
		func() { l.end("job-name=pi", corev1.PodSucceeded) })
	if out := l.kubectl("get", "jobs"); !strings.Contains(out, "Complete") || !strings.Contains(out, "5/5") {
		t.Errorf("table:\n%s", out)
	}
	l.kubectl("wait", "--for=condition=complete", "job/pi", "--timeout=30s")
	l.kubectl("delete", "job", "pi")
	schedtest.Eventually(t, func() string {
		list, err := l.client.CoreV1().Pods(ns).List(t.Context(), metav1.ListOptions{LabelSelector: "job-name=pi"})
		if err != nil || len(list.Items) > 0 {
			return fmt.Sprintf("%d pods of the deleted job, %v", len(list.Items), err)
		}
		return ""
	})
}

// A pod of higher priority displaces one of lower, and tells where it goes.
func TestLinePreemption(t *testing.T) {
	l := newLine(t)
	for name, value := range map[string]int32{"low": 1, "high": 1000} {
		if _, err := l.client.SchedulingV1().PriorityClasses().Create(t.Context(), &schedulingv1.PriorityClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Value: value}, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	pod := func(name, class string) *corev1.Pod {
		p := schedtest.Pod(name).CPU("3").Obj()
		p.Namespace, p.UID, p.Status, p.Spec.PriorityClassName = ns, "", corev1.PodStatus{}, class
		p, err := l.client.CoreV1().Pods(ns).Create(t.Context(), p, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return p
	}
	for i := range 3 {
		pod(fmt.Sprintf("low-%d", i), "low")
	}
	ready := func(want int) []corev1.Pod {
		t.Helper()
		var list *corev1.PodList
		schedtest.Eventually(t, func() string {
			var err error
			if list, err = l.client.CoreV1().Pods(ns).List(t.Context(), metav1.ListOptions{}); err != nil {
				return err.Error()
			}
			n := 0
			for i := range list.Items {
				if pods.Ready(&list.Items[i]) && list.Items[i].DeletionTimestamp == nil {
					n++
				}
			}
			if n != want || len(list.Items) != want {
				return fmt.Sprintf("%d of %d pods are ready, want %d", n, len(list.Items), want)
			}
			return ""
		})
		return list.Items
	}
	ready(3)
	pod("urgent", "high")
	schedtest.Eventually(t, func() string {
		p, err := l.client.CoreV1().Pods(ns).Get(t.Context(), "urgent", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if !pods.Ready(p) {
			return fmt.Sprintf("status %+v", p.Status)
		}
		return ""
	})
	low := 0
	for _, p := range ready(3) {
		if p.Spec.PriorityClassName == "low" {
			low++
		}
	}
	if low != 2 {
		t.Errorf("%d pods of low priority are left, want 2: one makes enough room", low)
	}
	schedtest.Eventually(t, func() string {
		if out := l.kubectl("get", "events"); !strings.Contains(out, "Preempted by pod") {
			return "no event tells of it:\n" + out
		}
		return ""
	})
}
