package pod

import (
	"context"
	"os"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/agent/podstate"
)

// finish deletes the API object of a pod that has left the node, and its logs.
func (w *worker) finish() {
	w.obs.Finishing = true
	pod, gone, before := w.pod, w.gone, w.obs.FinishErr
	w.background(apiDeadline, func(ctx context.Context) func() {
		var err error
		if !gone && !w.static { // a static pod's mirror goes by itself
			err = w.m.cfg.Client.CoreV1().Pods(pod.Namespace).Delete(ctx, pod.Name, metav1.DeleteOptions{
				GracePeriodSeconds: ptr.To(int64(0)),
				Preconditions:      &metav1.Preconditions{UID: &pod.UID},
			})
			if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
				err = nil // deleted already, or another pod has the name by now
			}
		}
		if err == nil {
			if rerr := os.RemoveAll(w.m.spec.PodLogs(pod)); rerr != nil {
				klog.FromContext(ctx).Error(rerr, "Log folder of a deleted pod stays")
			}
			// Containers that a power cut has ended were not removed one by one.
			if rerr := w.m.cfg.LogLinks.sweep(w.m.spec.PodLogs(pod)); rerr != nil {
				klog.FromContext(ctx).Error(rerr, "Links to a deleted pod's logs stay")
			}
			if rerr := w.m.cfg.PodLogLinks.removePod(w.m.spec.PodLogs(pod)); rerr != nil {
				klog.FromContext(ctx).Error(rerr, "The link to a deleted pod's log folder stays")
			}
		}
		return func() {
			w.obs.Finishing = false
			if err != nil {
				w.obs.FinishErr = faulted(before, "FailedDelete", err)
				klog.FromContext(w.ctx).Info("Pod was not deleted, will retry", "err", err, "at", w.obs.FinishErr.RetryAt.Format(time.RFC3339))
				return
			}
			w.obs.Finished = true
		}
	})
}

// imageSignal is the stop signal of the image of the container's instance. An
// agent that has found the instance asks the store for it.
func (w *worker) imageSignal(c *podstate.Container) string {
	if img, ok := w.images[c.Name]; ok {
		return img.Config.StopSignal
	}
	img, _, err := w.m.cfg.Images.Get(c.Now.Image)
	if err != nil {
		klog.FromContext(w.ctx).Info("Stop signal of an image is not known, SIGTERM it is", "image", c.Now.Image, "err", err)
	}
	return img.Config.StopSignal
}
