package nodedir

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

// WriteBootstrap notes that the next start of this node begins the cluster.
func (d Dir) WriteBootstrap(c join.Cluster) error {
	b, err := json.Marshal(c)
	if err != nil {
		return err
	}
	return WriteFile(d.Path("bootstrap.json"), b, 0o600)
}

// ReadBootstrap returns nil when there is nothing to begin.
func (d Dir) ReadBootstrap() (*join.Cluster, error) {
	b, err := os.ReadFile(d.Path("bootstrap.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var c join.Cluster
	if err := json.Unmarshal(b, &c); err != nil {
		return nil, fmt.Errorf("%s: %w", d.Path("bootstrap.json"), err)
	}
	return &c, nil
}

// RemoveBootstrap removes what WriteBootstrap wrote.
func (d Dir) RemoveBootstrap() error {
	if err := os.Remove(d.Path("bootstrap.json")); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return durable.SyncDir(string(d))
}

// Epoch is that of the store.
func (d Dir) Epoch() (raftstore.Epoch, error) { return raftstore.ReadEpoch(d.Path("store")) }

// WriteRecovery has the next start carry out an order.
func (d Dir) WriteRecovery(r recovery.Order) error {
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return WriteFile(d.Path("recovery.json"), b, 0o600)
}

// ReadRecovery returns nil when there is nothing to do.
func (d Dir) ReadRecovery() (*recovery.Order, error) {
	b, err := os.ReadFile(d.Path("recovery.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var r recovery.Order
	if err := json.Unmarshal(b, &r); err != nil {
		return nil, fmt.Errorf("%s: %w", d.Path("recovery.json"), err)
	}
	return &r, nil
}

// DropServerState removes what only servers have beside their identity. The store
// is set aside: if this node was not demoted after all, it can be put
// back. The keys for secrets at rest go with it, and before it; where there is no store
// they are an administrator's, who has put them there for the node to become a server.
func (d KeyDir) DropServerState() error {
	if _, err := os.Lstat(d.Path("store")); err == nil {
		if err := os.RemoveAll(d.Path(SealKeysFile)); err != nil {
			return err
		}
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	errs := []error{d.setStoreAside()}
	for _, name := range []string{"peers.json", "bootstrap.json", "recovery.json", KubeconfigName, "front-proxy.crt", "front-proxy.key"} {
		errs = append(errs, os.RemoveAll(d.Path(name)), os.RemoveAll(d.InClear(name)))
	}
	made, err := filepath.Glob(d.Successor("*"))
	errs = append(errs, err)
	for _, path := range made {
		errs = append(errs, os.Remove(path))
	}
	return errors.Join(errs...)
}

// setStoreAside renames the store's directory to one that does not exist yet.
func (d Dir) setStoreAside() error {
	if _, err := os.Lstat(d.Path("store")); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	aside := d.Path("store.demoted")
	for n := 2; ; n++ {
		if _, err := os.Lstat(aside); errors.Is(err, fs.ErrNotExist) {
			break
		} else if err != nil {
			return err
		}
		aside = fmt.Sprintf("%s-%d", d.Path("store.demoted"), n)
	}
	return durable.Rename(d.Path("store"), aside)
}
