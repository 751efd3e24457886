package server_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/components"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

// TestComponentStatus: `kubectl get cs` and what it is made of.
func TestComponentStatus(t *testing.T) {
	s := servertest.Start(t, func(c *server.Config) {
		c.Components = []components.Component{
			{Name: "scheduler", Check: func(context.Context) (string, error) { return "ok", nil }},
			{Name: "etcd-0", Check: func(context.Context) (string, error) { return "", errors.New("no leader") }},
		}
	})
	ctx, api := t.Context(), s.Client.CoreV1().ComponentStatuses()
	list := must[*corev1.ComponentStatusList](t)(api.List(ctx, metav1.ListOptions{}))
	if len(list.Items) != 2 || list.Items[0].Name != "etcd-0" || list.Items[0].Conditions[0].Status != corev1.ConditionFalse ||
		list.Items[0].Conditions[0].Error != "no leader" || list.Items[1].Conditions[0].Message != "ok" {
		t.Errorf("list: %+v", list.Items)
	}
	if some := must[*corev1.ComponentStatusList](t)(api.List(ctx, metav1.ListOptions{FieldSelector: "metadata.name=scheduler"})); len(some.Items) != 1 {
		t.Errorf("by name: %+v", some.Items)
	}
	if some := must[*corev1.ComponentStatusList](t)(api.List(ctx, metav1.ListOptions{LabelSelector: "a=b"})); len(some.Items) != 0 {
		t.Errorf("by label: %+v", some.Items)
	}
	one := must[*corev1.ComponentStatus](t)(api.Get(ctx, "scheduler", metav1.GetOptions{}))
	if one.Name != "scheduler" || one.Conditions[0].Type != corev1.ComponentHealthy || one.Conditions[0].Status != corev1.ConditionTrue {
		t.Errorf("get: %+v", one)
	}
	if _, err := api.Get(ctx, "else", metav1.GetOptions{}); !apierrors.IsNotFound(err) {
		t.Errorf("get of none: %v", err)
	}
	if err := api.Delete(ctx, "scheduler", metav1.DeleteOptions{}); !apierrors.IsMethodNotSupported(err) {
		t.Errorf("delete: %v", err)
	}

	// The client gets a warning, and a table has upstream's columns.
	if _, _, warned := raw(t, s.LoopbackConfig(), "GET", "/api/v1/componentstatuses", ""); len(warned) != 1 || !strings.Contains(warned[0], "v1 ComponentStatus is deprecated in v1.19+") {
		t.Errorf("warnings: %q", warned)
	}
	var table metav1.Table
	err := s.Client.CoreV1().RESTClient().Get().Resource("componentstatuses").
		SetHeader("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io").Do(ctx).Into(&table)
	if err != nil {
		t.Fatal(err)
	}
	if len(table.Rows) != 2 || !slices.Equal(table.Rows[0].Cells, []any{"etcd-0", "Unhealthy", "", "no leader"}) || !slices.Equal(table.Rows[1].Cells, []any{"scheduler", "Healthy", "ok", ""}) {
		t.Errorf("table: %v", table.Rows)
	}
	resources := must[*metav1.APIResourceList](t)(s.Client.Discovery().ServerResourcesForGroupVersion("v1"))
	i := slices.IndexFunc(resources.APIResources, func(r metav1.APIResource) bool { return r.Name == "componentstatuses" })
	if i < 0 || resources.APIResources[i].Kind != "ComponentStatus" || resources.APIResources[i].Namespaced || resources.APIResources[i].SingularName != "componentstatus" ||
		!slices.Equal(resources.APIResources[i].ShortNames, []string{"cs"}) || !slices.Equal(resources.APIResources[i].Verbs, []string{"get", "list"}) {
		t.Errorf("discovery: %+v", resources.APIResources)
	}
}
