package schedtest_test

import (
	"fmt"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/sched/schedtest"
)

// Endpoints are written for a Service with a selector, and mirrored for one
// without, until the Service goes.
func TestLineEndpoints(t *testing.T) {
	l := newLine(t)
	port := []corev1.ServicePort{{Port: 80}}
	for _, s := range []*corev1.Service{
		{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: corev1.ServiceSpec{Selector: map[string]string{"app": "web"}, Ports: port}},
		{ObjectMeta: metav1.ObjectMeta{Name: "db"}, Spec: corev1.ServiceSpec{Ports: port}},
	} {
		if _, err := l.client.CoreV1().Services(ns).Create(t.Context(), s, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	manual := &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{Name: "db"}, Subsets: []corev1.EndpointSubset{{
		Addresses: []corev1.EndpointAddress{{IP: "192.0.2.7"}}, Ports: []corev1.EndpointPort{{Port: 5432}},
	}}}
	if _, err := l.client.CoreV1().Endpoints(ns).Create(t.Context(), manual, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	l.deploy("web", 2)
	l.running("web", 2, "v1")
	list, err := l.client.CoreV1().Pods(ns).List(t.Context(), metav1.ListOptions{LabelSelector: "app=web"})
	if err != nil {
		t.Fatal(err)
	}
	shows := func(what []string, want ...string) {
		t.Helper()
		schedtest.Eventually(t, func() string {
			out := l.kubectl(what...)
			for _, w := range want {
				if !strings.Contains(out, w) {
					return fmt.Sprintf("kubectl %v has no %q:\n%s", what, w, out)
				}
			}
			return ""
		})
	}
	for _, pod := range list.Items {
		shows([]string{"get", "ep", "web"}, pod.Status.PodIP+":80")
	}
	shows([]string{"describe", "svc", "db"}, "192.0.2.7:5432")
	shows([]string{"get", "endpointslices", "-l", "endpointslice.kubernetes.io/managed-by=endpointslicemirroring-controller.k8s.io"}, "192.0.2.7", "5432")
	l.kubectl("patch", "endpoints", "db", "--type=json", `-p=[{"op":"replace","path":"/subsets/0/addresses/0/ip","value":"192.0.2.8"}]`)
	shows([]string{"get", "endpointslices", "-l", "kubernetes.io/service-name=db"}, "192.0.2.8")
	l.kubectl("delete", "svc", "web", "db")
	schedtest.Eventually(t, func() string {
		out := l.kubectl("get", "endpoints,endpointslices")
		if strings.Contains(out, "web") || strings.Contains(out, "db") {
			return "of Services that are no more:\n" + out
		}
		return ""
	})
}
