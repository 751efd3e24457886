package server_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	admissionv1 "k8s.io/api/admission/v1"
	registrationv1 "k8s.io/api/admissionregistration/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/kubestore"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// labelled makes n ConfigMaps of the label a=b, and returns how to select them.
func labelled(t *testing.T, s *servertest.Server, prefix string, n int) metav1.ListOptions {
	t.Helper()
	for i := range n {
		cm := configMap(fmt.Sprint(prefix, i), nil)
		cm.Labels = map[string]string{"a": prefix}
		must[*corev1.ConfigMap](t)(s.Client.CoreV1().ConfigMaps("default").Create(t.Context(), cm, metav1.CreateOptions{}))
	}
	return metav1.ListOptions{LabelSelector: "a=" + prefix}
}

// TestDeleteCollectionRules: each object of a collection is deleted by the rules
// of a single deletion, and the request is one to those who permit and record it.
func TestDeleteCollectionRules(t *testing.T) {
	dir := t.TempDir()
	policy, log := filepath.Join(dir, "policy.yaml"), filepath.Join(dir, "audit.log")
	if err := os.WriteFile(policy, []byte("apiVersion: audit.k8s.io/v1\nkind: Policy\nomitStages: [RequestReceived]\nrules: [{level: Metadata}]\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := servertest.Start(t, func(c *server.Config) {
		c.Access = server.Access{AuditPolicy: policy, AuditLog: log}
		c.ServiceCIDR = "10.96.0.0/16"
	})
	maps, pods := s.Client.CoreV1().ConfigMaps("default"), s.Client.CoreV1().Pods("default")
	listed := func(t *testing.T, o metav1.ListOptions) []corev1.ConfigMap {
		t.Helper()
		return must[*corev1.ConfigMapList](t)(maps.List(t.Context(), o)).Items
	}

	t.Run("resource version", func(t *testing.T) {
		which := labelled(t, s, "version", 3)
		version := listed(t, which)[1].ResourceVersion
		err := maps.DeleteCollection(t.Context(), metav1.DeleteOptions{Preconditions: &metav1.Preconditions{ResourceVersion: &version}}, which)
		if left := listed(t, which); !apierrors.IsConflict(err) || len(left) != 2 || left[0].Name != "version0" || left[1].Name != "version2" {
			t.Errorf("%v, %d are left", err, len(left))
		}
	})
	t.Run("foreground", func(t *testing.T) {
		which := labelled(t, s, "foreground", 3)
		foreground := metav1.DeletePropagationForeground
		if err := maps.DeleteCollection(t.Context(), metav1.DeleteOptions{PropagationPolicy: &foreground}, which); err != nil {
			t.Fatal(err)
		}
		left := listed(t, which)
		for _, cm := range left {
			if cm.DeletionTimestamp == nil || !slices.Equal(cm.Finalizers, []string{metav1.FinalizerDeleteDependents}) {
				t.Errorf("%s: deleted at %v, finalizers %v", cm.Name, cm.DeletionTimestamp, cm.Finalizers)
			}
		}
		if len(left) != 3 {
			t.Errorf("%d of 3 wait for their dependents", len(left))
		}
	})
	t.Run("pods", func(t *testing.T) {
		createPod(t, s.Client, pod("bound"), "n1")
		createPod(t, s.Client, pod("unbound"), "")
		if err := pods.DeleteCollection(t.Context(), metav1.DeleteOptions{}, metav1.ListOptions{}); err != nil {
			t.Fatal(err)
		}
		left := must[*corev1.PodList](t)(pods.List(t.Context(), metav1.ListOptions{})).Items
		if len(left) != 1 || left[0].Name != "bound" || left[0].DeletionTimestamp == nil || *left[0].DeletionGracePeriodSeconds != 30 {
			t.Errorf("left: %+v", left)
		}
		if err := pods.DeleteCollection(t.Context(), metav1.DeleteOptions{GracePeriodSeconds: ptr.To[int64](0)}, metav1.ListOptions{}); err != nil {
			t.Fatal(err)
		}
		if left := must[*corev1.PodList](t)(pods.List(t.Context(), metav1.ListOptions{})).Items; len(left) > 0 {
			t.Errorf("left after no grace: %+v", left)
		}
	})
	t.Run("services give their addresses back", func(t *testing.T) {
		services := s.Client.CoreV1().Services("default")
		service := func() *corev1.Service {
			return &corev1.Service{
				ObjectMeta: metav1.ObjectMeta{Name: "s", Labels: map[string]string{"a": "b"}},
				Spec:       corev1.ServiceSpec{ClusterIP: "10.96.7.7", Ports: []corev1.ServicePort{{Port: 80}}},
			}
		}
		must[*corev1.Service](t)(services.Create(t.Context(), service(), metav1.CreateOptions{}))
		if err := s.Client.CoreV1().RESTClient().Delete().Namespace("default").Resource("services").Param("labelSelector", "a=b").Do(t.Context()).Error(); err != nil {
			t.Fatal(err)
		}
		must[*corev1.Service](t)(services.Create(t.Context(), service(), metav1.CreateOptions{}))
	})
	t.Run("webhooks", func(t *testing.T) {
		var mu sync.Mutex
		asked := map[string]int{}
		h := newHook(t, func(r *admissionv1.AdmissionRequest) *admissionv1.AdmissionResponse {
			var old corev1.ConfigMap
			if err := json.Unmarshal(r.OldObject.Raw, &old); err != nil || r.Operation != admissionv1.Delete || len(r.Object.Raw) > 0 {
				return nil
			}
			mu.Lock()
			asked[old.Name]++
			mu.Unlock()
			return &admissionv1.AdmissionResponse{Allowed: old.Name != "hooked2", Result: &metav1.Status{Message: "two stays", Code: 403}}
		})
		which := labelled(t, s, "hooked", 5)
		registration := validatingHook("deletions", h.client(), func(w *registrationv1.ValidatingWebhook) {
			w.Rules[0].Operations = []registrationv1.OperationType{registrationv1.Delete}
			w.ObjectSelector = &metav1.LabelSelector{MatchLabels: map[string]string{"a": "hooked"}}
		})
		must[*registrationv1.ValidatingWebhookConfiguration](t)(s.Client.AdmissionregistrationV1().ValidatingWebhookConfigurations().Create(t.Context(), registration, metav1.CreateOptions{}))
		soon(t, "the webhook is asked", func() bool {
			err := maps.Delete(t.Context(), "hooked2", metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}})
			return err != nil && strings.Contains(err.Error(), "two stays")
		})
		err := maps.DeleteCollection(t.Context(), metav1.DeleteOptions{}, which)
		if left := listed(t, which); err == nil || !strings.Contains(err.Error(), "two stays") || len(left) != 1 || left[0].Name != "hooked2" {
			t.Errorf("%v, %d are left", err, len(left))
		}
		mu.Lock()
		defer mu.Unlock()
		for _, name := range []string{"hooked0", "hooked1", "hooked3", "hooked4"} {
			if asked[name] != 1 {
				t.Errorf("asked about %s %d times", name, asked[name])
			}
		}
	})
	t.Run("permission and audit", func(t *testing.T) {
		which := labelled(t, s, "permitted", 20)
		client := s.ClientFor(t, "jane")
		grant := func(role, verbs string) {
			must[*rbacv1.Role](t)(s.Client.RbacV1().Roles("default").Create(t.Context(), &rbacv1.Role{ObjectMeta: roleMeta(role), Rules: grants(verbs, "configmaps")}, metav1.CreateOptions{}))
			must[*rbacv1.RoleBinding](t)(s.Client.RbacV1().RoleBindings("default").Create(t.Context(), &rbacv1.RoleBinding{
				ObjectMeta: roleMeta(role), RoleRef: rbacv1.RoleRef{Kind: "Role", Name: role}, Subjects: []rbacv1.Subject{{Kind: "User", Name: "jane"}},
			}, metav1.CreateOptions{}))
		}
		grant("single", "delete list")
		soon(t, "jane may delete", func() bool {
			return client.CoreV1().ConfigMaps("default").Delete(t.Context(), "permitted0", metav1.DeleteOptions{DryRun: []string{metav1.DryRunAll}}) == nil
		})
		if err := client.CoreV1().ConfigMaps("default").DeleteCollection(t.Context(), metav1.DeleteOptions{}, which); !apierrors.IsForbidden(err) || len(listed(t, which)) != 20 {
			t.Errorf("with the verb delete alone: %v", err)
		}
		grant("all", "deletecollection")
		soon(t, "jane may delete collections", func() bool {
			err := client.CoreV1().ConfigMaps("default").DeleteCollection(t.Context(), metav1.DeleteOptions{}, which)
			if err != nil && !apierrors.IsForbidden(err) {
				t.Fatal(err)
			}
			return err == nil
		})
		if left := listed(t, which); len(left) > 0 {
			t.Errorf("%d are left", len(left))
		}
		succeeded := func() (n int) {
			file, err := os.Open(log)
			if err != nil {
				return 0
			}
			defer file.Close()
			for lines := bufio.NewScanner(file); lines.Scan(); {
				var e struct {
					Verb           string
					User           struct{ Username string }
					ResponseStatus struct{ Code int }
					RequestURI     string
				}
				if json.Unmarshal(lines.Bytes(), &e) != nil || e.User.Username != "jane" || e.ResponseStatus.Code != 200 || strings.Contains(e.RequestURI, "permitted0") {
					continue // the last line may be half written
				}
				if n++; e.Verb != "deletecollection" {
					t.Errorf("also recorded: %s", lines.Text())
				}
			}
			return n
		}
		soon(t, "the audit log tells of it", func() bool { return succeeded() > 0 })
		if n := succeeded(); n != 1 {
			t.Errorf("%d events of one request", n)
		}
	})
}

// TestMultiDeleteCollectionSurvivesLeader: the leader is killed while
// collections are deleted through other members. A deletion that says it is done
// is done, one that does not is asked for again, and what was not asked for
// stays.
func TestMultiDeleteCollectionSurvivesLeader(t *testing.T) {
	t.Parallel()
	members := raftstoretest.New(t, 3, func(c *raftstore.Config) { raftstoretest.Steady(c); c.LeaderWait = 30 * time.Second })
	leader := members.LeaderID()
	var through *servertest.Server
	for _, id := range members.IDs() {
		if id != leader && through == nil {
			through = servertest.Start(t, func(c *server.Config) {
				c.Storage = kubestore.NewDecorator(kubestore.Config{Store: members.Store(id), Cache: true})
			})
		}
	}
	maps := through.Client.CoreV1().ConfigMaps("default")
	const groups, each = 8, 25
	for g := range groups {
		labelled(t, through, fmt.Sprint("g", g, "x"), each)
	}
	stays := labelled(t, through, "stays", 5)
	var done sync.WaitGroup
	began := make(chan struct{}, groups)
	for g := range groups {
		done.Go(func() {
			for again := false; ; again = true {
				if !again {
					began <- struct{}{}
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				which := metav1.ListOptions{LabelSelector: fmt.Sprint("a=g", g, "x")}
				err := maps.DeleteCollection(ctx, metav1.DeleteOptions{}, which)
				cancel()
				if err != nil {
					if t.Context().Err() != nil {
						return
					}
					t.Logf("group %d: %v", g, err)
					continue
				}
				left := must[*corev1.ConfigMapList](t)(maps.List(t.Context(), which)).Items
				if len(left) > 0 {
					t.Errorf("group %d is deleted, and has %d objects", g, len(left))
				}
				return
			}
		})
	}
	<-began
	members.Kill(leader)
	done.Wait()
	if left := must[*corev1.ConfigMapList](t)(maps.List(t.Context(), stays)).Items; len(left) != 5 {
		t.Errorf("%d of 5 objects are left that were not deleted", len(left))
	}
	members.Start(leader)
}
