package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
)

// hostFolders are directories outside of the data directory in which this node has worked,
// as the flags of `clusterd run` named them: a reset has other flags.
type hostFolders struct {
	KubeletRoots []string `json:"kubeletRoots,omitempty"`
	LogLinks     []string `json:"logLinks,omitempty"` // to containers' logs and to pods' log directories
}

const hostFoldersFile = "host-folders.json"

// readHostFolders returns none where nothing was recorded.
func (d dataDir) readHostFolders() (hostFolders, error) {
	var f hostFolders
	b, err := os.ReadFile(d.path(hostFoldersFile))
	if errors.Is(err, fs.ErrNotExist) {
		return f, nil
	}
	if err == nil {
		err = json.Unmarshal(b, &f)
	}
	if err != nil {
		return hostFolders{}, fmt.Errorf("%s: %w", d.path(hostFoldersFile), err)
	}
	return f, nil
}

// noteHostFolders records the directories of this configuration before anything is made
// in them. Those of earlier ones stay recorded.
func (d dataDir) noteHostFolders(cfg Config) error {
	had, err := d.readHostFolders()
	if err != nil {
		had = hostFolders{} // a reset cannot read it either
	}
	f := had.with(cfg)
	if err == nil && slices.Equal(f.KubeletRoots, had.KubeletRoots) && slices.Equal(f.LogLinks, had.LogLinks) {
		return nil
	}
	b, err := json.Marshal(f)
	if err != nil {
		return err
	}
	return writeFile(d.path(hostFoldersFile), append(b, '\n'), 0o600)
}

// with adds a configuration's directories.
func (f hostFolders) with(cfg Config) hostFolders {
	add := func(list []string, path string) []string {
		if path == "" || slices.Contains(list, path) {
			return list
		}
		return append(slices.Clone(list), path)
	}
	return hostFolders{add(f.KubeletRoots, cfg.KubeletRoot), add(add(f.LogLinks, cfg.LogLinks), cfg.PodLogLinks)}
}
