package loop

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	"k8s.io/client-go/tools/record"
	"k8s.io/client-go/tools/reference"
	"k8s.io/klog/v2"
	"k8s.io/utils/clock"
)

const (
	eventQueue    = 8192
	eventAttempts = 3
	eventTimeout  = 5 * time.Second
	eventPause    = 200 * time.Millisecond
)

// Events writes core/v1 Events. Repeated events of one object become one Event
// with a count; floods about one object are thinned. Recording never blocks a
// reconcile: when the queue is full the event is dropped and counted.
type Events struct {
	client kubernetes.Interface
	clock  clock.WithTicker
	queue  chan *corev1.Event
}

// NewEvents returns a writer of events; Run must be running for them to arrive.
func NewEvents(client kubernetes.Interface, clock clock.WithTicker) *Events {
	return &Events{client: client, clock: clock, queue: make(chan *corev1.Event, eventQueue)}
}

// For returns a recorder that signs its events with the component's name.
func (e *Events) For(component string) record.EventRecorder {
	return recorder{events: e, component: component}
}

// Run writes queued events until ctx is cancelled.
func (e *Events) Run(ctx context.Context) error {
	correlator := record.NewEventCorrelator(e.clock)
	for {
		select {
		case <-ctx.Done():
			return nil
		case event := <-e.queue:
			e.write(ctx, correlator, event)
		}
	}
}

func (e *Events) write(ctx context.Context, correlator *record.EventCorrelator, event *corev1.Event) {
	result, err := correlator.EventCorrelate(event)
	if err != nil {
		klog.FromContext(ctx).Info("event could not be correlated", "err", err)
	}
	if result.Skip {
		return
	}
	for attempt := range eventAttempts {
		stored, err := e.send(ctx, result)
		if err == nil {
			correlator.UpdateState(stored)
			return
		}
		if refused(err) || ctx.Err() != nil {
			klog.FromContext(ctx).V(4).Info("event refused", "reason", event.Reason, "object", event.InvolvedObject.Name, "err", err)
			break
		}
		if attempt == eventAttempts-1 {
			klog.FromContext(ctx).Info("event not written", "reason", event.Reason, "object", event.InvolvedObject.Name, "err", err)
			break
		}
		select {
		case <-ctx.Done():
		case <-e.clock.After(eventPause << attempt):
		}
	}
	eventsDropped.Inc()
}

func (e *Events) send(ctx context.Context, result *record.EventCorrelateResult) (*corev1.Event, error) {
	ctx, cancel := context.WithTimeout(ctx, eventTimeout)
	defer cancel()
	event := result.Event
	api := e.client.CoreV1().Events(event.Namespace)
	if result.Event.Count > 1 && result.Patch != nil {
		stored, err := api.Patch(ctx, event.Name, types.StrategicMergePatchType, result.Patch, metav1.PatchOptions{})
		if !apierrors.IsNotFound(err) {
			return stored, err
		}
		// The Event outlived its time to live: begin a new one.
		event = event.DeepCopy()
	}
	event.ResourceVersion = ""
	stored, err := api.Create(ctx, event, metav1.CreateOptions{})
	if apierrors.IsAlreadyExists(err) {
		return event, nil // a retry of a create that had arrived
	}
	return stored, err
}

// refused reports whether trying again cannot help.
func refused(err error) bool {
	return apierrors.IsForbidden(err) || apierrors.IsInvalid(err) || apierrors.IsNotFound(err) || apierrors.IsBadRequest(err)
}

type recorder struct {
	events    *Events
	component string
}

func (r recorder) Event(object runtime.Object, eventtype, reason, message string) {
	r.record(object, nil, eventtype, reason, message)
}

func (r recorder) Eventf(object runtime.Object, eventtype, reason, format string, args ...any) {
	r.record(object, nil, eventtype, reason, fmt.Sprintf(format, args...))
}

func (r recorder) AnnotatedEventf(object runtime.Object, annotations map[string]string, eventtype, reason, format string, args ...any) {
	r.record(object, annotations, eventtype, reason, fmt.Sprintf(format, args...))
}

// maxMessage is the API's limit on an Event's message.
const maxMessage = 1024

func (r recorder) record(object runtime.Object, annotations map[string]string, eventtype, reason, message string) {
	ref, err := reference.GetReference(scheme.Scheme, object)
	if err != nil {
		eventsDropped.Inc()
		klog.Background().Error(err, "event about an object of unknown kind", "loop", r.component, "reason", reason)
		return
	}
	namespace := ref.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault
	}
	if len(message) > maxMessage {
		message = message[:maxMessage-3] + "..."
	}
	now := r.events.clock.Now()
	stamp := metav1.NewTime(now)
	event := &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{
			Name:        fmt.Sprintf("%s.%x", ref.Name, now.UnixNano()),
			Namespace:   namespace,
			Annotations: annotations,
		},
		InvolvedObject:      *ref,
		Reason:              reason,
		Message:             message,
		Type:                eventtype,
		FirstTimestamp:      stamp,
		LastTimestamp:       stamp,
		Count:               1,
		Source:              corev1.EventSource{Component: r.component},
		ReportingController: r.component,
	}
	select {
	case r.events.queue <- event:
	default:
		eventsDropped.Inc()
	}
}
