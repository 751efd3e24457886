// Package podcertificate deletes requests for certificates of pods that are
// over: a node needs one until it is answered, which takes a signer moments, and
// asks again otherwise.
package podcertificate

import (
	"context"
	"fmt"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	certificateslisters "k8s.io/client-go/listers/certificates/v1"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/loop"
)

// kept is how long a request is kept, answered or not: upstream's time.
const kept = 15 * time.Minute

type controller struct {
	*loop.Controller
	client   kubernetes.Interface
	requests certificateslisters.PodCertificateRequestLister
	clock    clock.PassiveClock
}

// New returns the loop; it watches PodCertificateRequests.
func New(env loop.Env) loop.Loop {
	informer := env.Informers.Certificates().V1().PodCertificateRequests()
	c := &controller{client: env.Client, requests: informer.Lister(), clock: env.Clock}
	c.Controller = loop.New("podcertificate", env, 1, c.reconcile)
	loop.Watch(c.Controller, informer.Informer(), func(_, request *certificatesv1.PodCertificateRequest) {
		if request != nil {
			c.Enqueue(loop.KeyOf(request))
		}
	})
	return c.Loop()
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	request, err := c.requests.PodCertificateRequests(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if left := over(request).Sub(c.clock.Now()); left > 0 {
		c.EnqueueAfter(key, left)
		return nil
	}
	err = c.client.CertificatesV1().PodCertificateRequests(key.Namespace).Delete(ctx, key.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &request.UID}})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("delete the request %s for a pod's certificate that is over: %w", key, err)
	}
	return nil
}

// over is when a request is not needed any more.
func over(request *certificatesv1.PodCertificateRequest) time.Time {
	return request.CreationTimestamp.Add(kept)
}
