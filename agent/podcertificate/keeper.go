// Package podcertificate gets certificates for the podCertificate sources of
// pods' volumes: it makes a key on this node, asks the signer by a
// PodCertificateRequest, and asks again when the signer has said that it is time.
// Keys are in memory and in the pods' volumes alone.
package podcertificate

import (
	"context"
	"fmt"
	"sync"
	"time"

	certificatesv1 "k8s.io/api/certificates/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
	"k8s.io/utils/clock"

	"github.com/clusterd/clusterd/agent/volume"
	"github.com/clusterd/clusterd/apis/certificates"
)

// refusedFor is how long a signer that has refused is not asked again.
const refusedFor = time.Hour

// Config of a Keeper; all is required.
type Config struct {
	Client   kubernetes.Interface
	NodeName string
	Node     func() *v1.Node // as last known
	Recorder record.EventRecorder
	// Changed is called when the request of a pod was answered or is gone. It
	// must not block.
	Changed func(pod types.UID)
	Clock   clock.PassiveClock
}

// Keeper implements volume.Certificates.
type Keeper struct {
	cfg      Config
	informer cache.SharedIndexInformer
	needed   chan struct{} // closed at the first pod with such a source
	once     sync.Once

	mu      sync.Mutex // guards sources
	sources map[source]*state
}

var _ volume.Certificates = &Keeper{}

type source struct {
	pod    types.UID
	volume string
	index  int
}

// state is what is known of one source.
type state struct {
	mu sync.Mutex // guards all below; held while the API is asked
	// held is what the pod has, nil: nothing yet.
	held *credential
	// asked is the request that is not answered yet, nil: there is none.
	asked *asked
	// refused is why there is none; the signer is asked again at retryAt.
	refused error
	retryAt time.Time
}

type credential struct {
	key, chain          []byte
	refreshAt, notAfter time.Time
	expired             bool // and an event has said so
}

type asked struct {
	name string
	key  []byte
}

// New returns a Keeper; Run has to run it.
func New(cfg Config) *Keeper {
	k := &Keeper{cfg: cfg, needed: make(chan struct{}), sources: map[source]*state{}}
	factory := informers.NewSharedInformerFactoryWithOptions(cfg.Client, 0, informers.WithTweakListOptions(func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("spec.nodeName", cfg.NodeName).String()
	}))
	k.informer = factory.Certificates().V1().PodCertificateRequests().Informer()
	tell := func(obj any) {
		if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
			obj = gone.Obj
		}
		if r, ok := obj.(*certificatesv1.PodCertificateRequest); ok {
			cfg.Changed(r.Spec.PodUID)
		}
	}
	_, _ = k.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: tell, DeleteFunc: tell, UpdateFunc: func(_, obj any) { tell(obj) }})
	return k
}

// Run watches this node's requests, from the first pod on that needs one,
// until ctx ends.
func (k *Keeper) Run(ctx context.Context) error {
	select {
	case <-k.needed:
		k.informer.RunWithContext(ctx)
	case <-ctx.Done():
	}
	return nil
}

// Forget implements volume.Certificates.
func (k *Keeper) Forget(pod types.UID) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for s := range k.sources {
		if s.pod == pod {
			delete(k.sources, s)
		}
	}
}

// Certificate implements volume.Certificates.
func (k *Keeper) Certificate(ctx context.Context, pod *v1.Pod, s volume.CertificateSource) (key, chain []byte, err error) {
	k.once.Do(func() { close(k.needed) })
	id := source{pod.UID, s.Volume, s.Index}
	k.mu.Lock()
	st := k.sources[id]
	if st == nil {
		st = &state{}
		k.sources[id] = st
	}
	k.mu.Unlock()
	st.mu.Lock()
	defer st.mu.Unlock()

	if err = k.answer(ctx, pod, s, st); err == nil {
		err = k.ask(ctx, pod, s, st)
	}
	if st.held == nil {
		switch {
		case err != nil:
		case st.asked != nil:
			err = fmt.Errorf("certificate of signer %q is not issued yet: PodCertificateRequest %s/%s is pending", s.SignerName, pod.Namespace, st.asked.name)
		default:
			err = st.refused
		}
		return nil, nil, err
	}
	if err != nil {
		k.cfg.Recorder.Eventf(pod, v1.EventTypeWarning, "CertificateNotRenewed", "Certificate of signer %q, which is good until %s, is not renewed: %v", s.SignerName, st.held.notAfter.UTC().Format(time.RFC3339), err)
	}
	if !st.held.expired && k.cfg.Clock.Now().After(st.held.notAfter) {
		st.held.expired = true
		k.cfg.Recorder.Eventf(pod, v1.EventTypeWarning, "CertificateExpired", "Certificate of signer %q has expired and was not renewed", s.SignerName)
	}
	return st.held.key, st.held.chain, nil
}

// answer looks whether the request that was made is answered.
func (k *Keeper) answer(ctx context.Context, pod *v1.Pod, s volume.CertificateSource, st *state) error {
	if st.asked == nil {
		return nil
	}
	request, err := k.request(ctx, pod.Namespace, st.asked.name)
	switch {
	case err != nil:
		return err
	case request == nil: // it was deleted
		st.asked = nil
		return nil
	}
	outcome := certificates.Outcome(request)
	switch {
	case outcome == nil:
		return nil
	case outcome.Type == certificatesv1.PodCertificateRequestConditionTypeIssued:
		st.held = &credential{
			key: st.asked.key, chain: cleanChain(request.Status.CertificateChain),
			refreshAt: request.Status.BeginRefreshAt.Time, notAfter: request.Status.NotAfter.Time,
		}
		st.refused = nil
	default:
		st.refused = fmt.Errorf("signer %q has answered PodCertificateRequest %s/%s: %s, reason=%q, message=%q",
			s.SignerName, pod.Namespace, request.Name, outcome.Type, outcome.Reason, outcome.Message)
		st.retryAt = k.cfg.Clock.Now().Add(refusedFor)
		k.cfg.Recorder.Eventf(pod, v1.EventTypeWarning, outcome.Type, "%v", st.refused)
	}
	st.asked = nil
	return nil
}

// request finds a request of this node; nil: it is gone. One that the watch has
// not shown is asked for plainly, in a way in which a node may ask for what is
// not there.
func (k *Keeper) request(ctx context.Context, namespace, name string) (*certificatesv1.PodCertificateRequest, error) {
	obj, ok, err := k.informer.GetStore().GetByKey(cache.NewObjectName(namespace, name).String())
	if err == nil && ok {
		if r, ok := obj.(*certificatesv1.PodCertificateRequest); ok {
			return r, nil
		}
	}
	list, err := k.cfg.Client.CertificatesV1().PodCertificateRequests(namespace).List(ctx, metav1.ListOptions{
		FieldSelector: fields.Set{"spec.nodeName": k.cfg.NodeName, metav1.ObjectNameField: name}.AsSelector().String(),
	})
	if err != nil {
		return nil, fmt.Errorf("look up PodCertificateRequest %s/%s: %w", namespace, name, err)
	}
	for i := range list.Items {
		if list.Items[i].Name == name {
			return &list.Items[i], nil
		}
	}
	return nil, nil
}

// ask makes a key and a request for it, if that is due.
func (k *Keeper) ask(ctx context.Context, pod *v1.Pod, s volume.CertificateSource, st *state) error {
	now := k.cfg.Clock.Now()
	if st.asked != nil || st.held != nil && now.Before(st.held.refreshAt) || st.refused != nil && now.Before(st.retryAt) {
		return nil
	}
	account, err := k.cfg.Client.CoreV1().ServiceAccounts(pod.Namespace).Get(ctx, pod.Spec.ServiceAccountName, metav1.GetOptions{})
	if err != nil {
		return fmt.Errorf("certificate of signer %q: read the pod's service account: %w", s.SignerName, err)
	}
	key, stub, err := newKey(s.KeyType)
	if err != nil {
		return fmt.Errorf("certificate of signer %q: %w", s.SignerName, err)
	}
	made, err := k.cfg.Client.CertificatesV1().PodCertificateRequests(pod.Namespace).Create(ctx, &certificatesv1.PodCertificateRequest{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace, GenerateName: "req-",
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Pod", Name: pod.Name, UID: pod.UID}},
		},
		Spec: certificatesv1.PodCertificateRequestSpec{
			SignerName: s.SignerName, PodName: pod.Name, PodUID: pod.UID,
			ServiceAccountName: account.Name, ServiceAccountUID: account.UID,
			NodeName: types.NodeName(k.cfg.NodeName), NodeUID: k.cfg.Node().UID,
			MaxExpirationSeconds: s.MaxExpirationSeconds, StubPKCS10Request: stub, UnverifiedUserAnnotations: s.UserAnnotations,
		},
	}, metav1.CreateOptions{})
	if err != nil {
		return fmt.Errorf("ask signer %q for a certificate: %w", s.SignerName, err)
	}
	st.asked, st.refused = &asked{name: made.Name, key: key}, nil
	return nil
}
