package schedtest_test

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// usage plays what agents tell of the memory that pods use.
type usage struct {
	line  *line
	each  atomic.Int64 // MiB a pod
	began time.Time
}

func (u *usage) transport(_ context.Context, node string) (http.RoundTripper, *url.URL, error) {
	return u, &url.URL{Scheme: "http", Host: node}, nil
}

// RoundTrip answers /metrics/resource.
func (u *usage) RoundTrip(req *http.Request) (*http.Response, error) {
	list, err := u.line.client.CoreV1().Pods(ns).List(req.Context(), metav1.ListOptions{FieldSelector: "spec.nodeName=" + req.URL.Host})
	if err != nil {
		return nil, err
	}
	now := time.Now()
	families := []struct{ name, kind string }{
		{"container_cpu_usage_seconds_total", "counter"}, {"container_memory_working_set_bytes", "gauge"}, {"container_start_time_seconds", "gauge"}}
	values := []string{fmt.Sprint(now.Sub(u.began).Seconds()), fmt.Sprint(u.each.Load() << 20), fmt.Sprint(u.began.Unix())}
	var b strings.Builder
	fmt.Fprintf(&b, "# TYPE node_cpu_usage_seconds_total counter\nnode_cpu_usage_seconds_total %s %d\n", values[0], now.UnixMilli())
	for i, f := range families {
		fmt.Fprintf(&b, "# TYPE %s %s\n", f.name, f.kind)
		for _, pod := range list.Items {
			fmt.Fprintf(&b, "%s{container=\"c\",namespace=%q,pod=%q} %s %d\n", f.name, pod.Namespace, pod.Name, values[i], now.UnixMilli())
		}
	}
	return &http.Response{StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader(b.String()))}, nil
}

// `kubectl autoscale` makes an autoscaler that scales up, and down when its
// window is over; autoscaling/v1 shows the same object.
func TestLineAutoscale(t *testing.T) {
	u := &usage{began: time.Now()}
	l := newLineWith(t, func(c *server.Config) { c.NodeTransport = u.transport })
	u.line = l
	u.each.Store(300)
	d := schedtest.Deployment("web", 1)
	d.Namespace, d.UID = ns, ""
	d.Spec.Template.Spec.Containers[0].Resources.Requests = corev1.ResourceList{"memory": resource.MustParse("100Mi")}
	if _, err := l.client.AppsV1().Deployments(ns).Create(t.Context(), d, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	l.running("web", 1, "v1")

	scalers := l.client.AutoscalingV2().HorizontalPodAutoscalers(ns)
	made, err := scalers.Create(t.Context(), &autoscalingv2.HorizontalPodAutoscaler{
		ObjectMeta: metav1.ObjectMeta{Name: "web"},
		Spec: autoscalingv2.HorizontalPodAutoscalerSpec{
			ScaleTargetRef: autoscalingv2.CrossVersionObjectReference{APIVersion: "apps/v1", Kind: "Deployment", Name: "web"},
			MaxReplicas:    4,
			Metrics: []autoscalingv2.MetricSpec{{Type: "Resource", Resource: &autoscalingv2.ResourceMetricSource{
				Name: "memory", Target: autoscalingv2.MetricTarget{Type: "Utilization", AverageUtilization: ptr.To[int32](100)}}}},
		},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	// 300 % of one pod is three pods.
	l.running("web", 3, "v1")
	schedtest.Eventually(t, func() string {
		a, err := scalers.Get(t.Context(), "web", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if a.Status.LastScaleTime == nil || a.Status.DesiredReplicas != 3 || len(a.Status.Conditions) != 3 || len(a.Status.CurrentMetrics) != 1 {
			return fmt.Sprintf("status %+v", a.Status)
		}
		events, err := l.client.CoreV1().Events(ns).List(t.Context(), metav1.ListOptions{FieldSelector: "involvedObject.name=web,reason=SuccessfulRescale"})
		if err != nil || len(events.Items) == 0 || !strings.HasPrefix(events.Items[0].Message, "New size: 3; reason: memory resource utilization") {
			return fmt.Sprintf("events %+v, %v", events, err)
		}
		return ""
	})

	// The other version reads the same, and writes back without a loss.
	old := l.client.AutoscalingV1().HorizontalPodAutoscalers(ns)
	view, err := old.Get(t.Context(), "web", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if view.Spec.MaxReplicas != 4 || view.Status.DesiredReplicas != 3 || view.UID != made.UID {
		t.Errorf("as autoscaling/v1 %+v", view)
	}
	patch := []byte(`{"spec":{"maxReplicas":5}}`)
	if _, err := old.Patch(t.Context(), "web", types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	list, err := old.List(t.Context(), metav1.ListOptions{})
	if err != nil || len(list.Items) != 1 || list.Items[0].Spec.MaxReplicas != 5 {
		t.Errorf("list as autoscaling/v1: %+v, %v", list, err)
	}
	after, err := scalers.Get(t.Context(), "web", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(after.Annotations) != 0 || after.Spec.MaxReplicas != 5 || after.Spec.Metrics[0].Resource.Name != "memory" {
		t.Errorf("after a write of autoscaling/v1: annotations %v, %+v", after.Annotations, after.Spec)
	}
	if _, err := old.Create(t.Context(), &autoscalingv1.HorizontalPodAutoscaler{ObjectMeta: metav1.ObjectMeta{Name: "other"}, Spec: autoscalingv1.HorizontalPodAutoscalerSpec{
		ScaleTargetRef: autoscalingv1.CrossVersionObjectReference{APIVersion: "apps/v1", Kind: "Deployment", Name: "none"}, MaxReplicas: 2}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	schedtest.Eventually(t, func() string {
		a, err := scalers.Get(t.Context(), "other", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if len(a.Status.Conditions) == 0 || a.Status.Conditions[0].Reason != "FailedGetScale" || a.Spec.Metrics[0].Resource.Name != "cpu" {
			return fmt.Sprintf("%+v", a)
		}
		return ""
	})

	// A quarter of the target, and no window: one pod is enough.
	u.each.Store(25)
	down := []byte(`{"spec":{"behavior":{"scaleDown":{"stabilizationWindowSeconds":0}}}}`)
	if _, err := scalers.Patch(t.Context(), "web", types.MergePatchType, down, metav1.PatchOptions{}); err != nil {
		t.Fatal(err)
	}
	l.running("web", 1, "v1")
}

// What kubectl says and shows; its autoscale sends autoscaling/v2 first.
func TestLineAutoscaleKubectl(t *testing.T) {
	l := newLine(t)
	l.deploy("web", 1)
	l.kubectl("autoscale", "deployment/web", "--max=4", "--cpu-percent=50")
	a, err := l.client.AutoscalingV2().HorizontalPodAutoscalers(ns).Get(t.Context(), "web", metav1.GetOptions{})
	if err != nil || *a.Spec.Metrics[0].Resource.Target.AverageUtilization != 50 {
		t.Fatalf("%+v, %v", a, err)
	}
	if out := l.kubectl("get", "hpa"); !strings.Contains(out, "TARGETS") || !strings.Contains(out, "Deployment/web   cpu: <unknown>/50%") {
		t.Errorf("table:\n%s", out)
	}
	// Nobody measures here: it says so.
	schedtest.Eventually(t, func() string {
		if out := l.kubectl("describe", "hpa", "web"); !strings.Contains(out, "FailedGetResourceMetric") {
			return out
		}
		return ""
	})
}
