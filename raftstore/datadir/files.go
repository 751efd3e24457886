// Package datadir is what a member's data directory holds beside raft's log: term
// and vote, snapshots, the store's epoch, and what was found damaged. It knows
// no Store: it says what is on disk and whether that is intact, the store
// decides what is done about it.
package datadir

import (
	"errors"
	"hash/crc32"
	"os"
)

// WriteSynced writes a file and syncs it. A crash may leave a part of it.
func WriteSynced(path string, content []byte) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(content)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// Checksum is the CRC-32C of b.
func Checksum(b []byte) uint32 { return crc32.Checksum(b, crc32.MakeTable(crc32.Castagnoli)) }
