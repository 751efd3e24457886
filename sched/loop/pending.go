package loop

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/clock"
)

// verifyAfter is how long a write may stay invisible in the cache before it is
// looked up at the server.
const verifyAfter = 5 * time.Second

// Pending remembers the creates and deletes of dependents that this process
// has sent and its cache has not shown yet. While a key has any, its controller
// counts too few or too many dependents and must not create or delete: this is
// what keeps a stale cache from making duplicates.
//
// A create is registered under a name chosen here, before it is sent, so its
// watch event cannot be missed and an answer that got lost (timeout, broken
// connection) is no special case: the entry stays until the cache shows the
// object or the server says that it does not exist.
//
//	begin create ──► unseen ──► cache shows it ──► gone
//	                   │  └──── definite refusal ─► gone
//	                   └─ 5 s ─ live GET: absent ─► gone   (present: keep waiting)
//	begin delete ──► unseen ──► cache shows it deleting or gone ──► gone  (as above)
//
// It is memory only. A new leader starts with none, and needs none: its
// informers list at the newest revision after leadership began.
type Pending struct {
	clock clock.PassiveClock
	// get reads one dependent from the server, not from a cache.
	get func(ctx context.Context, key Key) (metav1.Object, error)

	mu     sync.Mutex // guards below
	writes map[Key]map[Key]write
}

type write struct {
	since time.Time
	// uid of the object being deleted; empty for a create.
	uid types.UID
}

// NewPending returns an empty guard. get reads a dependent from the server.
func NewPending(clock clock.PassiveClock, get func(ctx context.Context, key Key) (metav1.Object, error)) *Pending {
	return &Pending{clock: clock, get: get, writes: map[Key]map[Key]write{}}
}

// Creating registers that owner is about to create the object.
func (p *Pending) Creating(owner, object Key) { p.put(owner, object, write{since: p.clock.Now()}) }

// Deleting registers that owner is about to delete the object.
func (p *Pending) Deleting(owner, object Key, uid types.UID) {
	p.put(owner, object, write{since: p.clock.Now(), uid: uid})
}

func (p *Pending) put(owner, object Key, w write) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.writes[owner] == nil {
		p.writes[owner] = map[Key]write{}
	}
	p.writes[owner][object] = w
}

// Answered takes back the write unless its outcome is unknown or it succeeded.
func (p *Pending) Answered(owner, object Key, err error) {
	if err == nil || Ambiguous(err) {
		return
	}
	p.drop(owner, object)
}

// SawPresent tells that the cache shows the object, alive.
func (p *Pending) SawPresent(owner, object Key) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if w, ok := p.writes[owner][object]; ok && w.uid == "" {
		p.dropLocked(owner, object)
	}
}

// SawGone tells that the cache shows the object deleted or being deleted.
// For a create it means that the object came and went.
func (p *Pending) SawGone(owner, object Key) { p.drop(owner, object) }

// Forget drops all that is known of an owner that no longer exists.
func (p *Pending) Forget(owner Key) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.writes, owner)
}

func (p *Pending) drop(owner, object Key) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dropLocked(owner, object)
}

func (p *Pending) dropLocked(owner, object Key) {
	delete(p.writes[owner], object)
	if len(p.writes[owner]) == 0 {
		delete(p.writes, owner)
	}
}

// Settled reports whether the cache shows all of owner's writes. It says so of
// what is read from the cache afterwards only: ask first, then read. If not,
// wait is the time after which to ask again. Writes that stayed unseen for long are
// looked up at the server first.
func (p *Pending) Settled(ctx context.Context, owner Key) (settled bool, wait time.Duration, err error) {
	now := p.clock.Now()
	p.mu.Lock()
	var old []Key
	uids := map[Key]types.UID{}
	for object, w := range p.writes[owner] {
		if now.Sub(w.since) >= verifyAfter {
			old = append(old, object)
			uids[object] = w.uid
		}
	}
	p.mu.Unlock()

	for _, object := range old {
		live, err := p.get(ctx, object)
		switch {
		case apierrors.IsNotFound(err):
			lostWrites.WithLabelValues("absent").Inc()
			p.drop(owner, object)
		case err != nil:
			return false, 0, fmt.Errorf("look up unseen write of %v: %w", object, err)
		case uids[object] != "" && live.GetUID() != uids[object]:
			lostWrites.WithLabelValues("replaced").Inc()
			p.drop(owner, object)
		case uids[object] != "" && live.GetDeletionTimestamp() == nil:
			lostWrites.WithLabelValues("not_deleted").Inc() // the delete never arrived
			p.drop(owner, object)
		default:
			lostWrites.WithLabelValues("cache_behind").Inc()
		}
	}

	p.mu.Lock()
	defer p.mu.Unlock()
	return len(p.writes[owner]) == 0, verifyAfter, nil
}

// Ambiguous reports whether a failed write may nevertheless have happened.
func Ambiguous(err error) bool {
	var status apierrors.APIStatus
	if !errors.As(err, &status) {
		return true // transport: the answer was lost
	}
	return apierrors.IsTimeout(err) || apierrors.IsServerTimeout(err) || apierrors.IsInternalError(err) ||
		apierrors.IsServiceUnavailable(err) || apierrors.IsUnexpectedServerError(err)
}
