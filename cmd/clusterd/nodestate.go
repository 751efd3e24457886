package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/member/recovery"
	"github.com/clusterd/clusterd/raftstore"
)

// writeBootstrap notes that the next start of this node begins the cluster.
func (d dataDir) writeBootstrap(c join.Cluster) error {
	b, err := json.Marshal(c)
	if err != nil {
		return err
	}
	return writeFile(d.path("bootstrap.json"), b, 0o600)
}

// readBootstrap returns nil when there is nothing to begin.
func (d dataDir) readBootstrap() (*join.Cluster, error) {
	b, err := os.ReadFile(d.path("bootstrap.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var c join.Cluster
	if err := json.Unmarshal(b, &c); err != nil {
		return nil, fmt.Errorf("%s: %w", d.path("bootstrap.json"), err)
	}
	return &c, nil
}

func (d dataDir) removeBootstrap() error {
	if err := os.Remove(d.path("bootstrap.json")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return durable.SyncDir(string(d))
}

func (d dataDir) epoch() (raftstore.Epoch, error) { return raftstore.ReadEpoch(d.path("store")) }

func (d dataDir) writeRecovery(r recovery.Order) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return writeFile(d.path("recovery.json"), b, 0o600)
}

// readRecovery returns nil when there is nothing to do.
func (d dataDir) readRecovery() (*recovery.Order, error) {
	b, err := os.ReadFile(d.path("recovery.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var r recovery.Order
	if err := json.Unmarshal(b, &r); err != nil {
		return nil, fmt.Errorf("%s: %w", d.path("recovery.json"), err)
	}
	return &r, nil
}

// dropServerState removes what only servers have beside their identity. The store
// is set aside: should the word that this node was demoted be untrue, it can be put
// back. The keys for secrets at rest go with it, and before it; where there is no store
// they are an administrator's, who has put them there for the node to become a server.
func (d keyDir) dropServerState() error {
	if _, err := os.Lstat(d.path("store")); err == nil {
		if err := os.RemoveAll(d.path(sealFile)); err != nil {
			return err
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	errs := []error{d.setStoreAside()}
	for _, name := range []string{"peers.json", "bootstrap.json", "recovery.json", kubeconfigName, "front-proxy.crt", "front-proxy.key"} {
		errs = append(errs, os.RemoveAll(d.path(name)), os.RemoveAll(d.inClear(name)))
	}
	made, err := filepath.Glob(d.successor("*"))
	errs = append(errs, err)
	for _, path := range made {
		errs = append(errs, os.Remove(path))
	}
	return errors.Join(errs...)
}

// setStoreAside renames the store's directory to one that does not exist yet.
func (d dataDir) setStoreAside() error {
	if _, err := os.Lstat(d.path("store")); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	aside := d.path("store.demoted")
	for n := 2; ; n++ {
		if _, err := os.Lstat(aside); errors.Is(err, fs.ErrNotExist) {
			break
		} else if err != nil {
			return err
		}
		aside = fmt.Sprintf("%s-%d", d.path("store.demoted"), n)
	}
	return durable.Rename(d.path("store"), aside)
}
