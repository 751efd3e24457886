package raftstore

import (
	"context"

	"golang.org/x/sync/errgroup"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// deleteStep is how many keys one command of Delete names: some hundred are as
// cheap as thousands, and others' writes come in between.
const deleteStep = 512

// deleteWorkers is how many keys are deleted at a time where each takes a
// transaction of its own.
const deleteWorkers = 64

// Delete takes away those of the keys that have the revisions named, each for
// itself and under a revision of its own. The keys come in ascending order,
// none twice, and no revision is 0. It returns for each what it held; nil where
// it was not deleted, because it has changed or is gone. With an error (those of
// Txn) part of the keys may be gone, also some that the result does not show.
//
// Members that are older than the command it takes would stop at it. So it is
// used only when all members, voters or not, have said that they take it (see
// format.go); else each key takes a transaction of its own (and while one has
// never been heard since this member started, because it is away).
func (s *Store) Delete(ctx context.Context, keys []mvcc.Compare, origin string) ([]*mvcc.KeyValue, error) {
	deleted := make([]*mvcc.KeyValue, len(keys))
	if !s.allSpeak(ctx, uint64(mvcc.CmdDelete)) {
		return deleted, s.deleteSingly(ctx, keys, origin, deleted)
	}
	for at := 0; at < len(keys); {
		n := s.deletable(keys[at:])
		d := mvcc.Deletion{Keys: keys[at : at+n], Origin: origin}
		if err := s.admitDeletion(&d); err != nil {
			return deleted, err
		}
		res, err := s.decide(ctx, mvcc.Command{Type: mvcc.CmdDelete, Delete: d})
		if err != nil {
			return deleted, err
		}
		copy(deleted[at:], res.Previous)
		at += n
	}
	return deleted, nil
}

// deletable is how many of the keys one command takes.
func (s *Store) deletable(keys []mvcc.Compare) int {
	n, size := 0, 0
	for n < len(keys) && n < deleteStep {
		if size += len(keys[n].Key); n > 0 && size > s.cfg.MaxTxnBytes/2 {
			break
		}
		n++
	}
	return n
}

func (s *Store) admitDeletion(d *mvcc.Deletion) error {
	if s.ctx.Err() != nil {
		return ErrClosed
	}
	if n := len(d.Origin); n > maxOrigin {
		return tooLarge("origin", n, maxOrigin)
	}
	for i := range d.Keys {
		if n := len(d.Keys[i].Key); n > s.cfg.MaxKeyBytes {
			return tooLarge("key", n, s.cfg.MaxKeyBytes)
		}
	}
	return d.Validate()
}

func (s *Store) deleteSingly(ctx context.Context, keys []mvcc.Compare, origin string, deleted []*mvcc.KeyValue) error {
	for at := 0; at < len(keys); at += mvcc.MaxDeletes { // the same rules
		d := mvcc.Deletion{Keys: keys[at:min(at+mvcc.MaxDeletes, len(keys))], Origin: origin}
		if err := s.admitDeletion(&d); err != nil {
			return err
		}
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(deleteWorkers)
	for i := range keys {
		group.Go(func() error {
			res, err := s.Txn(ctx, mvcc.Txn{
				Compares: keys[i : i+1], Origin: origin,
				Ops: []mvcc.Op{{Type: mvcc.OpDelete, Key: keys[i].Key}},
			})
			if err == nil && res.Succeeded {
				deleted[i] = res.Previous[0]
			}
			return err
		})
	}
	return group.Wait()
}

// allSpeak reports whether every member of the configuration is known to take
// commands up to a number. One that joins later and does not will stop, and
// say so.
func (s *Store) allSpeak(ctx context.Context, command uint64) bool {
	if s.speaks() < command {
		return false
	}
	ms, err := s.Members()
	if err != nil {
		return false
	}
	var others []string
	for _, m := range ms {
		if m.ID != s.cfg.ID {
			others = append(others, m.ID)
		}
	}
	return s.capabilities.All(ctx, others, command)
}
