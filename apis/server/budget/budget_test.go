package budget

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/endpoints/request"
)

// TestBucket: a burst, then a rate, then a window's rest at most; half of the
// history in any window, whatever a writer does.
func TestBucket(t *testing.T) {
	// 4000 bytes of history, 10 s: 1000 at once, then 100 a second.
	l := limitsFor(4000, 10*time.Second)
	type step struct {
		at      int64   // ms
		use     float64 // bytes, before the question
		pending float64
		wait    time.Duration
	}
	for _, tt := range []struct {
		name  string
		steps []step
	}{
		{"a new writer", []step{{0, 0, 0, 0}}},
		{"a burst", []step{{0, 999, 0, 0}}},
		{"at its end", []step{{0, 1000, 0, time.Millisecond}, {1, 0, 0, 0}}},
		{"beyond its end", []step{{0, 1200, 0, 2001 * time.Millisecond}, {1000, 0, 0, 1001 * time.Millisecond}, {2001, 0, 0, 0}}},
		{"under way counts", []step{{0, 500, 499, 0}, {0, 0, 500, time.Millisecond}, {0, 0, 0, 0}}},
		{"an object larger than the burst", []step{{0, 1900, 0, 9001 * time.Millisecond}}},
		{"never more than a window", []step{{0, 1e9, 0, 10001 * time.Millisecond}, {10001, 0, 0, 0}}},
		{"rest is forgiven", []step{{0, 999, 0, 0}, {10_000, 999, 0, 0}, {10_000, 2, 0, 11 * time.Millisecond}}},
		{"rest is not saved up", []step{{3_600_000, 1001, 0, 11 * time.Millisecond}}},
		{"the log is behind the clock", []step{{5000, 900, 0, 0}, {4000, 100, 0, time.Millisecond}, {5000, 0, 0, time.Millisecond}, {5001, 0, 0, 0}}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var b bucket
			for i, s := range tt.steps {
				b.use(l, s.at, s.use)
				if got := b.wait(l, s.at, s.pending); got != s.wait {
					t.Errorf("step %d: wait %v, want %v", i, got, s.wait)
				}
			}
		})
	}

	t.Run("half of the history in a window", func(t *testing.T) {
		var b bucket
		const object = 10
		var written []int64 // when, one object each
		for at := int64(0); at < 60_000; at++ {
			for b.wait(l, at, 0) == 0 {
				b.use(l, at, object)
				written = append(written, at)
			}
		}
		if total := len(written) * object; total < 6000 {
			t.Errorf("%d bytes in a minute: the rate is not given", total)
		}
		for first := range written {
			n := 0
			for _, at := range written[first:] {
				if at-written[first] <= 10_000 {
					n += object
				}
			}
			if n > 2000+2*object {
				t.Fatalf("%d bytes within 10 s from %d ms on: more than half of 4000", n, written[first])
			}
		}
	})
}

type clock struct{ millis int64 }

func (c *clock) now() time.Time { return time.UnixMilli(c.millis) }

func leaseIn(namespace string) context.Context {
	return request.WithRequestInfo(context.Background(), &request.RequestInfo{APIGroup: "coordination.k8s.io", Resource: "leases", Namespace: namespace})
}

func requestOf(group, resource, subresource string) context.Context {
	return request.WithRequestInfo(context.Background(), &request.RequestInfo{IsResourceRequest: true, APIGroup: group, Resource: resource, Subresource: subresource})
}

func TestBudget(t *testing.T) {
	c := &clock{millis: 1}
	type word struct {
		writer string
		begins bool
	}
	var heard []word
	b := New(Config{
		HistoryBytes: 4000, Window: 10 * time.Second, Now: c.now,
		Writer: func(origin string) string { name, _, _ := strings.Cut(origin, " via "); return name },
		Refused: func(writer, why string, begins bool) {
			if !strings.Contains(why, `"ann"`) {
				t.Errorf("who is held back? %s", why)
			}
			heard = append(heard, word{writer, begins})
		},
	})
	maps := requestOf("", "configmaps", "")
	write := func(ctx context.Context, origin string, bytes int64) error {
		done, err := b.Reserve(ctx, origin, bytes)
		if err != nil {
			return err
		}
		b.Written(origin, c.millis, bytes) // the log has it
		done()
		return nil
	}
	if err := write(maps, "ann via kubectl", 1000); err != nil {
		t.Fatal(err)
	}
	err := write(maps, "ann via curl", 1)
	status, ok := err.(apierrors.APIStatus)
	if !ok || status.Status().Code != http.StatusTooManyRequests || status.Status().Details.RetryAfterSeconds != 1 {
		t.Fatalf("a second program of the same user: %v", err)
	}
	for _, word := range []string{`writer "ann"`, "1k at once", "0.1 KiB a second", "in 10s", "clusterctl store top", "storeWriterWindow", "nothing was changed", "try again in 1 s"} {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%q does not say %q", err, word)
		}
	}
	if !b.HeldBack("ann via anything") || b.HeldBack("bob") || b.HeldBack("") {
		t.Error("HeldBack names the wrong writers")
	}
	for _, vital := range []context.Context{leaseIn("kube-node-lease"), leaseIn("kube-system"), requestOf("", "nodes", "status")} {
		if err := write(vital, "ann via kubectl", 1); err != nil {
			t.Errorf("a sign of life: %v", err)
		}
	}
	for _, other := range []context.Context{requestOf("", "nodes", ""), requestOf("", "pods", "status"), leaseIn("default"), requestOf("example.com", "leases", ""), context.Background()} {
		if err := write(other, "ann via kubectl", 1); !apierrors.IsTooManyRequests(err) {
			t.Errorf("%v: %v", other, err)
		}
	}
	if err := write(maps, "bob", 1); err != nil {
		t.Errorf("another writer: %v", err)
	}
	if err := write(maps, "", 1<<30); err != nil {
		t.Errorf("the store itself: %v", err)
	}
	c.millis += 1000
	if err := write(maps, "ann", 1); err != nil {
		t.Errorf("after a second: %v", err)
	}

	// What is under way counts, and no longer when it has failed.
	done, err := b.Reserve(maps, "carl", 1000)
	if err != nil {
		t.Fatal(err)
	}
	if !b.HeldBack("carl") {
		t.Error("what is under way does not count")
	}
	done()
	if b.HeldBack("carl") {
		t.Error("what failed counts")
	}

	// Reported once, and again after a while.
	b.Written("ann", c.millis, 5000)
	_ = write(maps, "ann", 1)
	c.millis += remindAfter
	b.Written("ann", c.millis, 5000)
	_ = write(maps, "ann", 1)
	var begins int
	for _, w := range heard {
		if w.begins {
			begins++
		}
	}
	if !heard[0].begins || begins != 2 || len(heard) != 8 || !heard[len(heard)-1].begins {
		t.Errorf("reported %+v, want the first and the last to begin", heard)
	}
}

// TestBudgetForgets: many writers cost no more than some, and those who come
// when all are busy share.
func TestBudgetForgets(t *testing.T) {
	c := &clock{millis: 1}
	b := New(Config{HistoryBytes: 4000, Window: 10 * time.Second, Now: c.now})
	for i := range 3 * maxWriters {
		b.Written(fmt.Sprint("w", i), c.millis, 1000)
	}
	if len(b.writers) > maxWriters+1 {
		t.Errorf("%d writers are remembered", len(b.writers))
	}
	if _, err := b.Reserve(context.Background(), "late", 1); !apierrors.IsTooManyRequests(err) {
		t.Errorf("one who shares with thousands: %v", err)
	}
	c.millis += 60_000
	if _, err := b.Reserve(context.Background(), "later", 1); err != nil || len(b.writers) > 2 {
		t.Errorf("when all have rested: %v, %d are remembered", err, len(b.writers))
	}
}

func TestNoBudget(t *testing.T) {
	var b *Budget
	b.Written("ann", 1, 1<<40)
	if done, err := b.Reserve(context.Background(), "ann", 1<<40); err != nil || b.HeldBack("ann") {
		t.Error(err)
	} else {
		done()
	}
}
