package pod

import (
	"context"
	"fmt"
	"strings"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/clusterd/clusterd/agent/podstate"
)

// A turn of a worker is a span, named and with the attributes of the kubelet's;
// what the turn begins are its children, and their requests to the API, by the
// client that is traced, theirs. A child may end after its parent has: the
// operation goes on while the worker turns to other things.

const turnSpan = "syncPod"

// spanState is of the loop.
type spanState struct {
	turn trace.Span // of the turn under way, nil: none is
	step string     // what is begun, "": something of the turn itself
}

// beginTurn begins the span of a turn; what it returns ends it.
func (w *worker) beginTurn() (end func()) {
	_, span := w.m.cfg.Tracer.Start(w.ctx, turnSpan, trace.WithNewRoot())
	if span.IsRecording() {
		span.SetAttributes(
			attribute.String("k8s.pod.uid", string(w.uid)),
			attribute.String("k8s.pod", fullName(w.pod)),
			attribute.String("k8s.pod.name", w.pod.Name),
			attribute.String("k8s.namespace.name", w.pod.Namespace),
		)
	}
	w.span.turn = span
	return func() {
		w.span.turn = nil
		if w.status.built != nil {
			span.SetAttributes(attribute.String("k8s.pod.phase", string(w.status.built.Phase)))
		}
		span.End()
	}
}

// traced begins the span of something that goes on beside the loop.
func (w *worker) traced(ctx context.Context) (_ context.Context, end func()) {
	if w.span.turn == nil {
		return ctx, func() {}
	}
	name := w.span.step
	if name == "" {
		name = "update"
	}
	ctx, span := w.m.cfg.Tracer.Start(trace.ContextWithSpan(ctx, w.span.turn), name, trace.WithAttributes(attribute.String("k8s.pod.uid", string(w.uid))))
	return ctx, func() { span.End() }
}

// stepName is the name of a step's type: CreateSandbox.
func stepName(s podstate.Step) string {
	name := fmt.Sprintf("%T", s)
	return name[strings.LastIndexByte(name, '.')+1:]
}
