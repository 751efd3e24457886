package statefulset

import (
	"context"
	"fmt"
	"sync"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/loop"
	"github.com/clusterd/clusterd/sched/schedtest"
)

// A claim that was deleted while its pod had no node was not made again: the pod
// waited for it for ever, as no node fits one whose claim is missing.
func TestMissingClaimIsMadeAgain(t *testing.T) {
	cluster := schedtest.New(t)
	env := loop.Env{Client: cluster.Client, Informers: informers.NewSharedInformerFactory(cluster.Client, 0), Events: loop.NewEvents(cluster.Client, clock.RealClock{}), Clock: clock.RealClock{}}
	l, err := New(env)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	env.Informers.StartWithContext(ctx)
	wg.Go(func() {
		if err := l.Run(ctx); err != nil {
			t.Errorf("the loop ended: %v", err)
		}
	})
	defer func() {
		cancel()
		wg.Wait()
		env.Informers.Shutdown()
	}()
	set := newSet(1, func(set *appsv1.StatefulSet) {
		set.UID = "set"
		set.Spec.VolumeClaimTemplates = []corev1.PersistentVolumeClaim{{ObjectMeta: metav1.ObjectMeta{Name: "data"}}}
	})
	if _, err := cluster.Client.AppsV1().StatefulSets(set.Namespace).Create(ctx, set, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	claims := cluster.Client.CoreV1().PersistentVolumeClaims(set.Namespace)
	var first, second *corev1.PersistentVolumeClaim
	schedtest.Eventually(t, func() string {
		if first, err = claims.Get(ctx, "data-db-0", metav1.GetOptions{}); err != nil {
			return err.Error()
		}
		if _, err := cluster.Client.CoreV1().Pods(set.Namespace).Get(ctx, "db-0", metav1.GetOptions{}); err != nil {
			return err.Error()
		}
		return ""
	})
	if err := claims.Delete(ctx, "data-db-0", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	schedtest.Eventually(t, func() string {
		if second, err = claims.Get(ctx, "data-db-0", metav1.GetOptions{}); err != nil {
			return fmt.Sprintf("the claim is not there again: %v", err)
		}
		return ""
	})
	if first.UID == second.UID {
		t.Error("the claim was never gone")
	}
}
