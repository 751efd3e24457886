package join

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/clusterd/clusterd/member/join/jointest"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/member/transport"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// laggingStore is the store of a member that has not applied what the others have.
type laggingStore struct {
	*jointest.Store // as the leader has it
	lags            bool
	applied         map[string]*mvcc.KeyValue // what it answers by itself while it lags
	cut             error                     // of all that asks the leader; nil: it is reached
}

// lag has the member apply nothing more.
func (l *laggingStore) lag(t *testing.T) {
	t.Helper()
	list, err := l.Store.List(t.Context(), "/", raftstore.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	l.lags, l.applied = true, map[string]*mvcc.KeyValue{}
	for _, kv := range list.KVs {
		l.applied[kv.Key] = &kv
	}
}

func (l *laggingStore) Get(ctx context.Context, key string, o raftstore.ReadOptions) (*mvcc.KeyValue, int64, error) {
	switch {
	case !l.lags:
	case o.Stale:
		return l.applied[key], 0, nil
	case l.cut != nil:
		return nil, 0, l.cut
	}
	return l.Store.Get(ctx, key, o)
}

// TestKeysNeedTheLeader: a member that lags hands the servers' keys to no server that
// was removed or demoted meanwhile, whether it reaches the leader or not.
func TestKeysNeedTheLeader(t *testing.T) {
	cut := errors.New("no leader")
	for _, test := range []struct {
		name    string
		change  func(context.Context, Store) error
		cut     error
		refused bool
		want    string // part of the error; empty: it gets them
	}{
		{"nothing has changed", nil, nil, false, ""},
		{"cut off from the leader", nil, cut, false, "no leader"},
		{"removed", func(ctx context.Context, s Store) error {
			_, err := RemoveMember(ctx, s, "n2", time.Now())
			return err
		}, nil, true, "has no record"},
		{"removed, and cut off from the leader", func(ctx context.Context, s Store) error {
			_, err := RemoveMember(ctx, s, "n2", time.Now())
			return err
		}, cut, false, "no leader"},
		{"demoted", func(ctx context.Context, s Store) error {
			_, err := SetRole(ctx, s, "n2", pki.Agent)
			return err
		}, nil, true, "is an agent"},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := newWorld(t)
			res, wish, err := w.join(t, w.token(t, time.Hour), "n2")
			if err != nil {
				t.Fatal(err)
			}
			if err := confirm(t.Context(), w.store, pki.Fingerprint(wish.Key.Public())); err != nil {
				t.Fatal(err)
			}
			lagging := &laggingStore{Store: w.store}
			lagging.lag(t)
			w.server.Store = lagging
			if test.change != nil {
				if err := test.change(t.Context(), w.store); err != nil {
					t.Fatal(err)
				}
			}
			lagging.cut = test.cut
			keys, err := FetchKeys(t.Context(), w.as(wish, res, transport.Member))
			var no *Refusal
			if test.want == "" {
				if err != nil || len(keys.CAKey) == 0 {
					t.Errorf("%v", err)
				}
				return
			}
			if err == nil || !strings.Contains(err.Error(), test.want) || errors.As(err, &no) != test.refused {
				t.Errorf("keys were handed out: %t, %v, want %q", err == nil, err, test.want)
			}
		})
	}
}

// TestLeave: a member asks for itself alone, hears why it cannot go, and one without a
// record removes no member.
func TestLeave(t *testing.T) {
	w := newWorld(t)
	res, wish, err := w.join(t, w.token(t, time.Hour), "n2")
	if err != nil {
		t.Fatal(err)
	}
	dial := w.as(wish, res, transport.Member)
	var asked []string
	needed := true
	w.server.Leave = func(_ context.Context, name string, really bool) error {
		asked = append(asked, fmt.Sprint(name, " ", really))
		if needed {
			return &Refusal{CodeNeeded, "n2 alone holds the cluster's state"}
		}
		return nil
	}
	var no *Refusal
	if err := MayLeave(t.Context(), dial); !errors.As(err, &no) || no.Code != CodeNeeded || !strings.Contains(err.Error(), "alone") {
		t.Errorf("%v", err)
	}
	needed = false
	if err := errors.Join(MayLeave(t.Context(), dial), Leave(t.Context(), dial)); err != nil {
		t.Error(err)
	}
	if want := []string{"n2 false", "n2 false", "n2 true"}; !slices.Equal(asked, want) {
		t.Errorf("asked %q, want %q", asked, want)
	}
	if _, err := RemoveMember(t.Context(), w.store, "n2", time.Now()); err != nil {
		t.Fatal(err)
	}
	if err := Leave(t.Context(), dial); !errors.As(err, &no) || no.Code != CodeMember || len(asked) != 3 {
		t.Errorf("%v, asked %q", err, asked)
	}
}
