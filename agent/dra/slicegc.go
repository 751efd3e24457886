package dra

import (
	"context"
	"maps"
	"slices"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
)

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }

// sliceGC deletes what drivers of this node offer (ResourceSlices) that are no
// more: pods would be sent here and wait for them. A driver that comes back
// offers it again.
type sliceGC struct {
	client  kubernetes.Interface
	node    string
	after   time.Duration
	drivers *drivers
	wake    chan struct{}
}

// poke asks for another look: a driver has come or gone.
func (g *sliceGC) poke() {
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// run looks whenever a driver may have been away for long enough, until ctx
// ends.
func (g *sliceGC) run(ctx context.Context) {
	start := time.Now()
	timer := time.NewTimer(g.after)
	defer timer.Stop()
	retry := time.Second
	for {
		select {
		case <-ctx.Done():
			return
		case <-g.wake:
			if time.Since(start) < g.after {
				continue // the timer is due then
			}
		case <-timer.C:
		}
		next, err := g.sweep(ctx, start)
		switch {
		case err != nil && ctx.Err() == nil:
			klog.FromContext(ctx).Info("ResourceSlices of drivers that have gone stay, will retry", "err", err, "after", retry)
			timer.Reset(retry)
			retry = min(2*retry, time.Minute)
		case next > 0:
			timer.Reset(next)
			fallthrough
		default:
			retry = time.Second
		}
	}
}

// sweep deletes the slices of drivers that have been away for long enough. It
// returns after what time the next one may have been, 0: none is away.
func (g *sliceGC) sweep(ctx context.Context, start time.Time) (next time.Duration, err error) {
	list, err := g.client.ResourceV1().ResourceSlices().List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(resourcev1.ResourceSliceSelectorNodeName, g.node).String(),
	})
	if err != nil {
		return 0, err
	}
	for _, s := range list.Items {
		if s.Spec.NodeName == nil || *s.Spec.NodeName != g.node {
			continue
		}
		since, absent := g.drivers.absent(s.Spec.Driver, start)
		if !absent {
			continue
		}
		if left := g.after - time.Since(since); left > 0 {
			if next == 0 || left < next {
				next = left
			}
			continue
		}
		err := g.client.ResourceV1().ResourceSlices().Delete(ctx, s.Name, metav1.DeleteOptions{Preconditions: metav1.NewUIDPreconditions(string(s.UID))})
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			return 0, err
		}
		klog.FromContext(ctx).Info("ResourceSlice of a driver that has gone is deleted", "slice", s.Name, "driver", s.Spec.Driver)
	}
	return next, nil
}
