package podnetwork

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"

	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/netsetup/pathprobe"
)

// lengthsFile is below Config.Dir: what ways to other nodes were found to carry where
// that is less than the interface takes. Measuring takes a minute and more, in which
// the next process would let packets be lost that it sends again.
const lengthsFile = "lengths.json"

type lengthFile struct {
	Version int      `json:"version"`
	Lengths []length `json:"lengths"`
}

// length is one of them. It is of use for the same way alone.
type length struct {
	Node    string     `json:"node"`
	Addr    netip.Addr `json:"addr"` // of its first pod address
	Way     string     `json:"way"`
	Carries int        `json:"carries"`
}

// recallLengths reads the file. One that cannot be read is as none: all is measured
// again.
func (n *Network) recallLengths() (out []pathprobe.Found) {
	var f lengthFile
	b, err := os.ReadFile(filepath.Join(n.cfg.Dir, lengthsFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = json.Unmarshal(b, &f)
	}
	if err == nil && f.Version != 1 {
		err = fmt.Errorf("version %d: want 1", f.Version)
	}
	if err != nil {
		n.cfg.Logger.Warn("what the ways to other nodes carry is not known, and measured again", "file", lengthsFile, "err", err)
		return nil
	}
	n.lengths = f.Lengths
	for _, l := range f.Lengths {
		out = append(out, pathprobe.Found{Peer: pathprobe.Peer{Name: l.Node, Addr: l.Addr, Way: l.Way}, Carries: l.Carries})
	}
	return out
}

// keepLengths replaces the file if what was measured is other than what it has.
func (n *Network) keepLengths(measured []pathprobe.Result) {
	f := lengthFile{Version: 1, Lengths: []length{}}
	for _, r := range measured {
		if r.Carries > 0 {
			f.Lengths = append(f.Lengths, length{r.Name, r.Addr, r.Way, r.Carries})
		}
	}
	if slices.Equal(n.lengths, f.Lengths) {
		return
	}
	b, err := json.Marshal(f)
	if err == nil {
		err = durable.ReplaceFile(filepath.Join(n.cfg.Dir, lengthsFile), b, 0o600)
	}
	if err != nil {
		n.cfg.Logger.Warn("what the ways to other nodes carry is not kept for the next start", "err", err)
		return
	}
	n.lengths = f.Lengths
}
