package storageprotection

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/utils/clock"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/leaktest"
	"github.com/clusterd/clusterd/sched/loop"
	"github.com/clusterd/clusterd/sched/schedtest"
)

func TestMain(m *testing.M) { leaktest.Main(m) }

func run(t *testing.T, c *schedtest.Cluster) {
	t.Helper()
	env := loop.Env{Client: c.Client, Clock: clock.RealClock{}, Informers: informers.NewSharedInformerFactory(c.Client, 0), Events: loop.NewEvents(c.Client, clock.RealClock{})}
	l := New(env)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	env.Informers.StartWithContext(ctx)
	wg.Go(func() {
		if err := l.Run(ctx); err != nil {
			t.Errorf("the loop ended with %v", err)
		}
	})
	t.Cleanup(func() { cancel(); wg.Wait(); env.Informers.Shutdown() })
}

// TestClassesInUse: a VolumeAttributesClass that is deleted stays while a claim asks
// for it, has it or is getting it, and while a volume has it.
func TestClassesInUse(t *testing.T) {
	class := func(name string) *storagev1.VolumeAttributesClass {
		return &storagev1.VolumeAttributesClass{
			ObjectMeta: metav1.ObjectMeta{Name: name, Finalizers: []string{ClassFinalizer}, DeletionTimestamp: ptr.To(metav1.NewTime(time.Now()))},
			DriverName: "d",
		}
	}
	claim := func(name string, change func(*corev1.PersistentVolumeClaim)) *corev1.PersistentVolumeClaim {
		c := &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name}}
		change(c)
		return c
	}
	c := schedtest.New(t, class("unused"), class("asked"), class("had"), class("coming"), class("volumes"),
		claim("asks", func(c *corev1.PersistentVolumeClaim) { c.Spec.VolumeAttributesClassName = ptr.To("asked") }),
		claim("has", func(c *corev1.PersistentVolumeClaim) { c.Status.CurrentVolumeAttributesClassName = ptr.To("had") }),
		claim("gets", func(c *corev1.PersistentVolumeClaim) {
			c.Status.ModifyVolumeStatus = &corev1.ModifyVolumeStatus{TargetVolumeAttributesClassName: "coming"}
		}),
		&corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "v"}, Spec: corev1.PersistentVolumeSpec{VolumeAttributesClassName: ptr.To("volumes")}},
	)
	run(t, c)
	kept := func(want ...string) func() string {
		return func() string {
			list, err := c.Client.StorageV1().VolumeAttributesClasses().List(t.Context(), metav1.ListOptions{})
			if err != nil {
				return err.Error()
			}
			var have []string
			for _, class := range list.Items {
				if slices.Contains(class.Finalizers, ClassFinalizer) {
					have = append(have, class.Name)
				}
			}
			if slices.Sort(have); !slices.Equal(have, want) {
				return fmt.Sprintf("kept: %v, want %v", have, want)
			}
			return ""
		}
	}
	schedtest.Eventually(t, kept("asked", "coming", "had", "volumes"))
	claims := c.Client.CoreV1().PersistentVolumeClaims("ns")
	for _, name := range []string{"has", "gets"} {
		if err := claims.Delete(t.Context(), name, metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	schedtest.Eventually(t, kept("asked", "volumes"))
	asks, err := claims.Get(t.Context(), "asks", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	asks.Spec.VolumeAttributesClassName = ptr.To("another")
	if _, err := claims.Update(t.Context(), asks, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	schedtest.Eventually(t, kept("volumes"))
	if err := c.Client.CoreV1().PersistentVolumes().Delete(t.Context(), "v", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	schedtest.Eventually(t, kept())
}
