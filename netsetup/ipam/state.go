package ipam

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"time"

	"github.com/clusterd/clusterd/durable"
)

// stateVersion is the file format's number. A reader refuses newer ones: it
// would drop what it does not know when it writes.
const stateVersion = 1

// state is what lies on disk, as JSON.
type state struct {
	Version   int                      `json:"version"`
	Allocated map[string]netip.Addr    `json:"allocated"`
	Resting   map[netip.Addr]time.Time `json:"resting,omitempty"`
	Last      netip.Addr               `json:"last,omitzero"`
}

// readState reads the file; a missing one is an empty state.
func readState(path string) (state, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return state{}, nil
	}
	if err != nil {
		return state{}, err
	}
	return decodeState(b, path)
}

func decodeState(b []byte, path string) (state, error) {
	var st state
	if err := json.Unmarshal(b, &st); err != nil {
		return state{}, fmt.Errorf("read %s: %w", path, err)
	}
	if st.Version != stateVersion {
		return state{}, fmt.Errorf("read %s: format version %d, this program knows %d", path, st.Version, stateVersion)
	}
	return st, nil
}

// writeState replaces the file as a whole.
func writeState(path string, st state) error {
	st.Version = stateVersion
	b, err := json.Marshal(st)
	if err == nil {
		err = durable.ReplaceFile(path, b, 0o600)
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", path, err)
	}
	return nil
}
