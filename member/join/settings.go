package join

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// PodEncryptionOff: packets of pods are not encrypted; a record that says nothing
// says this.
const PodEncryptionOff = "off"

// SetPodEncryption notes how this node encrypts packets of pods, so that those who
// join do it too. The leader calls it: its value holds for them. It returns what was noted
// before.
func SetPodEncryption(ctx context.Context, s Store, how string) (was string, err error) {
	c, revision, err := clusterNow(ctx, s)
	if err != nil {
		return "", err
	}
	if was = cmp.Or(c.PodEncryption, PodEncryptionOff); was == how {
		return was, nil
	}
	c.PodEncryption = how
	if err := putCluster(ctx, s, c, revision); err != nil {
		return was, fmt.Errorf("note the encryption in the cluster's settings: %w", err)
	}
	return was, nil
}

// clusterNow reads the cluster's settings with their revision.
func clusterNow(ctx context.Context, s Store) (Cluster, int64, error) {
	var c Cluster
	kv, _, err := s.Get(ctx, clusterKey, raftstore.ReadOptions{})
	if err == nil && kv == nil {
		err = errors.New("there are none")
	}
	if err == nil {
		err = json.Unmarshal(kv.Value, &c)
	}
	if err != nil {
		return c, 0, fmt.Errorf("read the cluster's settings: %w", err)
	}
	return c, kv.ModRevision, nil
}

// putCluster replaces the settings of that revision.
func putCluster(ctx context.Context, s Store, c Cluster, revision int64) error {
	res, err := s.Txn(ctx, mvcc.Txn{Origin: origin, Compares: []mvcc.Compare{{Key: clusterKey, ModRevision: revision}}, Ops: []mvcc.Op{put(clusterKey, c)}})
	if err == nil && !res.Succeeded {
		err = errors.New("they were changed at the same time")
	}
	return err
}
