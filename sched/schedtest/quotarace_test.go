package schedtest_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/metadata"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/kubestore"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
	"github.com/clusterd/clusterd/sched/loop"
	"github.com/clusterd/clusterd/sched/quota"
)

// TestQuotaRace: 50 writers at three servers, beside the loop that counts again what
// is used, make exactly what the quota has room for.
func TestQuotaRace(t *testing.T) {
	const hard, writers = 20, 50
	members := raftstoretest.New(t, 3, func(c *raftstore.Config) { raftstoretest.Steady(c); c.LeaderWait = 10 * time.Second })
	members.Leader()
	var servers []*servertest.Server
	for _, id := range members.IDs() {
		servers = append(servers, servertest.Start(t, func(c *server.Config) {
			c.Storage = kubestore.NewDecorator(kubestore.Config{Store: members.Store(id), Cache: true})
		}))
	}
	first := servers[0]
	counts, err := metadata.NewForConfig(first.LoopbackConfig())
	if err != nil {
		t.Fatal(err)
	}
	env := loop.Env{Client: first.Client, Clock: clock.RealClock{}, Informers: informers.NewSharedInformerFactory(first.Client, 0), Events: loop.NewEvents(first.Client, clock.RealClock{})}
	counting := quota.New(env, counts)
	ctx, stop := context.WithCancel(t.Context())
	env.Informers.StartWithContext(ctx)
	ended := make(chan error, 1)
	go func() { ended <- counting.Run(ctx) }()
	defer func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("the loop ended with %v", err)
		}
		env.Informers.Shutdown()
	}()

	if _, err := first.Client.CoreV1().Namespaces().Create(ctx, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "race"}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	quotas := first.Client.CoreV1().ResourceQuotas("race")
	if _, err := quotas.Create(ctx, &corev1.ResourceQuota{
		ObjectMeta: metav1.ObjectMeta{Name: "few"},
		Spec:       corev1.ResourceQuotaSpec{Hard: corev1.ResourceList{"count/configmaps": *apiresource.NewQuantity(hard, apiresource.DecimalSI)}},
	}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	used := func() int64 {
		got, err := quotas.Get(ctx, "few", metav1.GetOptions{})
		if err != nil {
			t.Error(err)
			return -1
		}
		n, ok := got.Status.Used["count/configmaps"]
		if !ok {
			return -1
		}
		return n.Value()
	}
	there := func() int {
		list, err := first.Client.CoreV1().ConfigMaps("race").List(ctx, metav1.ListOptions{})
		if err != nil {
			t.Error(err)
			return 0
		}
		return len(list.Items)
	}
	members.Wait("the loop has counted", func() bool { return used() == 0 })
	for i, s := range servers { // from a moment on each holds requests to the quota
		members.Wait(fmt.Sprintf("server %d counts", i), func() bool {
			_, err := s.Client.CoreV1().ConfigMaps("race").Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "probe"}}, metav1.CreateOptions{})
			if err != nil {
				return false
			}
			counted := used() > 0
			if err := s.Client.CoreV1().ConfigMaps("race").Delete(ctx, "probe", metav1.DeleteOptions{}); err != nil {
				t.Error(err)
			}
			return counted
		})
		members.Wait("the room is given back", func() bool { return used() == 0 })
	}

	var made atomic.Int64
	var all sync.WaitGroup
	for i := range writers {
		client := servers[i%len(servers)].Client.CoreV1().ConfigMaps("race")
		all.Go(func() {
			for ctx.Err() == nil {
				_, err := client.Create(ctx, &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("c-", i)}}, metav1.CreateOptions{})
				switch {
				case err == nil, apierrors.IsAlreadyExists(err): // an answer that was lost
					made.Add(1)
					return
				case apierrors.IsForbidden(err) && strings.Contains(err.Error(), "exceeded quota") && there() >= hard:
					return
				case !apierrors.IsForbidden(err) && !apierrors.IsConflict(err) && !apierrors.IsInternalError(err) && !apierrors.IsServiceUnavailable(err) && !apierrors.IsTimeout(err) && !apierrors.IsServerTimeout(err) && !apierrors.IsTooManyRequests(err):
					t.Errorf("writer %d: %v", i, err)
					return
				}
				// Requests that were counted and then failed hold room until the loop has counted again.
				if n := there(); n > hard {
					t.Errorf("%d objects, %d are allowed", n, hard)
					return
				}
			}
		})
	}
	all.Wait()
	if n := there(); n != hard || made.Load() != hard {
		t.Errorf("%d objects are there and %d writers made theirs, want %d", n, made.Load(), hard)
	}
	members.Wait("what is used is what is there", func() bool { return used() == hard })
}
