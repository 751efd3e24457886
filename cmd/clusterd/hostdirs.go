package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"

	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
)

// hostDirs are directories outside of the data directory in which this node has worked,
// as the flags of `clusterd run` named them: a reset has other flags.
type hostDirs struct {
	KubeletRoots []string `json:"kubeletRoots,omitempty"`
	LogLinks     []string `json:"logLinks,omitempty"` // to containers' logs and to pods' log directories
}

const hostDirsFile = "host-folders.json"

// readHostDirs returns none where nothing was recorded.
func readHostDirs(d nodedir.Dir) (hostDirs, error) {
	var f hostDirs
	b, err := os.ReadFile(d.Path(hostDirsFile))
	if errors.Is(err, fs.ErrNotExist) {
		return f, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &f)
	}
	if err != nil {
		return hostDirs{}, fmt.Errorf("%s: %w", d.Path(hostDirsFile), err)
	}
	return f, nil
}

// noteHostDirs records the directories of this configuration before anything is made
// in them. Those of earlier ones stay recorded.
func noteHostDirs(d nodedir.Dir, cfg Config) error {
	had, err := readHostDirs(d)
	if err != nil {
		had = hostDirs{} // a reset cannot read it either
	}
	f := had.with(cfg)
	if err == nil && slices.Equal(f.KubeletRoots, had.KubeletRoots) && slices.Equal(f.LogLinks, had.LogLinks) {
		return nil
	}
	b, err := json.Marshal(f)
	if err != nil {
		return err
	}
	return nodedir.WriteFile(d.Path(hostDirsFile), append(b, '\n'), 0o600)
}

// with adds a configuration's directories.
func (f hostDirs) with(cfg Config) hostDirs {
	add := func(list []string, path string) []string {
		if path == "" || slices.Contains(list, path) {
			return list
		}
		return append(slices.Clone(list), path)
	}
	return hostDirs{add(f.KubeletRoots, cfg.KubeletRoot), add(add(f.LogLinks, cfg.LogLinks), cfg.PodLogLinks)}
}
