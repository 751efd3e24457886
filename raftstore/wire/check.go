package wire

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// A DamageError says where in a snapshot the first fault was found. It matches
// ErrCorrupt or ErrVersion.
type DamageError struct {
	Offset int64 // of the chunk with the fault
	Err    error
}

// Error names the offset.
func (e *DamageError) Error() string { return fmt.Sprintf("snapshot, offset %d: %v", e.Offset, e.Err) }

// Unwrap returns the fault itself.
func (e *DamageError) Unwrap() error { return e.Err }

// CheckSnapshot reads a snapshot and checks all that can be checked without
// building the keyspace: the version, every chunk's checksum, their order, and
// that the end is there. A fault comes as a *DamageError.
func CheckSnapshot(src io.Reader) error {
	s := snapshotReader{r: bufio.NewReaderSize(src, 256<<10)}
	if err := s.check(); err != nil {
		return &DamageError{s.off, err}
	}
	return nil
}

func (s *snapshotReader) check() error {
	if _, err := s.begin(); err != nil {
		return err
	}
	for last := byte(0); ; {
		s.off = s.pos
		kind, _, err := s.chunk()
		switch {
		case err != nil:
			return err
		case kind < last || (last == 0) != (kind == chunkHeader):
			return fmt.Errorf("%w: chunk of kind %d after %d", ErrCorrupt, kind, last)
		case kind == chunkEnd:
			return nil
		}
		last = kind
	}
}

// begin reads the magic and the version.
func (s *snapshotReader) begin() (version uint32, err error) {
	head, err := s.full(len(snapshotMagic) + 4)
	if err != nil {
		return 0, err
	}
	if string(head[:len(snapshotMagic)]) != snapshotMagic {
		return 0, fmt.Errorf("%w: not a snapshot", ErrCorrupt)
	}
	version = binary.LittleEndian.Uint32(head[len(snapshotMagic):])
	if version < 1 || version > snapshotVersion {
		return 0, fmt.Errorf("%w: snapshot %d", ErrVersion, version)
	}
	return version, nil
}

// DecodeCommand decodes one command. Nothing in the result aliases raw.
func DecodeCommand(raw []byte) (mvcc.Command, error) { return decodeCommand(raw) }
