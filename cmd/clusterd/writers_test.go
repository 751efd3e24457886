package main

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

// TestWriterHeldBack: a writer that is held back is counted, reported once in an Event
// of this node, and seen in the store's load.
func TestWriterHeldBack(t *testing.T) {
	api := servertest.Start(t, nil)
	m := &Main{cfg: Config{Name: "n1"}, log: slog.Default(), api: api.Server, metrics: newMetrics()}
	m.budget = m.newBudget(storeLimits{historyBytes: 4096, writerWindow: time.Hour})
	members := raftstoretest.New(t, 1, func(c *raftstore.Config) { c.Events.Written = m.budget.Written })
	m.store = members.Leader()
	ctx, cancel := context.WithTimeout(t.Context(), raftstoretest.Timeout)
	defer cancel()
	for _, origin := range []string{"ann via kubectl", "bob"} {
		value := make([]byte, 10)
		if origin != "bob" {
			value = make([]byte, 2048)
		}
		if _, err := m.store.Txn(ctx, mvcc.Txn{Origin: origin, Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "/a", Value: value}}}); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		if _, err := m.budget.Reserve(ctx, "ann via curl", 1); !apierrors.IsTooManyRequests(err) {
			t.Fatalf("more from her: %v", err)
		}
	}
	if n := testutil.ToFloat64(m.metrics.heldBack); n != 2 {
		t.Errorf("%v writes were counted as held back, want 2", n)
	}
	held := map[string]bool{}
	for _, w := range writersOf(m.store.Top(), m.budget) {
		held[w.Origin] = w.HeldBack
	}
	if len(held) != 2 || !held["ann via kubectl"] || held["bob"] {
		t.Errorf("held back: %v", held)
	}

	ended := make(chan error, 1)
	telling, stop := context.WithCancel(ctx)
	go func() { ended <- m.warnHeldBackWriters(telling) }()
	events := heldBackEvents(t, ctx, api.Client)
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	e := events[0]
	if len(events) != 1 || e.Type != corev1.EventTypeWarning || e.InvolvedObject.Kind != "Node" || e.InvolvedObject.Name != "n1" ||
		!strings.Contains(e.Message, `writer "ann" is held back`) || len(m.heldBack) != 0 {
		t.Errorf("events %+v, %d more to report", events, len(m.heldBack))
	}

	none := &Main{}
	if none.budget = none.newBudget(storeLimits{historyBytes: 1, writerWindow: 0}); none.budget != nil {
		t.Error("a window of 0 bounds writers")
	}
}

// heldBackEvents waits for Events WriterHeldBack.
func heldBackEvents(t *testing.T, ctx context.Context, client kubernetes.Interface) []corev1.Event {
	t.Helper()
	for {
		list, err := client.CoreV1().Events("default").List(ctx, metav1.ListOptions{FieldSelector: "reason=WriterHeldBack"})
		if err != nil {
			t.Fatal(err)
		}
		if len(list.Items) > 0 {
			return list.Items
		}
		time.Sleep(10 * time.Millisecond)
	}
}
