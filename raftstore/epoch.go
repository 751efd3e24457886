package raftstore

import "github.com/clusterd/clusterd/raftstore/datadir"

// What the data folder holds is described in package datadir. Those who open a
// store need these, and no other package.
type (
	// Epoch names one life of a store, see datadir.Epoch.
	Epoch = datadir.Epoch
	// DamageError names a file of the data folder that does not hold what was
	// written to it.
	DamageError = datadir.DamageError
)

// NewEpoch is the epoch after that of the given number.
func NewEpoch(after uint64) Epoch { return datadir.NewEpoch(after) }

// SetEpoch makes the data folder of a store that is not open, and notes its
// epoch, see datadir.SetEpoch.
func SetEpoch(dir string, e Epoch) error { return datadir.SetEpoch(dir, e) }

// ReadEpoch is the epoch of a data folder; the zero Epoch if none was set.
func ReadEpoch(dir string) (Epoch, error) { return datadir.ReadEpoch(dir) }
