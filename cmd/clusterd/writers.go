package main

import (
	"context"

	"k8s.io/client-go/kubernetes"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/budget"
	"github.com/clusterd/clusterd/raftstore"
)

// newBudget bounds the writers of the store; nil where they are not bounded. It is
// made before the store, so that it sees the log from its first entry on.
func (m *Main) newBudget(l storeLimits) *budget.Budget {
	if l.writerWindow == 0 {
		return nil
	}
	m.heldBack = make(chan string, 16)
	return budget.New(budget.Config{
		HistoryBytes: l.historyBytes,
		Window:       l.writerWindow,
		Writer:       server.WriterOf,
		Now:          m.storeTime,
		Refused: func(_, why string, begins bool) {
			m.metrics.heldBack.Inc()
			if !begins {
				return
			}
			select {
			case m.heldBack <- why:
			default: // many writers at once: the metric counts them
			}
		},
	})
}

// warnHeldBackWriters makes a warning and an Event of each writer that begins to be
// held back by this server.
func (m *Main) warnHeldBackWriters(ctx context.Context) error {
	client, err := kubernetes.NewForConfig(m.api.LoopbackConfig())
	if err != nil {
		return err
	}
	for {
		select {
		case why := <-m.heldBack:
			m.log.Warn("a writer is held back", "why", why)
			m.warnEvent(ctx, client, "WriterHeldBack", why)
		case <-ctx.Done():
			return nil
		}
	}
}

// writerUse is one writer's part of what the store holds and takes.
type writerUse struct {
	raftstore.WriterUse
	// HeldBack says whether its writes are refused for now.
	HeldBack bool `json:"heldBack"`
}

// writersOf adds who is held back.
func writersOf(top raftstore.Top, b *budget.Budget) []writerUse {
	writers := make([]writerUse, len(top.Writers))
	for i, w := range top.Writers {
		writers[i] = writerUse{w, b.HeldBack(w.Origin)}
	}
	return writers
}
