// Package certificatesigning signs approved requests for client certificates of
// the API (signer kubernetes.io/kube-apiserver-client), and deletes requests of
// any signer that are over. It holds no key: the caller of New gives it
// the signer.
package certificatesigning

import (
	"context"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	certificateslisters "k8s.io/client-go/listers/certificates/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/sched/loop"
)

// Sign signs a certificate for the key of a request: its common name is the
// user, its organizations the groups, and it is good for a client and for
// nothing else. lifetime may be cut short.
type Sign func(request *x509.CertificateRequest, lifetime time.Duration) (*x509.Certificate, error)

type controller struct {
	*loop.Controller
	client   kubernetes.Interface
	requests certificateslisters.CertificateSigningRequestLister
	clock    clock.WithTicker
	sign     Sign
	events   record.EventRecorder
	// told are the requests of which was said that nobody signs them, by name. There is
	// one worker.
	told map[string]types.UID
}

// New returns the loop; it watches CertificateSigningRequests. Without sign
// none is signed.
func New(env loop.Env, sign Sign) loop.Loop {
	informer := env.Informers.Certificates().V1().CertificateSigningRequests()
	c := &controller{client: env.Client, requests: informer.Lister(), clock: env.Clock, sign: sign, events: env.Events.For("certificatesigning"), told: map[string]types.UID{}}
	c.Controller = loop.New("certificatesigning", env, 1, c.reconcile)
	loop.Watch(c.Controller, informer.Informer(), func(_, request *certificatesv1.CertificateSigningRequest) {
		if request != nil {
			c.Enqueue(loop.KeyOf(request))
		}
	})
	return c.Loop()
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	request, err := c.requests.Get(key.Name)
	if apierrors.IsNotFound(err) {
		delete(c.told, key.Name)
		return nil
	}
	if err != nil {
		return err
	}
	again, err := c.pass(ctx, request)
	if again > 0 {
		c.EnqueueAfter(key, again)
	}
	return err
}

// pass deletes a request that is over, or signs it if it is to be signed, and
// says in how long it will be over.
func (c *controller) pass(ctx context.Context, request *certificatesv1.CertificateSigningRequest) (again time.Duration, err error) {
	now := c.clock.Now()
	left := over(request).Sub(now)
	if left > 0 {
		if why := unanswered(request); why != "" && c.told[request.Name] != request.UID {
			c.told[request.Name] = request.UID
			c.events.Eventf(request, corev1.EventTypeWarning, "NotSigned", "Nobody signs for %s in this cluster: %s", request.Spec.SignerName, why)
		}
		return left, c.issue(ctx, request, now)
	}
	err = c.client.CertificatesV1().CertificateSigningRequests().Delete(ctx, request.Name, metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &request.UID}})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return 0, fmt.Errorf("delete a certificate request that is over: %w", err)
	}
	return 0, nil
}

// issue signs what is to be signed.
func (c *controller) issue(ctx context.Context, request *certificatesv1.CertificateSigningRequest, now time.Time) error {
	if c.sign == nil || !wanted(request) {
		return nil
	}
	updated := request.DeepCopy()
	parsed, err := check(request)
	if err != nil {
		updated.Status.Conditions = append(updated.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
			Type: certificatesv1.CertificateFailed, Status: corev1.ConditionTrue,
			Reason: "SignerValidationFailure", Message: err.Error(), LastUpdateTime: metav1.NewTime(now),
		})
	} else {
		cert, err := c.sign(parsed, lifetime(request))
		if err != nil {
			return fmt.Errorf("sign the certificate that %s asks for: %w", request.Name, err)
		}
		updated.Status.Certificate = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Raw})
	}
	_, err = c.client.CertificatesV1().CertificateSigningRequests().UpdateStatus(ctx, updated, metav1.UpdateOptions{})
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("issue the certificate that %s asks for: %w", request.Name, err)
	}
	return nil
}
