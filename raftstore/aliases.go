package raftstore

import (
	"github.com/clusterd/clusterd/raftstore/datadir"
	"github.com/clusterd/clusterd/raftstore/quota"
	"github.com/clusterd/clusterd/raftstore/raftlog"
	"github.com/clusterd/clusterd/raftstore/state"
)

// What the data directory holds is described in packages datadir and state. Those who
// open a store need these, and no other package.
type (
	// Member is one member of the store's raft configuration.
	Member = state.Member
	// Epoch names one life of a store, see datadir.Epoch.
	Epoch = datadir.Epoch
	// DamageError names a file of the data directory that does not hold what was
	// written to it.
	DamageError = datadir.DamageError
)

// NewEpoch is the epoch after that of the given number.
func NewEpoch(after uint64) Epoch { return datadir.NewEpoch(after) }

// SetEpoch makes the data directory of a store that is not open, and notes its
// epoch, see datadir.SetEpoch.
func SetEpoch(dir string, e Epoch) error { return datadir.SetEpoch(dir, e) }

// ReadEpoch is the epoch of a data directory; the zero Epoch if none was set.
func ReadEpoch(dir string) (Epoch, error) { return datadir.ReadEpoch(dir) }

// How much room there is, and who takes it, is package quota's.
type (
	// QuotaError is returned for a write that would take more room than there
	// is. It matches ErrNoSpace. Nothing was written.
	QuotaError = quota.Error
	// Top tells who writes most, and where most is.
	Top = quota.Top
	// WriterUse is one writer's part of Top.
	WriterUse = quota.WriterUse
	// FolderUse is one folder's part of Top.
	FolderUse = quota.FolderUse
)

// LogEngine names what keeps raft's log on disk, see package raftlog.
type LogEngine = raftlog.Engine

// LogEngines are all engines, the default one first.
var LogEngines = raftlog.Engines
