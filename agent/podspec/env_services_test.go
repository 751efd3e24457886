package podspec

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"
)

func TestServiceEnv(t *testing.T) {
	service := func(ns, name, ip string, ports ...v1.ServicePort) *v1.Service {
		return &v1.Service{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: ns}, Spec: v1.ServiceSpec{ClusterIP: ip, Ports: ports}}
	}
	all := []*v1.Service{
		service("default", "kubernetes", "10.96.0.1", v1.ServicePort{Name: "https", Port: 443}),
		service("default", "web", "10.96.0.2", v1.ServicePort{Port: 80}),
		service("apps", "my-db", "10.96.0.3", v1.ServicePort{Name: "sql-main", Port: 5432, Protocol: v1.ProtocolTCP}, v1.ServicePort{Name: "stats", Port: 53, Protocol: v1.ProtocolUDP}),
		service("apps", "headless", v1.ClusterIPNone, v1.ServicePort{Port: 80}),
		service("apps", "external", ""),
	}
	list := func(_ context.Context, ns string) ([]*v1.Service, error) {
		var out []*v1.Service
		for _, s := range all {
			if s.Namespace == ns {
				out = append(out, s)
			}
		}
		return out, nil
	}
	api := [][2]string{
		{"KUBERNETES_SERVICE_HOST", "10.96.0.1"}, {"KUBERNETES_SERVICE_PORT", "443"}, {"KUBERNETES_SERVICE_PORT_HTTPS", "443"},
		{"KUBERNETES_PORT", "tcp://10.96.0.1:443"}, {"KUBERNETES_PORT_443_TCP", "tcp://10.96.0.1:443"},
		{"KUBERNETES_PORT_443_TCP_PROTO", "tcp"}, {"KUBERNETES_PORT_443_TCP_PORT", "443"}, {"KUBERNETES_PORT_443_TCP_ADDR", "10.96.0.1"},
	}
	db := [][2]string{
		{"MY_DB_SERVICE_HOST", "10.96.0.3"}, {"MY_DB_SERVICE_PORT", "5432"}, {"MY_DB_SERVICE_PORT_SQL_MAIN", "5432"}, {"MY_DB_SERVICE_PORT_STATS", "53"},
		{"MY_DB_PORT", "tcp://10.96.0.3:5432"}, {"MY_DB_PORT_5432_TCP", "tcp://10.96.0.3:5432"},
		{"MY_DB_PORT_5432_TCP_PROTO", "tcp"}, {"MY_DB_PORT_5432_TCP_PORT", "5432"}, {"MY_DB_PORT_5432_TCP_ADDR", "10.96.0.3"},
		{"MY_DB_PORT_53_UDP", "udp://10.96.0.3:53"}, {"MY_DB_PORT_53_UDP_PROTO", "udp"}, {"MY_DB_PORT_53_UDP_PORT", "53"}, {"MY_DB_PORT_53_UDP_ADDR", "10.96.0.3"},
	}
	for name, test := range map[string]struct {
		namespace string
		links     *bool
		want      [][2]string
	}{
		"own and the API's":               {"apps", nil, append(append([][2]string{}, api...), db...)},
		"no links: the API's alone":       {"apps", ptr.To(false), api},
		"no links in the API's namespace": {"default", ptr.To(false), api},
		"a namespace without any":         {"empty", ptr.To(true), api},
	} {
		t.Run(name, func(t *testing.T) {
			pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: test.namespace}, Spec: v1.PodSpec{EnableServiceLinks: test.links}}
			got, err := serviceEnv(t.Context(), pod, list)
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(test.want, got); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
	// A variable of the spec's own may name one, and replaces it.
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "p", Namespace: "default"}, Spec: v1.PodSpec{EnableServiceLinks: ptr.To(true)}}
	c := &v1.Container{Env: []v1.EnvVar{{Name: "URL", Value: "http://$(WEB_SERVICE_HOST):$(WEB_SERVICE_PORT)"}, {Name: "KUBERNETES_SERVICE_HOST", Value: "mine"}}}
	_, vars, err := buildEnv(t.Context(), envInput{pod: pod, container: c, services: list})
	if err != nil || vars["URL"] != "http://10.96.0.2:80" || vars["KUBERNETES_SERVICE_HOST"] != "mine" {
		t.Errorf("vars %v, %v", vars, err)
	}
	// Without the API's list nothing is guessed.
	down := func(context.Context, string) ([]*v1.Service, error) { return nil, errors.New("not read") }
	if _, _, err := buildEnv(t.Context(), envInput{pod: pod, container: c, services: down}); err == nil {
		t.Error("an environment without the list of Services")
	}
}
