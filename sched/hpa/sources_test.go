package hpa

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/sched/internal/scales"
)

// TestAsk: what is asked of which API, and what is made of the answers.
func TestAsk(t *testing.T) {
	const status404 = `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"NotFound","code":404}`
	pods := `{"items":[{"describedObject":{"kind":"Pod","name":"p0"},"value":"1500m"},{"describedObject":{"kind":"Pod","name":"p1"},"value":"2"}]}`
	answers := map[string]string{
		"/api":  `{"kind":"APIVersions","versions":["v1"]}`,
		"/apis": `{"kind":"APIGroupList","groups":[]}`,
		"/api/v1": `{"kind":"APIResourceList","groupVersion":"v1","resources":[
			{"name":"services","kind":"Service","namespaced":true},{"name":"nodes","kind":"Node","namespaced":false}]}`,
		"/apis/custom.metrics.k8s.io/v1beta2/namespaces/ns/pods/*/jobs?labelSelector=app=a":                    pods,
		"/apis/custom.metrics.k8s.io/v1beta2/namespaces/ns/services/web/requests?metricLabelSelector=verb=GET": `{"items":[{"value":"7"}]}`,
		"/apis/custom.metrics.k8s.io/v1beta1/nodes/n1/temperature":                                             `{"items":[{"value":"40"}]}`, // not in v1beta2
		"/apis/custom.metrics.k8s.io/v1beta2/namespaces/other/metrics/size":                                    `{"items":[{"value":"1k"}]}`,
		"/apis/external.metrics.k8s.io/v1beta1/namespaces/ns/queue?labelSelector=topic=mail":                   `{"items":[{"value":"3"},{"value":"4"}]}`,
		"/apis/external.metrics.k8s.io/v1beta1/namespaces/ns/none":                                             `{"items":[]}`,
		"/apis/external.metrics.k8s.io/v1beta1/namespaces/ns/odd":                                              `{"items":{}}`,
	}
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		at := r.URL.Path
		if q := r.URL.Query(); len(q) > 0 {
			var params []string
			for _, name := range []string{"labelSelector", "metricLabelSelector"} {
				if q.Has(name) {
					params = append(params, name+"="+q.Get(name))
				}
			}
			at += "?" + strings.Join(params, "&")
		}
		w.Header().Set("Content-Type", "application/json")
		answer, ok := answers[at]
		if !ok {
			w.WriteHeader(http.StatusNotFound)
			answer = status404
		}
		fmt.Fprint(w, answer)
	}))
	defer server.Close()
	client, err := kubernetes.NewForConfig(&rest.Config{Host: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	c := &controller{client: client, scales: scales.New(client)}

	metric := func(name, label, value string) (id autoscalingv2.MetricIdentifier) {
		id.Name = name
		if label != "" {
			id.Selector = &metav1.LabelSelector{MatchLabels: map[string]string{label: value}}
		}
		return id
	}
	of := func(kind, name string, id autoscalingv2.MetricIdentifier) autoscalingv2.MetricSpec {
		return autoscalingv2.MetricSpec{Object: &autoscalingv2.ObjectMetricSource{
			DescribedObject: autoscalingv2.CrossVersionObjectReference{APIVersion: "v1", Kind: kind, Name: name}, Metric: id}}
	}
	outer := func(id autoscalingv2.MetricIdentifier) autoscalingv2.MetricSpec {
		return autoscalingv2.MetricSpec{External: &autoscalingv2.ExternalMetricSource{Metric: id}}
	}
	for _, test := range []struct {
		name   string
		metric autoscalingv2.MetricSpec
		want   string // values, or words of the error
	}{
		{"pods", autoscalingv2.MetricSpec{Pods: &autoscalingv2.PodsMetricSource{Metric: metric("jobs", "", "")}}, "p0=1500 p1=2000"},
		{"an object", of("Service", "web", metric("requests", "verb", "GET")), "=7000"},
		{"an object of the older version", of("Node", "n1", metric("temperature", "", "")), "=40000"},
		{"a namespace", of("Namespace", "other", metric("size", "", "")), "=1000000"},
		{"a kind that is not served", of("Gadget", "g", metric("size", "", "")), `no matches for kind "Gadget"`},
		{"a metric that is not there", of("Service", "web", metric("colour", "", "")), "unable to fetch metrics from custom metrics API"},
		{"another system", outer(metric("queue", "topic", "mail")), "=3000 =4000"},
		{"another system that has none", outer(metric("none", "", "")), "no metrics returned from external metrics API"},
		{"another system that answers nonsense", outer(metric("odd", "", "")), "unable to read the answer of external metrics API"},
	} {
		t.Run(test.name, func(t *testing.T) {
			in := Input{Autoscaler: &autoscalingv2.HorizontalPodAutoscaler{}}
			in.Autoscaler.Namespace = "ns"
			in.Autoscaler.Spec.Metrics = []autoscalingv2.MetricSpec{{}, test.metric}
			c.ask(t.Context(), &in, "app=a")
			a := in.Answers[1]
			var got []string
			for _, v := range a.Values {
				got = append(got, fmt.Sprintf("%s=%d", v.Pod, v.Milli))
			}
			switch {
			case a.Err != nil && !strings.Contains(a.Err.Error(), test.want):
				t.Errorf("error %v, want %q", a.Err, test.want)
			case a.Err == nil && strings.Join(got, " ") != test.want:
				t.Errorf("got %q, want %q", got, test.want)
			}
			if in.Metrics != nil || in.MetricsErr != nil {
				t.Error("metrics of resources were asked for, though no metric is of one")
			}
		})
	}
}
