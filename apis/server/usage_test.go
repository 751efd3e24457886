package server_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"
	metrics "k8s.io/metrics/pkg/apis/metrics/v1beta1"
	client "k8s.io/metrics/pkg/client/clientset/versioned"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

// warnings collects what a server warns of.
type warnings struct {
	mu   sync.Mutex
	said []string
}

func (w *warnings) HandleWarningHeader(_ int, _, text string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.said = append(w.said, text)
}

// TestUsage: metrics.k8s.io as `kubectl top` asks for it.
func TestUsage(t *testing.T) {
	// A node on which a quarter of a processor is used by each container.
	began := time.Now()
	node := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path != "/metrics/resource" {
			http.NotFound(w, req)
			return
		}
		now := time.Now()
		cpu, ms := now.Sub(began).Seconds()/4, now.UnixMilli()
		fmt.Fprintf(w, "# TYPE node_cpu_usage_seconds_total counter\nnode_cpu_usage_seconds_total %v %d\n", cpu, ms)
		fmt.Fprintf(w, "# TYPE node_memory_working_set_bytes gauge\nnode_memory_working_set_bytes 4096 %d\n", ms)
		for family, value := range map[string]any{"container_cpu_usage_seconds_total counter": cpu, "container_memory_working_set_bytes gauge": 2048} {
			name, _, _ := strings.Cut(family, " ")
			fmt.Fprintf(w, "# TYPE %s\n", family)
			for _, c := range [][2]string{{"one", "main"}, {"two", "main"}, {"two", "side"}} {
				fmt.Fprintf(w, "%s{container=%q,namespace=\"default\",pod=%q} %v %d\n", name, c[1], c[0], value, ms)
			}
		}
	}))
	t.Cleanup(node.Close)
	s := servertest.Start(t, func(c *server.Config) {
		c.NodeTransport = func(_ context.Context, name string) (http.RoundTripper, *url.URL, error) {
			if name != "n1" {
				return nil, nil, errors.New("no route")
			}
			base, err := url.Parse(node.URL)
			return node.Client().Transport, base, err
		}
	})
	for _, name := range []string{"n1", "n2"} {
		must[*corev1.Node](t)(s.Client.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: meta(name)}, metav1.CreateOptions{}))
	}
	for name, on := range map[string]string{"one": "n1", "two": "n1", "lost": "n2", "waiting": ""} {
		p := createPod(t, s.Client, pod(name), on)
		if on != "" {
			p.Status.Phase = corev1.PodRunning
			must[*corev1.Pod](t)(s.Client.CoreV1().Pods("default").UpdateStatus(t.Context(), p, metav1.UpdateOptions{}))
		}
	}
	config := rest.CopyConfig(s.Listen(t))
	var warned warnings
	config.WarningHandler = &warned
	config.ContentType = "application/vnd.kubernetes.protobuf" // as kubectl top does
	api := must[*client.Clientset](t)(client.NewForConfig(config))

	nodes := must[*metrics.NodeMetricsList](t)(api.MetricsV1beta1().NodeMetricses().List(waitContext(t), metav1.ListOptions{}))
	if len(nodes.Items) != 1 || nodes.Items[0].Name != "n1" || nodes.Items[0].Usage.Memory().Value() != 4096 || nodes.Items[0].Window.Duration <= 0 {
		t.Errorf("nodes %+v", nodes.Items)
	}
	if len(warned.said) != 1 || warned.said[0] != "nothing is known of the usage on node n2: no route" {
		t.Errorf("warnings %q", warned.said)
	}
	_, err := api.MetricsV1beta1().NodeMetricses().Get(waitContext(t), "n2", metav1.GetOptions{})
	if !apierrors.IsServiceUnavailable(err) || !strings.Contains(err.Error(), "node n2: no route") {
		t.Errorf("a node that does not answer: %v", err)
	}
	if _, err := api.MetricsV1beta1().NodeMetricses().Get(waitContext(t), "n9", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("no such node: %v", err)
	}

	pods := api.MetricsV1beta1().PodMetricses("default")
	names := func(o metav1.ListOptions) (out []string) {
		for _, p := range must[*metrics.PodMetricsList](t)(pods.List(waitContext(t), o)).Items {
			for _, c := range p.Containers {
				out = append(out, fmt.Sprintf("%s/%s %s/%s %s", p.Namespace, p.Name, p.Labels["app"], c.Name, c.Usage.Memory()))
				if n := c.Usage.Cpu().MilliValue(); n < 225 || n > 275 { // a sample's time is rounded to milliseconds
					t.Errorf("%s/%s uses %d thousandths of a processor, want 250", p.Name, c.Name, n)
				}
			}
		}
		return out
	}
	if diff := cmp.Diff([]string{"default/one one/main 2Ki", "default/two two/main 2Ki", "default/two two/side 2Ki"}, names(metav1.ListOptions{})); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"default/one one/main 2Ki"}, names(metav1.ListOptions{LabelSelector: "app=one"})); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff([]string{"default/one one/main 2Ki"}, names(metav1.ListOptions{FieldSelector: "metadata.name=one"})); diff != "" {
		t.Error(diff)
	}
	if list := must[*metrics.PodMetricsList](t)(api.MetricsV1beta1().PodMetricses("other").List(waitContext(t), metav1.ListOptions{})); len(list.Items) != 0 {
		t.Errorf("another namespace has %+v", list.Items)
	}
	for _, name := range []string{"waiting", "none"} {
		if _, err := pods.Get(waitContext(t), name, metav1.GetOptions{}); !apierrors.IsNotFound(err) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if p := must[*metrics.PodMetrics](t)(pods.Get(waitContext(t), "two", metav1.GetOptions{})); len(p.Containers) != 2 {
		t.Errorf("%+v", p)
	}

	first := must[*metrics.PodMetricsList](t)(pods.List(waitContext(t), metav1.ListOptions{Limit: 1}))
	if first.Continue == "" {
		t.Errorf("the first page of pods does not say where the next begins: %+v", first.ListMeta)
	}

	listed := must[*metav1.APIResourceList](t)(s.Client.Discovery().ServerResourcesForGroupVersion("metrics.k8s.io/v1beta1"))
	kinds := map[string]string{}
	for _, r := range listed.APIResources {
		kinds[r.Name] = fmt.Sprint(r.Kind, " ", r.Namespaced, " ", r.Verbs)
	}
	if diff := cmp.Diff(map[string]string{"nodes": "NodeMetrics false [get list]", "pods": "PodMetrics true [get list]"}, kinds); diff != "" {
		t.Error(diff)
	}
	groups := must[*metav1.APIGroupList](t)(s.Client.Discovery().ServerGroups())
	if !slices.ContainsFunc(groups.Groups, func(g metav1.APIGroup) bool { return g.Name == "metrics.k8s.io" }) {
		t.Errorf("groups %+v", groups.Groups)
	}
	table := must[[]byte](t)(s.Client.CoreV1().RESTClient().Get().AbsPath("/apis/metrics.k8s.io/v1beta1/namespaces/default/pods").
		SetHeader("Accept", "application/json;as=Table;g=meta.k8s.io;v=v1").DoRaw(waitContext(t)))
	for _, part := range []string{`"kind":"Table"`, `"name":"cpu"`, `"cells":["one",`, `"2Ki"`} {
		if !strings.Contains(string(table), part) {
			t.Errorf("the table has no %s: %s", part, table)
		}
	}
}
