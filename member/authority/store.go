package authority

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// origin names the maker of these records in the store's history.
const origin = "clusterd authority"

// stateKey is the key in the store of the State.
const stateKey = "/clusterd/authority"

// progress is which state each member has.
var progress = join.Progress{Prefix: join.AuthorityProgress, Origin: origin}

// separate is which members know of separate authorities.
var separate = join.Progress{Prefix: join.SeparateKnown, Origin: origin}

// ErrUnderWay is returned by Begin while a CA rotation is in progress.
var ErrUnderWay = errors.New("CA rotation in progress: see clusterctl ca status")

// ErrNone is returned by Finish when no rotation is in progress.
var ErrNone = errors.New("no CA rotation is in progress: start one with clusterctl ca rotate")

// Get reads the state. A cluster whose CA was never rotated has the zero
// State. A stale one needs no leader.
func Get(ctx context.Context, s join.Store, stale bool) (State, error) {
	state, _, err := get(ctx, s, stale)
	return state, err
}

func get(ctx context.Context, s join.Store, stale bool) (State, int64, error) {
	var state State
	kv, _, err := s.Get(ctx, stateKey, raftstore.ReadOptions{Stale: stale})
	if err != nil || kv == nil {
		return State{Phase: Stable}, 0, wrap("read the state of the authority", err)
	}
	return state, kv.ModRevision, wrap("the state of the authority", json.Unmarshal(kv.Value, &state))
}

func wrap(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", what, err)
}

// put replaces the state that was read at the revision, and reports whether
// no other write came first.
func put(ctx context.Context, s join.Store, revision int64, next State, more ...mvcc.Op) (bool, error) {
	b, err := json.Marshal(next)
	if err != nil {
		return false, err
	}
	res, err := s.Txn(ctx, mvcc.Txn{
		Origin:   origin,
		Compares: []mvcc.Compare{{Key: stateKey, ModRevision: revision}},
		Ops:      append([]mvcc.Op{{Type: mvcc.OpPut, Key: stateKey, Value: b}}, more...),
	})
	if err != nil {
		return false, wrap("write the state of the authority", err)
	}
	return res.Succeeded, nil
}

// Begin begins a rotation. What has no authority of its own yet gets one; that is refused
// with an error that is an ErrBehind while a member's version does not know of such.
func Begin(ctx context.Context, s join.Store, w Request, now time.Time) error {
	state, revision, err := get(ctx, s, false)
	if err != nil {
		return err
	}
	if state.Phase != Stable || w.Now.Number < state.Number { // the end of one is not yet known to who asks
		return ErrUnderWay
	}
	if err := known(ctx, s, state, w, now); err != nil {
		return err
	}
	return begin(ctx, s, state, revision, w, now)
}

// ErrBehind is returned by Begin while members do not know of separate authorities.
var ErrBehind = errors.New("not every member's version knows of separate authorities")

// known returns an ErrBehind with the names of members whose version would take the
// servers' authority for what has one of its own.
func known(ctx context.Context, s join.Store, state State, w Request, now time.Time) error {
	if len(state.Own) > 0 || state.Number == 0 && w.Now.Separated() || len(w.Successors) == 1 && w.Successors[pki.ForPeers] != nil {
		return nil
	}
	members, err := Members(ctx, s, false)
	if err != nil {
		return err
	}
	able, err := separate.All(ctx, s, false)
	if err != nil {
		return err
	}
	var behind []string
	for _, m := range members {
		if able[m.ID] == 0 && !m.gone(now) {
			behind = append(behind, m.Name)
		}
	}
	if len(behind) == 0 {
		return nil
	}
	slices.Sort(behind)
	return fmt.Errorf("%w: upgrade and start clusterd on %s, or remove what is gone with clusterctl members rm", ErrBehind, strings.Join(behind, ", "))
}

// RetryWithNewKeys puts other successors into the place of those whose keys are lost. It returns
// ErrUnderWay if none is.
func RetryWithNewKeys(ctx context.Context, s join.Store, w Request, now time.Time) error {
	state, revision, err := get(ctx, s, false)
	if err != nil {
		return err
	}
	members, err := Members(ctx, s, false)
	if err != nil {
		return err
	}
	if !state.Lost(members) {
		return ErrUnderWay
	}
	return begin(ctx, s, state, revision, w, now)
}

func begin(ctx context.Context, s join.Store, state State, revision int64, w Request, now time.Time) error {
	next, err := state.begin(w, now)
	if err != nil {
		return err
	}
	done, err := put(ctx, s, revision, next)
	if err == nil && !done {
		err = ErrUnderWay
	}
	return err
}

// ErrOther is returned by Finish when another CA rotation is in progress.
var ErrOther = errors.New("another CA rotation is in progress")

// Finish asks that the rotation of these purposes end as soon as all members are
// ready; none: whatever is under way. It returns ErrNone if none is, and an error that is an
// ErrOther if it is of others.
func Finish(ctx context.Context, s join.Store, of []pki.Purpose) error {
	for {
		state, revision, err := get(ctx, s, false)
		if err != nil {
			return err
		}
		if state.Phase == Stable {
			return ErrNone
		}
		if len(of) > 0 && !state.Is(of) {
			return fmt.Errorf("%w, of %s: see clusterctl ca status", ErrOther, list(state.of()))
		}
		state.Finish = true
		if done, err := put(ctx, s, revision, state); err != nil || done {
			return err
		}
	}
}

// list names purposes.
func list(of []pki.Purpose) string {
	var names []string
	for _, p := range of {
		names = append(names, string(p))
	}
	return strings.Join(names, ", ")
}

// RecordSeparateSupport records that a member knows of separate authorities; may is as in RecordState.
func RecordSeparateSupport(ctx context.Context, s join.Store, id string, may func() bool) error {
	return separate.Note(ctx, s, id, 1, may)
}

// RecordState records that a member has a state. may is asked before something is written;
// nil: it always may.
func RecordState(ctx context.Context, s join.Store, id string, number uint64, may func() bool) error {
	return progress.Note(ctx, s, id, number, may)
}

// Members are the members of the records and what they have.
func Members(ctx context.Context, s join.Store, stale bool) ([]Member, error) {
	records, err := join.Records(ctx, s, stale)
	if err != nil {
		return nil, err
	}
	has, err := progress.All(ctx, s, stale)
	if err != nil {
		return nil, err
	}
	members := make([]Member, 0, len(records))
	for _, r := range records {
		members = append(members, Member{ID: r.ID, Name: r.Name, Server: r.IsServer(), Arrived: r.Confirmed, Joined: r.Joined, Has: has[r.ID]})
	}
	return members, nil
}

// restoreGap lies between the number of a copy's state and that of the cluster that
// begins from it: more than the cluster that was can have gone on since the copy.
const restoreGap = 1_000_000

// Restored is the state of a cluster that begins on new machines, from a copy: its
// authorities are not being rotated. The number lies beyond those of the
// cluster that was, since agents stay and follow higher numbers alone. The
// operations make the keyspace such a one.
func Restored(k *mvcc.Keyspace, trust *pki.Trust, now time.Time) (State, []mvcc.Op, error) {
	var was State
	kv, _, err := k.Get(stateKey, 0)
	if err == nil && kv != nil {
		err = json.Unmarshal(kv.Value, &was)
	}
	if err != nil {
		return was, nil, wrap("the state of the authority", err)
	}
	ops, err := progress.Forget(k)
	if err != nil {
		return was, nil, err
	}
	able, err := separate.Forget(k)
	if err != nil {
		return was, nil, err
	}
	ops = append(ops, able...)
	state := State{Number: was.Number + restoreGap, Phase: Stable, Since: now.UTC()}
	state.Authorities, state.Own = lists(trust)
	state.Tokens = state.Number
	b, err := json.Marshal(state)
	if err != nil {
		return was, nil, err
	}
	return state, append(ops, mvcc.Op{Type: mvcc.OpPut, Key: stateKey, Value: b}), nil
}
