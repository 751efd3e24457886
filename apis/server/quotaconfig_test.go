package server_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/admission"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

// quotaConfiguration is an AdmissionConfiguration of ResourceQuota.
func quotaConfiguration(t *testing.T, limited string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "admission.yaml")
	if err := os.WriteFile(file, []byte(`
apiVersion: apiserver.config.k8s.io/v1
kind: AdmissionConfiguration
plugins:
- name: ResourceQuota
  configuration: {apiVersion: apiserver.config.k8s.io/v1, kind: ResourceQuotaConfiguration, limitedResources: `+limited+`}
`), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// TestLimitedResources: what the configuration names may only be used where a quota covers it.
func TestLimitedResources(t *testing.T) {
	file := quotaConfiguration(t, `[{resource: services, matchContains: [services.loadbalancers]}]`)
	s := servertest.Start(t, func(c *server.Config) { c.Admission = admission.Set{File: file} })
	ctx, services := t.Context(), s.Client.CoreV1().Services("default")
	service := func(name string, kind corev1.ServiceType) *corev1.Service {
		return &corev1.Service{ObjectMeta: meta(name), Spec: corev1.ServiceSpec{Type: kind, Ports: []corev1.ServicePort{{Port: 80}}}}
	}
	must[*corev1.Service](t)(services.Create(ctx, service("inside", corev1.ServiceTypeClusterIP), metav1.CreateOptions{}))
	_, err := services.Create(ctx, service("outside", corev1.ServiceTypeLoadBalancer), metav1.CreateOptions{})
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), "insufficient quota to consume: services.loadbalancers") {
		t.Fatalf("a load balancer without a quota: %v, want Forbidden", err)
	}
	hard := corev1.ResourceList{"services.loadbalancers": apiresource.MustParse("1")}
	q := must[*corev1.ResourceQuota](t)(s.Client.CoreV1().ResourceQuotas("default").Create(ctx, &corev1.ResourceQuota{ObjectMeta: meta("one"), Spec: corev1.ResourceQuotaSpec{Hard: hard}}, metav1.CreateOptions{}))
	q.Status = corev1.ResourceQuotaStatus{Hard: hard, Used: corev1.ResourceList{"services.loadbalancers": apiresource.MustParse("0")}}
	must[*corev1.ResourceQuota](t)(s.Client.CoreV1().ResourceQuotas("default").UpdateStatus(ctx, q, metav1.UpdateOptions{}))
	soon(t, "the quota covers it", func() bool {
		_, err := services.Create(ctx, service("outside", corev1.ServiceTypeLoadBalancer), metav1.CreateOptions{})
		return err == nil
	})
}

func TestWrongLimitedResources(t *testing.T) {
	for want, limited := range map[string]string{
		"limitedResources[0].resource": `[{matchContains: [pods]}]`,
		"unknown field":                `[{resourcee: pods}]`,
	} {
		_, err := server.New(server.Config{Storage: servertest.NewMemory().Decorator(), Admission: admission.Set{File: quotaConfiguration(t, limited)}})
		if err == nil || !strings.Contains(err.Error(), "ResourceQuota") || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want an error about %q", limited, err, want)
		}
	}
}
