package server_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/features"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/kubestore"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// TestMultiServers has an API server on each of three members of a real store,
// with and without the watch cache: any of them answers, all tell the same,
// and the loss of the leader is a pause.
func TestMultiServers(t *testing.T) {
	t.Parallel()
	features.Shows(t, 78, 79)
	for _, cached := range []bool{true, false} {
		t.Run(fmt.Sprintf("cache=%t", cached), func(t *testing.T) {
			members := raftstoretest.New(t, 3, func(c *raftstore.Config) { raftstoretest.Steady(c); c.LeaderWait = 3 * time.Second })
			members.Leader()
			servers := map[string]*servertest.Server{}
			for _, id := range members.IDs() {
				servers[id] = servertest.Start(t, func(c *server.Config) {
					c.Storage = kubestore.NewDecorator(kubestore.Config{Store: members.Store(id), Cache: cached})
				})
			}
			leader := members.LeaderID()
			var others []string
			for _, id := range members.IDs() {
				if id != leader {
					others = append(others, id)
				}
			}
			writer, reader := servers[others[0]].Client, servers[others[1]].Client

			made := must[*corev1.ConfigMap](t)(writer.CoreV1().ConfigMaps("default").Create(t.Context(), configMap("a", map[string]string{"k": "v"}), metav1.CreateOptions{}))
			read := must[*corev1.ConfigMap](t)(reader.CoreV1().ConfigMaps("default").Get(t.Context(), "a", metav1.GetOptions{}))
			if diff := cmp.Diff(made, read); diff != "" {
				t.Errorf("written through one server, read through another:\n%s", diff)
			}
			w := must[watch.Interface](t)(reader.CoreV1().ConfigMaps("default").Watch(t.Context(), metav1.ListOptions{ResourceVersion: made.ResourceVersion}))
			defer w.Stop()
			must[*corev1.ConfigMap](t)(writer.CoreV1().ConfigMaps("default").Create(t.Context(), configMap("b", nil), metav1.CreateOptions{}))
			expect(t, w, watch.Added, "b")

			first := must[*corev1.Pod](t)(writer.CoreV1().Pods("default").Create(t.Context(), pod("p"), metav1.CreateOptions{}))
			errs := []error{
				writer.CoreV1().Pods("default").Bind(t.Context(), binding(first.Name, "n1"), metav1.CreateOptions{}),
				reader.CoreV1().Pods("default").Bind(t.Context(), binding(first.Name, "n2"), metav1.CreateOptions{}),
			}
			if errs[0] != nil || !apierrors.IsConflict(errs[1]) {
				t.Errorf("bind through two servers: %v", errs)
			}
			// What admission knows about a namespace may be old, but never so old
			// that a client cannot use what it has just made elsewhere.
			for i := range 5 {
				name := fmt.Sprint("fresh-", i)
				must[*corev1.Namespace](t)(writer.CoreV1().Namespaces().Create(t.Context(), &corev1.Namespace{ObjectMeta: meta(name)}, metav1.CreateOptions{}))
				must[*corev1.ConfigMap](t)(reader.CoreV1().ConfigMaps(name).Create(t.Context(), configMap("x", nil), metav1.CreateOptions{}))
			}

			members.Kill(leader)
			begin := time.Now()
			err := wait.PollUntilContextCancel(waitContext(t), 20*time.Millisecond, true, func(ctx context.Context) (bool, error) {
				_, err := writer.CoreV1().ConfigMaps("default").Create(ctx, configMap("after", nil), metav1.CreateOptions{})
				return err == nil || apierrors.IsAlreadyExists(err), nil
			})
			if err != nil {
				t.Fatalf("no write succeeds after the leader died: %v", err)
			}
			t.Logf("leader killed to write done: %v", time.Since(begin))
			must[*corev1.ConfigMap](t)(reader.CoreV1().ConfigMaps("default").Get(t.Context(), "after", metav1.GetOptions{}))
			expect(t, w, watch.Added, "after")

			// One of three is no quorum: reads of what is known go on, writes
			// say so.
			for id := range members.Running() {
				must[*corev1.ConfigMap](t)(servers[id].Client.CoreV1().ConfigMaps("default").Get(t.Context(), "after", metav1.GetOptions{}))
			}
			members.Kill(members.LeaderID())
			for id := range members.Running() {
				// One request: client-go would try again until it succeeds.
				code, status, _ := raw(t, servers[id].LoopbackConfig(), "POST", "/api/v1/namespaces/default/configmaps", `{"metadata":{"name":"never"}}`)
				if code < 500 || status.Status != metav1.StatusFailure {
					t.Errorf("write without quorum: %d %+v, want a Status of 500 or more", code, status)
				}
				t.Logf("write without quorum: %d %s", code, status.Message)
				maps := servers[id].Client.CoreV1().ConfigMaps("default")
				must[*corev1.ConfigMap](t)(maps.Get(t.Context(), "after", metav1.GetOptions{ResourceVersion: "0"}))
			}
		})
	}
}
