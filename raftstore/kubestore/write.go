package kubestore

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"reflect"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/conversion"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// Create implements storage.Interface.
func (s *Storage) Create(ctx context.Context, key string, obj, out runtime.Object, ttl uint64) error {
	key, err := s.key(key, false)
	if err != nil {
		return err
	}
	if rev, err := s.versioner.ObjectResourceVersion(obj); err == nil && rev != 0 {
		return storage.ErrResourceVersionSetOnCreate
	}
	data, err := s.values.encode(obj)
	if err != nil {
		return err
	}
	sealed, err := s.values.seal(ctx, key, data)
	if err != nil {
		return err
	}
	res, err := s.txn(ctx, mvcc.Txn{
		Compares: []mvcc.Compare{{Key: key}},
		Ops:      []mvcc.Op{{Type: mvcc.OpPut, Key: key, Value: sealed, TTL: int64(ttl)}},
	})
	switch {
	case err != nil:
		return err
	case !res.Succeeded:
		return storage.NewKeyExistsError(key, 0)
	case out == nil:
		return nil
	}
	return s.values.decode(data, out, res.Revision)
}

// Delete implements storage.Interface.
func (s *Storage) Delete(ctx context.Context, key string, out runtime.Object, preconditions *storage.Preconditions,
	validate storage.ValidateObjectFunc, _ runtime.Object, opts storage.DeleteOptions) error {
	key, err := s.key(key, false)
	if err != nil {
		return err
	}
	c, err := s.candidate(key, out)
	if err != nil {
		return err
	}
	if s.values.markCorrupt && opts.ExpectTransformOrDecodeError {
		c.wantCorrupt = true
	}
	if err := c.begin(ctx); err != nil {
		return err
	}
	for {
		if err := c.permits(ctx, preconditions, validate); err != nil {
			if err := c.blame(ctx, err); err != nil {
				return err
			}
			continue
		}
		res, err := s.txn(ctx, mvcc.Txn{
			Compares: []mvcc.Compare{{Key: key, ModRevision: c.rev}},
			Ops:      []mvcc.Op{{Type: mvcc.OpDelete, Key: key}},
		})
		if err != nil {
			return err
		}
		if !res.Succeeded {
			if err := c.lost(ctx, res); err != nil {
				return err
			}
			continue
		}
		if c.wantCorrupt {
			return nil // there is no object to return
		}
		return s.values.decode(c.data, out, res.Revision)
	}
}

// GuaranteedUpdate implements storage.Interface. When update returns no TTL,
// the key keeps what is left of its own.
func (s *Storage) GuaranteedUpdate(ctx context.Context, key string, out runtime.Object, ignoreNotFound bool,
	preconditions *storage.Preconditions, update storage.UpdateFunc, cached runtime.Object) error {
	key, err := s.key(key, false)
	if err != nil {
		return err
	}
	c, err := s.candidate(key, out)
	if err != nil {
		return err
	}
	c.absentOK = ignoreNotFound
	if err := c.begin(ctx); err != nil {
		return err
	}
	for {
		data, ttl, err := c.updated(preconditions, update)
		if err != nil {
			if err := c.blame(ctx, err); err != nil {
				return err
			}
			continue
		}
		if !c.stale && bytes.Equal(data, c.data) {
			same, err := c.confirm(ctx, data)
			if err != nil {
				return err
			}
			if same {
				return s.values.decode(c.data, out, c.rev)
			}
			continue
		}
		sealed, err := s.values.seal(ctx, key, data)
		if err != nil {
			return err
		}
		res, err := s.txn(ctx, mvcc.Txn{
			Compares: []mvcc.Compare{{Key: key, ModRevision: c.rev}},
			Ops:      []mvcc.Op{{Type: mvcc.OpPut, Key: key, Value: sealed, TTL: ttl}},
		})
		if err != nil {
			return err
		}
		if !res.Succeeded {
			if err := c.lost(ctx, res); err != nil {
				return err
			}
			continue
		}
		return s.values.decode(data, out, res.Revision)
	}
}

// txn hands a change to the store, once it may begin. Errors are explained.
func (s *Storage) txn(ctx context.Context, t mvcc.Txn) (mvcc.TxnResult, error) {
	t.Origin = s.originOf(ctx)
	done, err := s.reserve(ctx, t.Origin, t.HistoryBytes())
	if err != nil {
		return mvcc.TxnResult{}, err
	}
	defer done()
	res, err := s.store.Txn(ctx, t)
	if err != nil {
		return res, explain(err)
	}
	return res, nil
}

// candidate is what a write takes for the present state of its key. It
// starts as a guess, this node's own copy, which costs no round trip to the
// leader. (The object that a caller has cached is never newer, lacks the expiry
// and would have to be encoded to be compared.) The comparison in
// the transaction proves a right guess; a refusal that rests on a guess is
// never returned to the caller before the leader has confirmed it.
type candidate struct {
	s           *Storage
	key         string
	newObject   func() runtime.Object
	absentOK    bool // a missing key reads as an empty object
	wantCorrupt bool // only a value that cannot be read is wanted

	fresh bool // confirmed by the leader
	rev   int64
	obj   runtime.Object // nil when wantCorrupt
	data  []byte         // obj encoded, as stored
	stale bool           // stored in a form that should be written again
	meta  storage.ResponseMeta
}

// candidate prepares for the state of key, in objects of the type of out.
func (s *Storage) candidate(key string, out runtime.Object) (*candidate, error) {
	v, err := conversion.EnforcePtr(out)
	if err != nil {
		return nil, fmt.Errorf("kubestore: output object %T: %w", out, err)
	}
	newObject := func() runtime.Object { return reflect.New(v.Type()).Interface().(runtime.Object) }
	if u, ok := out.(runtime.Unstructured); ok {
		newObject = func() runtime.Object { return u.NewEmptyInstance() }
	}
	return &candidate{s: s, key: key, newObject: newObject}, nil
}

// begin makes the first guess. Where it shows nothing usable, the leader is
// asked at once.
func (c *candidate) begin(ctx context.Context) error {
	if c.wantCorrupt {
		return c.refresh(ctx)
	}
	kv, _, err := c.s.get(ctx, c.key, raftstore.ReadOptions{Stale: true})
	if err != nil || kv == nil || c.set(ctx, kv) != nil {
		return c.refresh(ctx)
	}
	return nil
}

// refresh reads the key's state through the leader.
func (c *candidate) refresh(ctx context.Context) error {
	kv, _, err := c.s.get(ctx, c.key, raftstore.ReadOptions{})
	if err != nil {
		return explain(err)
	}
	c.fresh = true
	return c.set(ctx, kv)
}

// lost takes over the state that made a transaction fail.
func (c *candidate) lost(ctx context.Context, res mvcc.TxnResult) error {
	if len(res.Current) != 1 {
		return storage.NewInternalError(fmt.Errorf("store refused a write of %q without telling the present state", c.key))
	}
	c.fresh = true
	return c.set(ctx, res.Current[0])
}

// blame is called with an error that the present state has caused. It returns
// the error if that state is certain, and nil if there is a newer one to try.
func (c *candidate) blame(ctx context.Context, cause error) error {
	if c.fresh {
		return cause
	}
	guessed := c.rev
	if err := c.refresh(ctx); err != nil {
		return err
	}
	if c.rev == guessed {
		return cause
	}
	return nil
}

// confirm reports whether data is certainly what is stored, in its newest form.
func (c *candidate) confirm(ctx context.Context, data []byte) (bool, error) {
	if !c.fresh {
		if err := c.refresh(ctx); err != nil {
			return false, err
		}
	}
	return !c.stale && bytes.Equal(data, c.data), nil
}

// permits reports why the object may not be deleted; nil when it may.
func (c *candidate) permits(ctx context.Context, preconditions *storage.Preconditions, validate storage.ValidateObjectFunc) error {
	if preconditions != nil {
		if err := preconditions.Check(c.key, c.obj); err != nil {
			return err
		}
	}
	return validate(ctx, c.obj)
}

// updated lets the caller change the object and returns its encoded form and
// the seconds it has to live.
func (c *candidate) updated(preconditions *storage.Preconditions, update storage.UpdateFunc) (data []byte, ttl int64, err error) {
	if err := preconditions.Check(c.key, c.obj); err != nil {
		return nil, 0, err
	}
	obj, newTTL, err := update(c.obj, c.meta)
	if err != nil {
		return nil, 0, err
	}
	ttl = c.meta.TTL
	if newTTL != nil {
		ttl = int64(*newTTL)
	}
	data, err = c.s.values.encode(obj)
	return data, ttl, err
}

// set takes over a stored state; nil is a missing key.
func (c *candidate) set(ctx context.Context, kv *mvcc.KeyValue) error {
	c.rev, c.data, c.stale, c.meta = 0, nil, false, storage.ResponseMeta{}
	if kv == nil {
		if !c.absentOK {
			return storage.NewKeyNotFoundError(c.key, 0)
		}
		c.obj = c.newObject()
		return runtime.SetZeroValue(c.obj)
	}
	c.rev = kv.ModRevision
	c.meta = storage.ResponseMeta{ResourceVersion: uint64(kv.ModRevision), TTL: secondsLeft(kv.ExpiresAt, c.s.store.Time())}
	err := c.read(ctx, kv)
	if !c.wantCorrupt {
		return err
	}
	if err == nil {
		return storage.NewInvalidObjError(c.key, "unsafe deletion is not allowed because the object is decodable from storage")
	}
	c.obj, c.data = nil, nil
	return nil
}

func (c *candidate) read(ctx context.Context, kv *mvcc.KeyValue) error {
	data, stale, err := c.s.values.open(ctx, kv)
	if err != nil {
		return storage.NewInternalError(err)
	}
	c.data, c.stale, c.obj = data, stale, c.newObject()
	return c.s.values.decode(data, c.obj, kv.ModRevision)
}

// secondsLeft is how long a key with this expiry still lives at now, at least
// 1; 0 is without a limit.
func secondsLeft(expiresAt int64, now time.Time) int64 {
	if expiresAt == 0 {
		return 0
	}
	left := time.UnixMilli(expiresAt).Sub(now)
	return max(1, int64((left+time.Second-1)/time.Second))
}

// maxOrigin keeps names of any length from filling the history.
const maxOrigin = 128

// originOf is who makes the request that ctx belongs to. Of what is too long the
// end is a fingerprint: two that begin alike stay two.
func (s *Storage) originOf(ctx context.Context) string {
	who := strings.ToValidUTF8(s.origin(ctx), "\uFFFD")
	if len(who) > maxOrigin {
		sum := sha256.Sum256([]byte(who))
		mark := "…" + hex.EncodeToString(sum[:8])
		who = strings.ToValidUTF8(who[:maxOrigin-len(mark)], "") + mark
	}
	return mvcc.PlainOrigin(who) // as the budget and the history are to know it
}
