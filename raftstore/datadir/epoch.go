package datadir

import (
	crand "crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/clusterd/clusterd/durable"
)

// Epoch names one life of a store. A store that was recovered without its
// quorum, or restored from a copy, begins another one; members of different
// epochs do not speak to each other, since both may have gone on from the same
// state. The zero Epoch is one like any other.
type Epoch struct {
	// Number counts the lives, from 1.
	Number uint64 `json:"number"`
	// ID is random: two recoveries of the same store are different lives.
	ID uint64 `json:"id,string"`
}

// NewEpoch is the epoch after that of the given number.
func NewEpoch(after uint64) Epoch {
	var b [8]byte
	if _, err := crand.Read(b[:]); err != nil { // it does not fail on Linux
		panic(err)
	}
	return Epoch{Number: after + 1, ID: binary.LittleEndian.Uint64(b[:])}
}

func (e Epoch) String() string { return fmt.Sprintf("%d (%016x)", e.Number, e.ID) }

const (
	epochFile    = "epoch.json"
	epochVersion = 1
)

type epochOnDisk struct {
	Version int   `json:"version"`
	Epoch   Epoch `json:"epoch"`
}

// SetEpoch makes the data folder of a store that is not open, and notes its
// epoch. It is for a directory without state: that of a first member before it
// bootstraps, or of one that is to be added by another.
func SetEpoch(dir string, e Epoch) error {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	b, err := json.Marshal(epochOnDisk{epochVersion, e})
	if err != nil {
		return err
	}
	path := filepath.Join(dir, epochFile)
	return durable.ReplaceFile(path, append(b, '\n'), 0o600)
}

// ReadEpoch is the epoch of a data directory; the zero Epoch if none was set.
func ReadEpoch(dir string) (Epoch, error) {
	path := filepath.Join(dir, epochFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return Epoch{}, nil
	}
	if err != nil {
		return Epoch{}, err
	}
	var e epochOnDisk
	if err := json.Unmarshal(b, &e); err != nil {
		return Epoch{}, fmt.Errorf("%s: %w", path, err)
	}
	if e.Version != epochVersion {
		return Epoch{}, fmt.Errorf("%s: version %d is not known here", path, e.Version)
	}
	return e.Epoch, nil
}
