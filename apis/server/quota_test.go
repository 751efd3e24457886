package server_test

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apiresource "k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/e2e/features"
)

// TestQuotaIsExact: 50 writers at once get what there is and nothing more.
func TestQuotaIsExact(t *testing.T) {
	features.Shows(t, 67)
	s := servertest.Start(t, nil)
	ctx, quotas := t.Context(), s.Client.CoreV1().ResourceQuotas("default")
	hard := corev1.ResourceList{"count/configmaps": apiresource.MustParse("7")}
	q := must[*corev1.ResourceQuota](t)(quotas.Create(ctx, &corev1.ResourceQuota{ObjectMeta: roleMeta("few"), Spec: corev1.ResourceQuotaSpec{Hard: hard}}, metav1.CreateOptions{}))
	// What the loop does: nothing is used yet.
	q.Status = corev1.ResourceQuotaStatus{Hard: hard, Used: corev1.ResourceList{"count/configmaps": apiresource.MustParse("0")}}
	must[*corev1.ResourceQuota](t)(quotas.UpdateStatus(ctx, q, metav1.UpdateOptions{}))
	used := func() int64 {
		now := must[*corev1.ResourceQuota](t)(quotas.Get(ctx, "few", metav1.GetOptions{}))
		quantity := now.Status.Used["count/configmaps"]
		return quantity.Value()
	}
	// Until admission has the quota in its cache, it counts nothing.
	firsts := 0
	soon(t, "the quota counts", func() bool {
		firsts++
		_, err := s.Client.CoreV1().ConfigMaps("default").Create(ctx, configMap(fmt.Sprint("first-", firsts), nil), metav1.CreateOptions{})
		if err != nil && !apierrors.IsForbidden(err) {
			t.Fatal(err)
		}
		return used() > 0
	})
	if used() != 1 {
		t.Fatalf("used after the first: %d", used())
	}
	// lost are the requests that admission gave up on after ten seconds: each may
	// have been counted before.
	var made, lost atomic.Int64
	var writers sync.WaitGroup
	for i := range 50 {
		writers.Go(func() {
			for {
				_, err := s.Client.CoreV1().ConfigMaps("default").Create(ctx, configMap(fmt.Sprintf("c-%d", i), nil), metav1.CreateOptions{})
				switch {
				case err == nil:
					made.Add(1)
					return
				case apierrors.IsForbidden(err) && strings.Contains(err.Error(), "exceeded quota"):
					return
				case apierrors.IsInternalError(err):
					lost.Add(1)
				case !apierrors.IsForbidden(err) && !apierrors.IsConflict(err):
					t.Errorf("writer %d: %v", i, err)
					return
				}
			}
		})
	}
	writers.Wait()
	if n := made.Load(); n > 6 || n+lost.Load() < 6 || used() != 7 {
		t.Errorf("%d of 50 writers made theirs, %d were lost, %d used; want 6 and 7", n, lost.Load(), used())
	}
	_, err := s.Client.CoreV1().ConfigMaps("default").Create(ctx, configMap("late", nil), metav1.CreateOptions{})
	if want := `configmaps "late" is forbidden: exceeded quota: few, requested: count/configmaps=1, used: count/configmaps=7, limited: count/configmaps=7`; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, want %s", err, want)
	}
}
