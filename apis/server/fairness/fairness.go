// Package fairness shares an API server among those who ask it: the library's
// priority and fairness (KEP 1040), and the objects that it begins with.
//
// Every request is matched by a FlowSchema to a PriorityLevelConfiguration,
// which has a number of seats and queues in front of them. A user that floods the server
// waits in queues of its own; requests beyond the queues are answered 429 with
// Retry-After. Members of system:masters and health checks do not wait.
package fairness

import (
	"context"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	flowcontrolv1 "k8s.io/api/flowcontrol/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/apiserver/pkg/apis/flowcontrol/bootstrap"
	"k8s.io/apiserver/pkg/util/flowcontrol"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"
)

// Seats is how many requests a server works on at once: upstream's default, 400
// that read and 200 that write. Those of exempt levels come on top.
const Seats = 600

// review is how often the default objects are compared with what is stored.
// What is missing is made again at once.
const review = time.Minute

// Fairness is the part of one server.
type Fairness struct {
	// Control takes part in the handling of requests.
	Control flowcontrol.Interface

	levels  objects[*flowcontrolv1.PriorityLevelConfiguration]
	schemas objects[*flowcontrolv1.FlowSchema]
	synced  []cache.InformerSynced
	changed chan struct{} // holds one: something stored has changed
}

// New makes it. It begins to work with the library's defaults; the objects
// count once informers, which the caller starts, have them. client has to be a
// member of system:masters: the objects are written while all else may wait.
func New(client kubernetes.Interface, factory informers.SharedInformerFactory, seats int) (*Fairness, error) {
	api, informer := client.FlowcontrolV1(), factory.Flowcontrol().V1()
	levels, schemas := informer.PriorityLevelConfigurations(), informer.FlowSchemas()
	f := &Fairness{
		Control: flowcontrol.New(factory, api, seats),
		synced:  []cache.InformerSynced{levels.Informer().HasSynced, schemas.Informer().HasSynced},
		changed: make(chan struct{}, 1),
		levels: objects[*flowcontrolv1.PriorityLevelConfiguration]{
			kind: "PriorityLevelConfiguration", get: levels.Lister().Get, writer: api.PriorityLevelConfigurations(),
			mandatory: bootstrap.MandatoryPriorityLevelConfigurations, suggested: bootstrap.SuggestedPriorityLevelConfigurations,
			copySpec: copyLevel,
		},
		schemas: objects[*flowcontrolv1.FlowSchema]{
			kind: "FlowSchema", get: schemas.Lister().Get, writer: api.FlowSchemas(),
			mandatory: bootstrap.MandatoryFlowSchemas, suggested: bootstrap.SuggestedFlowSchemas,
			copySpec: func(to, from *flowcontrolv1.FlowSchema) { from.Spec.DeepCopyInto(&to.Spec) },
		},
	}
	gone := cache.ResourceEventHandlerFuncs{DeleteFunc: func(any) { f.wake() }}
	for _, i := range []cache.SharedIndexInformer{levels.Informer(), schemas.Informer()} {
		if _, err := i.AddEventHandler(gone); err != nil {
			return nil, fmt.Errorf("follow the objects of priority and fairness: %w", err)
		}
	}
	return f, nil
}

// copyLevel leaves to the user how much the exempt level takes of the others'.
func copyLevel(to, from *flowcontrolv1.PriorityLevelConfiguration) {
	if exempt := flowcontrolv1.PriorityLevelEnablementExempt; from.Spec.Type == exempt && to.Spec.Type == exempt {
		return
	}
	from.Spec.DeepCopyInto(&to.Spec)
}

func (f *Fairness) wake() {
	select {
	case f.changed <- struct{}{}:
	default:
	}
}

// Run keeps the default objects as they should be, until ctx ends.
func (f *Fairness) Run(ctx context.Context) error {
	if !cache.WaitForCacheSync(ctx.Done(), f.synced...) {
		return nil
	}
	backoff := wait.Backoff{Duration: 50 * time.Millisecond, Factor: 2, Jitter: 0.2, Steps: 12, Cap: 10 * time.Second}
	failed := backoff
	// Servers of two versions would take turns at an object if each put it
	// right at once: only what is missing is made without waiting.
	whole := true
	for {
		var again <-chan time.Time
		if err := f.ensure(ctx, whole); err != nil {
			klog.FromContext(ctx).V(2).Info("Objects of priority and fairness not all written, trying again", "err", err)
			again = time.After(failed.Step())
		} else {
			failed, whole = backoff, false
			again = time.After(wait.Jitter(review, 0.2))
		}
		select {
		case <-again:
			whole = true
		case <-f.changed:
		case <-ctx.Done():
			return nil
		}
	}
}

func (f *Fairness) ensure(ctx context.Context, whole bool) error {
	group, ctx := errgroup.WithContext(ctx)
	f.levels.ensure(ctx, group, whole)
	f.schemas.ensure(ctx, group, whole)
	return group.Wait()
}
