package server_test

import (
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/rbac"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

// TestNewCluster: the default objects of a new cluster are all there, complete, and none
// of them took a request, which managed fields would show.
func TestNewCluster(t *testing.T) {
	s := servertest.Start(t, nil)
	ctx := t.Context()
	roles := must[*rbacv1.ClusterRoleList](t)(s.Client.RbacV1().ClusterRoles().List(ctx, metav1.ListOptions{}))
	if len(roles.Items) != len(rbac.ClusterRoles()) {
		t.Errorf("%d cluster roles, want %d", len(roles.Items), len(rbac.ClusterRoles()))
	}
	var all []metav1.ObjectMeta
	for _, r := range roles.Items {
		all = append(all, r.ObjectMeta)
	}
	bindings := must[*rbacv1.ClusterRoleBindingList](t)(s.Client.RbacV1().ClusterRoleBindings().List(ctx, metav1.ListOptions{}))
	for _, b := range bindings.Items {
		all = append(all, b.ObjectMeta)
		for _, subject := range b.Subjects {
			if subject.Kind != rbacv1.ServiceAccountKind && subject.APIGroup != rbacv1.GroupName {
				t.Errorf("binding %s: subject %q without its default group", b.Name, subject.Name)
			}
		}
	}
	for _, meta := range all {
		if meta.UID == "" || meta.CreationTimestamp.IsZero() || len(meta.ManagedFields) != 0 {
			t.Errorf("%s: UID %q, created %s, managed fields %v", meta.Name, meta.UID, meta.CreationTimestamp, meta.ManagedFields)
		}
	}
}

// TestNotNewCluster: a cluster that has some of the default objects gets the rest, and
// what was changed there stays.
func TestNotNewCluster(t *testing.T) {
	memory := servertest.NewMemory()
	on := func(c *server.Config) { c.Storage = memory.Decorator() }
	ctx := t.Context()
	if !t.Run("first", func(t *testing.T) {
		api := servertest.Start(t, on).Client.RbacV1()
		if err := api.ClusterRoles().Delete(ctx, "edit", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		role := must[*rbacv1.ClusterRole](t)(api.ClusterRoles().Get(ctx, "view", metav1.GetOptions{}))
		role.Labels = map[string]string{"theirs": "stays"}
		must[*rbacv1.ClusterRole](t)(api.ClusterRoles().Update(ctx, role, metav1.UpdateOptions{}))
	}) {
		return
	}
	api := servertest.Start(t, on).Client.RbacV1()
	if _, err := api.ClusterRoles().Get(ctx, "edit", metav1.GetOptions{}); apierrors.IsNotFound(err) {
		t.Error("the deleted default role was not created again")
	} else if err != nil {
		t.Fatal(err)
	}
	if role := must[*rbacv1.ClusterRole](t)(api.ClusterRoles().Get(ctx, "view", metav1.GetOptions{})); role.Labels["theirs"] != "stays" {
		t.Errorf("labels %v: what a user added is gone", role.Labels)
	}
}
