package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/recovery"
	"github.com/clusterd/clusterd/raftstore"
	storerecovery "github.com/clusterd/clusterd/raftstore/recovery"
)

// reexecError ends a node that is to be started again at once, in the same
// process.
type reexecError struct{ why, data string }

func (e *reexecError) Error() string { return e.why }

// recoverStore carries out the recovery that was written down, if any. The
// store as it was is kept beside the new one. It can be repeated after a crash
// at any point: the new directory is made aside, and put into place last.
func (m *Main) recoverStore() error {
	r, err := m.dir.ReadRecovery()
	if err != nil || r == nil {
		return err
	}
	store, next := m.dir.Path("store"), m.dir.Path("store.next")
	now, err := m.dir.Epoch()
	if err != nil {
		return err
	}
	if now != r.Epoch {
		if _, err := os.Stat(store); err == nil {
			if err := m.makeNext(*r, store, next); err != nil {
				// The store is as it was: the next start opens it as such.
				return errors.Join(fmt.Errorf("begin epoch %s of the store: %w; it is given up, and nothing was changed", r.Epoch, err),
					os.Remove(m.dir.Path("recovery.json")))
			}
			aside := fmt.Sprintf("%s.epoch-%d", store, now.Number)
			if err := errors.Join(os.RemoveAll(aside), durable.Rename(store, aside)); err != nil {
				return err
			}
			m.log.Info("the store as it was is kept", "path", aside)
		}
		if err := durable.Rename(next, store); err != nil {
			return fmt.Errorf("begin epoch %s of the store: %w", r.Epoch, err)
		}
	}
	return errors.Join(os.Remove(m.dir.Path("recovery.json")), durable.SyncDir(string(m.dir.Dir)))
}

// makeNext makes the directory of the new epoch.
func (m *Main) makeNext(r recovery.Order, store, next string) error {
	if err := os.RemoveAll(next); err != nil {
		return err
	}
	if len(r.Keep) == 0 {
		m.log.Info("starting over with an empty store", "epoch", r.Epoch)
		return raftstore.SetEpoch(next, r.Epoch)
	}
	k, term, err := storerecovery.Replay(store, m.log)
	if err != nil {
		return err
	}
	k = k.Rebase(storerecovery.RevisionGap)
	t, err := join.RestorePlan{Epoch: r.Epoch.Number, Why: join.Recovered, Keep: r.Keep, Now: r.Asked}.Apply(k)
	if err != nil {
		return err
	}
	if err := storerecovery.Amend(k, t); err != nil {
		return err
	}
	m.log.Info("this node's state goes on", "epoch", r.Epoch, "index", k.Index(), "term", term, "revision", k.Revision())
	return storerecovery.Recover(next, m.id.NodeID(), r.Epoch, k, term)
}
