package kubestore

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

func TestExplain(t *testing.T) {
	for _, tt := range []struct {
		name    string
		err     error
		code    int32
		reason  metav1.StatusReason
		retry   int32 // seconds; 0: clients must not repeat by themselves
		message string
	}{
		{"no leader", raftstore.ErrNoLeader, 503, metav1.StatusReasonServiceUnavailable, 1, "nothing was changed"},
		{"no leader for long", &raftstore.NoLeaderError{For: 35 * time.Second, Voters: 3}, 503, metav1.StatusReasonServiceUnavailable, 0, "no leader for 35s, nothing was changed: 2 of its 3 voters are needed. Start clusterd"},
		{"unknown outcome", raftstore.ErrUnknownOutcome, 504, metav1.StatusReasonTimeout, 0, "not known whether the change was stored"},
		{"unknown outcome for want of a leader", fmt.Errorf("%w: %w", raftstore.ErrNoLeader, raftstore.ErrUnknownOutcome), 504, metav1.StatusReasonTimeout, 0, "not known"},
		{"too large", raftstore.ErrTooLarge, 413, metav1.StatusReasonRequestEntityTooLarge, 0, "too large"},
		{"no space", raftstore.ErrNoSpace, 507, ReasonInsufficientStorage, 0, "cannot store more"},
		{"quota", &raftstore.QuotaError{Used: 3 << 30, Growth: 1 << 20, Quota: 3 << 30}, 507, ReasonInsufficientStorage, 0, "quota of the store is used up (3.0 GiB of 3.0 GiB, 1.0 MiB more"},
		{"quota of a kind", &raftstore.QuotaError{Folder: Folder("/core/secrets", "a"), Used: 3, Growth: 1, Quota: 3}, 507, ReasonInsufficientStorage, 0, "the quota of secrets in namespace a is used up (3 bytes of 3 bytes, 1 bytes more"},
		{"quota of a group's kind", &raftstore.QuotaError{Folder: Folder("/apps/deployments", "")}, 507, ReasonInsufficientStorage, 0, "quota of deployments.apps is"},
		{"compacted, with what is left", &mvcc.CompactedError{Requested: 3, Oldest: 77}, 410, metav1.StatusReasonExpired, 0, "The oldest one available is 77."},
		{"closed", raftstore.ErrClosed, 503, metav1.StatusReasonServiceUnavailable, 1, "shutting down"},
		{"compacted", mvcc.ErrCompacted, 410, metav1.StatusReasonExpired, 0, "too old"},
		{"deadline", context.DeadlineExceeded, 504, metav1.StatusReasonTimeout, 0, "did not answer in time"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			err := explain(fmt.Errorf("below: %w", tt.err))
			var api apierrors.APIStatus
			if !errors.As(err, &api) {
				t.Fatalf("%v is not a status", err)
			}
			status := api.Status()
			if status.Code != tt.code || status.Reason != tt.reason {
				t.Errorf("got %d %s, want %d %s", status.Code, status.Reason, tt.code, tt.reason)
			}
			if retry, ok := apierrors.SuggestsClientDelay(err); ok != (tt.retry > 0) || int32(retry) != tt.retry {
				t.Errorf("retry after %d (%v), want %d", retry, ok, tt.retry)
			}
			if !strings.Contains(status.Message, tt.message) {
				t.Errorf("message %q lacks %q", status.Message, tt.message)
			}
		})
	}
	other := errors.New("other")
	if got := explain(other); !errors.Is(got, other) {
		t.Errorf("unknown error became %v", got)
	}
}

// leaderless is a store whose leader is gone: its own copy can still be read.
type leaderless struct{ *raftstore.Store }

func (l leaderless) Txn(context.Context, mvcc.Txn) (mvcc.TxnResult, error) {
	return mvcc.TxnResult{}, raftstore.ErrNoLeader
}

func (l leaderless) Get(ctx context.Context, key string, o raftstore.ReadOptions) (*mvcc.KeyValue, int64, error) {
	if !o.Stale {
		return nil, 0, raftstore.ErrNoLeader
	}
	return l.Store.Get(ctx, key, o)
}

func (l leaderless) List(ctx context.Context, prefix string, o raftstore.ListOptions) (raftstore.ListResult, error) {
	if !o.Stale {
		return raftstore.ListResult{}, raftstore.ErrNoLeader
	}
	return l.Store.List(ctx, prefix, o)
}

// What needs the leader fails with a 503 that asks to come back; what may be
// old is still answered.
func TestWithoutLeader(t *testing.T) {
	f := newFixture(t, setup{})
	const key = "/pods/ns/foo"
	created := &example.Pod{}
	if err := f.raw.Create(f.ctx, key, &example.Pod{ObjectMeta: metav1.ObjectMeta{Name: "foo", Namespace: "ns"}}, created, 0); err != nil {
		t.Fatal(err)
	}
	if err := f.raw.Get(f.ctx, key, storage.GetOptions{}, &example.Pod{}); err != nil {
		t.Fatal(err)
	}
	f.raw.store = leaderless{f.store.Store}
	list := func(rv string) storage.ListOptions {
		return storage.ListOptions{ResourceVersion: rv, Predicate: storage.Everything, Recursive: true}
	}
	same := func(in runtime.Object, _ storage.ResponseMeta) (runtime.Object, *uint64, error) { return in, nil, nil }
	other := func(in runtime.Object, _ storage.ResponseMeta) (runtime.Object, *uint64, error) {
		in.(*example.Pod).Labels = map[string]string{"a": "b"}
		return in, nil, nil
	}
	for name, op := range map[string]func() error{
		"get":    func() error { return f.raw.Get(f.ctx, key, storage.GetOptions{}, &example.Pod{}) },
		"list":   func() error { return f.raw.GetList(f.ctx, "/pods", list(""), &example.PodList{}) },
		"create": func() error { return f.raw.Create(f.ctx, "/pods/ns/bar", &example.Pod{}, nil, 0) },
		"update": func() error { return f.raw.GuaranteedUpdate(f.ctx, key, &example.Pod{}, false, nil, other, nil) },
		"no-op":  func() error { return f.raw.GuaranteedUpdate(f.ctx, key, &example.Pod{}, false, nil, same, nil) },
		"delete": func() error {
			return f.raw.Delete(f.ctx, key, &example.Pod{}, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{})
		},
		"version": func() error { _, err := f.raw.GetCurrentResourceVersion(f.ctx); return err },
		"absent":  func() error { return f.raw.Get(f.ctx, "/pods/ns/none", storage.GetOptions{}, &example.Pod{}) },
	} {
		err := op()
		if _, wait := apierrors.SuggestsClientDelay(err); !apierrors.IsServiceUnavailable(err) || !wait {
			t.Errorf("%s: got %v, want 503 with Retry-After", name, err)
		}
	}
	for _, rv := range []string{"0", created.ResourceVersion} {
		if err := f.raw.Get(f.ctx, key, storage.GetOptions{ResourceVersion: rv}, &example.Pod{}); err != nil {
			t.Errorf("get at resource version %s: %v", rv, err)
		}
		pods := &example.PodList{}
		if err := f.raw.GetList(f.ctx, "/pods", list(rv), pods); err != nil || len(pods.Items) != 1 {
			t.Errorf("list at resource version %s: %d pods, %v", rv, len(pods.Items), err)
		}
	}
	w, err := f.raw.Watch(f.ctx, "/pods", list("0"))
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	if e := <-w.ResultChan(); e.Type != watch.Added {
		t.Errorf("watch from 0 began with %s", e.Type)
	}
	w, err = f.raw.Watch(f.ctx, "/pods", list(""))
	if err != nil {
		t.Fatal(err)
	}
	defer w.Stop()
	if e := <-w.ResultChan(); e.Type != watch.Error || e.Object.(*metav1.Status).Code != http.StatusServiceUnavailable {
		t.Errorf("watch of the newest state began with %s %v", e.Type, e.Object)
	}
}

// A member that has just started may hold an old state, or none. Even a client
// that is content with any must not be shown it.
func TestFirstReadIsConfirmed(t *testing.T) {
	f := newFixture(t, setup{})
	pods := storage.ListOptions{ResourceVersion: "0", Predicate: storage.Everything, Recursive: true}
	f.raw.store = leaderless{f.store.Store}
	if err := f.raw.GetList(f.ctx, "/pods", pods, &example.PodList{}); !apierrors.IsServiceUnavailable(err) {
		t.Errorf("first list, without a leader: %v, want 503", err)
	}
	f.raw.store = f.store
	if err := f.raw.GetList(f.ctx, "/pods", pods, &example.PodList{}); err != nil {
		t.Errorf("first list: %v", err)
	}
	f.raw.store = leaderless{f.store.Store}
	if err := f.raw.GetList(f.ctx, "/pods", pods, &example.PodList{}); err != nil {
		t.Errorf("second list, without a leader: %v", err)
	}
}
