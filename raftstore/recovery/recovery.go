// Package recovery reads and writes the data folder of a store that does not run:
// what a member's directory holds, to the end of its log (Replay), and the directory of
// a store that goes on from that in a new epoch (Recover).
package recovery

import (
	crand "crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/raftstore/datadir"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftlog"
	"github.com/clusterd/clusterd/raftstore/wire"
)

// RevisionGap is by how much the revision is raised (mvcc.Keyspace.Rebase)
// where a store goes on from a copy of its state: more than clients can have
// seen since the copy was made, at 1 500 writes a second for a week.
const RevisionGap = 1_000_000_000

// Recover writes the data folder of a store that goes on from the given
// keyspace, with id as its only member, in a new epoch. The directory must not
// exist. term is the raft term that the keyspace was reached in, at least 1.
// A directory that is not whole, because Recover failed or was interrupted, opens
// as one without state or not at all: it is to be removed.
func Recover(dir, id string, e datadir.Epoch, k *mvcc.Keyspace, term uint64) error {
	if id == "" || term == 0 || k.Index() == 0 {
		return fmt.Errorf("%w: a store is founded by a member, in a term, with a keyspace that was applied to", mvcc.ErrInvalid)
	}
	if err := os.MkdirAll(filepath.Dir(dir), 0o700); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	if err := datadir.SetEpoch(dir, e); err != nil {
		return err
	}
	stable, _, err := datadir.OpenStable(dir)
	if err != nil {
		return err
	}
	err = stable.SetUint64([]byte(datadir.KeyTerm), term) // terms go on from the snapshot's
	if err := errors.Join(err, stable.Close()); err != nil {
		return fmt.Errorf("term and vote: %w", err)
	}
	snapshots, err := datadir.OpenSnapshots(dir, hclog.NewNullLogger())
	if err != nil {
		return err
	}
	_, trans := raft.NewInmemTransport(raft.ServerAddress(id)) // encodes addresses
	sink, err := snapshots.Create(raft.SnapshotVersionMax, k.Index(), term, OnlyVoter(id), k.Index(), trans)
	if err != nil {
		return fmt.Errorf("write snapshot: %w", err)
	}
	if err := wire.WriteSnapshot(sink, k.Snapshot()); err != nil {
		return errors.Join(fmt.Errorf("write snapshot: %w", err), sink.Cancel())
	}
	if err := sink.Close(); err != nil {
		return fmt.Errorf("finish snapshot: %w", err)
	}
	return durable.SyncDir(filepath.Dir(dir))
}

// Amend applies a transaction to a keyspace that no store has, as the next
// entry of its log.
func Amend(k *mvcc.Keyspace, t mvcc.Txn) error {
	var session [8]byte
	if _, err := crand.Read(session[:]); err != nil {
		return err
	}
	out := k.Apply(k.Index()+1, mvcc.Batch{Time: k.Time(), Commands: []mvcc.Command{{
		Type: mvcc.CmdTxn, Basis: k.Index(), Txn: t,
		ID: mvcc.CommandID{Session: binary.LittleEndian.Uint64(session[:]), Seq: 1},
	}}})
	switch {
	case out[0].Err != nil:
		return out[0].Err
	case !out[0].Result.Succeeded:
		return fmt.Errorf("%w: a comparison does not hold", mvcc.ErrInvalid)
	}
	return nil
}

// OnlyVoter is the configuration of a store with one member.
func OnlyVoter(id string) raft.Configuration {
	return raft.Configuration{Servers: []raft.Server{{
		Suffrage: raft.Voter, ID: raft.ServerID(id), Address: raft.ServerAddress(id),
	}}}
}

// Replay reads the data directory of a member that does not run: its newest
// snapshot and its whole log, to the end. Entries that this member did not
// know to be committed are applied too: they may have been, and a client may
// have been acknowledged. It returns the keyspace and the term of the last entry. It
// changes nothing but what opening the log does: an append that a crash left
// unfinished is cut off.
func Replay(dir string, logger *slog.Logger) (*mvcc.Keyspace, uint64, error) {
	k, term, err := replay(dir, logger)
	if err != nil {
		return nil, 0, fmt.Errorf("read the store in %s: %w", dir, err)
	}
	return k, term, nil
}

func replay(dir string, logger *slog.Logger) (*mvcc.Keyspace, uint64, error) {
	record, _, err := raftlog.ReadRecord(dir)
	if err != nil {
		return nil, 0, err
	}
	if _, err := os.Stat(filepath.Join(dir, record.Folder)); err != nil {
		return nil, 0, err
	}
	snapshots, err := datadir.OpenSnapshots(dir, hclog.NewNullLogger())
	if err != nil {
		return nil, 0, err
	}
	list, err := snapshots.List() // the newest first
	if err != nil {
		return nil, 0, err
	}
	k, term, from := mvcc.New(), uint64(0), uint64(0)
	var damaged error
	for _, meta := range list {
		_, r, err := snapshots.Open(meta.ID)
		if err == nil {
			var whole *mvcc.Keyspace
			if whole, err = wire.ReadSnapshot(r); err == nil {
				k, term, from, damaged = whole, meta.Term, meta.Index, nil
			}
			_ = r.Close()
		}
		if err == nil {
			break
		}
		damaged = errors.Join(damaged, fmt.Errorf("snapshot %s: %w", meta.ID, err))
	}
	if damaged != nil {
		return nil, 0, damaged
	}
	log, err := record.Open(dir, 0, logger)
	if err != nil {
		return nil, 0, err
	}
	term, err = applyLog(k, term, log)
	if err = errors.Join(err, log.Close()); err != nil {
		return nil, 0, err
	}
	// What is newer than the snapshot that was read has to be in the log: to go on
	// from less would lose what clients were acknowledged.
	newest, err := snapshots.Newest()
	if err != nil {
		return nil, 0, err
	}
	if newest.Index > from && newest.Index > k.Index() {
		return nil, 0, fmt.Errorf("snapshot %s, of log entry %d, is damaged, and without it the state ends with entry %d: go on from another member; if there is none, and the loss is accepted, move the folder %s away",
			newest.ID, newest.Index, k.Index(), filepath.Join(dir, datadir.SnapshotsDir, newest.ID))
	}
	return k, term, nil
}

// applyLog applies the entries after the keyspace's and returns the last one's
// term.
func applyLog(k *mvcc.Keyspace, term uint64, log raftlog.Log) (uint64, error) {
	first, err := log.FirstIndex()
	if err != nil {
		return 0, err
	}
	last, err := log.LastIndex()
	if err != nil {
		return 0, err
	}
	if last != 0 && first > k.Index()+1 {
		return 0, fmt.Errorf("the log begins with entry %d, and entry %d is missing", first, k.Index()+1)
	}
	for i := k.Index() + 1; i <= last; i++ {
		var entry raft.Log
		if err := log.GetLog(i, &entry); err != nil {
			return 0, fmt.Errorf("log entry %d: %w", i, err)
		}
		term = entry.Term
		if entry.Type != raft.LogCommand {
			k.Advance(i)
			continue
		}
		batch, err := wire.DecodeBatch(entry.Data)
		if err != nil {
			return 0, fmt.Errorf("log entry %d: %w", i, err)
		}
		k.Apply(i, batch)
	}
	return term, nil
}
