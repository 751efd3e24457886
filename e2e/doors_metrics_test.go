package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/e2e/cluster"
)

// adapter serves custom.metrics.k8s.io and external.metrics.k8s.io, as adapters of
// monitoring systems do: each pod of a selector has its share of three jobs, every
// Service 6 requests, and a queue 4 messages of each topic.
func (e *env) adapter(ns string) http.Handler {
	answer := func(w http.ResponseWriter, kind string, items []map[string]any) {
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{"kind": kind, "items": items})
	}
	mux := http.NewServeMux()
	for group, version := range map[string]string{"custom.metrics.k8s.io": "v1beta2", "external.metrics.k8s.io": "v1beta1"} {
		mux.HandleFunc("GET /apis/"+group+"/"+version, func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Type", "application/json")
			fmt.Fprintf(w, `{"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "%s/%s", "resources": []}`, group, version)
		})
	}
	custom := "GET /apis/custom.metrics.k8s.io/v1beta2/namespaces/" + ns
	mux.HandleFunc(custom+"/pods/{any}/jobs", func(w http.ResponseWriter, r *http.Request) {
		list, err := e.api.CoreV1().Pods(ns).List(r.Context(), metav1.ListOptions{LabelSelector: r.URL.Query().Get("labelSelector")})
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		var items []map[string]any
		for _, p := range list.Items {
			items = append(items, map[string]any{"describedObject": map[string]any{"kind": "Pod", "name": p.Name}, "value": fmt.Sprintf("%dm", 3000/len(list.Items))})
		}
		answer(w, "MetricValueList", items)
	})
	mux.HandleFunc(custom+"/services/{name}/requests", func(w http.ResponseWriter, r *http.Request) {
		answer(w, "MetricValueList", []map[string]any{{"describedObject": map[string]any{"kind": "Service", "name": r.PathValue("name")}, "value": "6"}})
	})
	mux.HandleFunc("GET /apis/external.metrics.k8s.io/v1beta1/namespaces/"+ns+"/queue", func(w http.ResponseWriter, r *http.Request) {
		items := []map[string]any{{"metricName": "queue", "value": "4"}}
		if r.URL.Query().Get("labelSelector") == "" {
			items = append(items, items[0])
		}
		answer(w, "ExternalMetricValueList", items)
	})
	return mux
}

// showCustomMetrics scales three Deployments by metrics that an adapter behind the
// API serves.
func (e *env) showCustomMetrics(t *testing.T, ns string, out *outside, n cluster.Node) {
	port := out.serve(e, n.Name, n.Addr, e.adapter(ns))
	e.ctlIn(serviceOf("metrics", ns, n, port), "apply", "-f", "-")
	ca, err := json.Marshal([]byte(out.ca))
	if err != nil {
		t.Fatal(err)
	}
	for _, gv := range []string{"v1beta2.custom.metrics.k8s.io", "v1beta1.external.metrics.k8s.io"} {
		version, group, _ := strings.Cut(gv, ".")
		e.ctlIn(fmt.Sprintf("apiVersion: apiregistration.k8s.io/v1\nkind: APIService\nmetadata: {name: %s}\nspec: {group: %s, version: %s, "+
			"groupPriorityMinimum: 100, versionPriority: 100, service: {name: metrics, namespace: %s}, caBundle: %s}\n", gv, group, version, ns, ca), "apply", "-f", "-")
		e.apiAvailable(gv)
	}
	const scaler = `apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata: {name: %[1]s, namespace: %[2]s}
spec: {scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: %[1]s}, maxReplicas: 5, metrics: [%[3]s]}
`
	cases := []struct{ name, metric, targets string }{
		{"by-pods", `{type: Pods, pods: {metric: {name: jobs}, target: {type: AverageValue, averageValue: "1"}}}`, "1/1"},
		{"by-object", `{type: Object, object: {describedObject: {apiVersion: v1, kind: Service, name: metrics}, metric: {name: requests}, target: {type: AverageValue, averageValue: "3"}}}`, "3/3"},
		{"by-external", `{type: External, external: {metric: {name: queue, selector: {matchLabels: {topic: mail}}}, target: {type: AverageValue, averageValue: "1"}}}`, "1/1"},
	}
	want := map[string]int32{"by-pods": 3, "by-object": 2, "by-external": 4}
	for _, c := range cases {
		e.createDeployment(ns, deployment(c.name, 1))
		if _, warning, _ := e.run("clusterctl", fmt.Sprintf(scaler, c.name, ns, c.metric), "apply", "-f", "-"); strings.Contains(warning, "Warning") {
			t.Errorf("%s: %s", c.name, warning)
		}
	}
	for _, c := range cases {
		e.eventually(fmt.Sprintf("%s has %d replicas", c.name, want[c.name]), func(ctx context.Context) error {
			h, err := e.api.AutoscalingV2().HorizontalPodAutoscalers(ns).Get(ctx, c.name, metav1.GetOptions{})
			if err != nil {
				return err
			}
			if shown := e.ctl("-n", ns, "get", "hpa", c.name, "--no-headers"); h.Status.CurrentReplicas != want[c.name] || !strings.Contains(shown, " "+c.targets+" ") {
				return errors.New(shown + fmt.Sprint(h.Status.Conditions))
			}
			return nil
		})
	}
}
