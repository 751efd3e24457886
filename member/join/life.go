package join

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// RestorePlan says which members take part when a store continues from a copy of its state in a
// new epoch.
type RestorePlan struct {
	Epoch uint64 // its number
	// Why is a Removal's: for those who are left out.
	Why string
	// Keep are the ids of the members that stay.
	Keep []string
	// First, if not nil, is a machine that is new, and begins it.
	First *Record
	Now   time.Time
}

// Apply returns the change that makes the records of a keyspace those of its
// new life: servers that are not kept are removed, agents stay, but for one with the
// name of First. Old join tokens go too when
// the life begins on a new machine.
func (l RestorePlan) Apply(k *mvcc.Keyspace) (mvcc.Txn, error) {
	var t mvcc.Txn
	members, err := k.List(mvcc.Range{Prefix: memberPrefix})
	if err != nil {
		return t, err
	}
	drop := func(key string) { t.Ops = append(t.Ops, mvcc.Op{Type: mvcc.OpDelete, Key: key}) }
	kept := 0
	for _, kv := range members.KVs {
		var r Record
		if err := json.Unmarshal(kv.Value, &r); err != nil {
			return t, fmt.Errorf("member record %s: %w", kv.Key, err)
		}
		// The first machine may be called like an agent of before: one name has one member.
		namesake := l.First != nil && r.Name == l.First.Name && r.ID != l.First.ID
		if slices.Contains(l.Keep, r.ID) {
			kept++
			continue
		}
		if !r.IsServer() && !namesake { // it holds nothing of the store, and finds the servers again
			continue
		}
		t.Ops = append(t.Ops, removalOps(r, Removal{Name: r.Name, Removed: l.Now.UTC(), Why: l.Why, Epoch: l.Epoch})...)
		if l.First == nil || r.Name != l.First.Name {
			drop(namePrefix + r.Name)
		}
	}
	if kept != len(l.Keep) {
		return t, fmt.Errorf("of %d members that are to stay, %d have a record", len(l.Keep), kept)
	}
	if l.First == nil {
		t.Ops = append(t.Ops, GossipKeyRotation("the cluster was "+l.Why))
		return t, nil
	}
	t.Ops = append(t.Ops, recordOps(*l.First)...)
	tokens, err := k.List(mvcc.Range{Prefix: tokenPrefix})
	if err != nil {
		return t, err
	}
	for _, kv := range tokens.KVs {
		drop(kv.Key)
	}
	return t, nil
}

// ClusterOf reads the cluster's settings from a keyspace.
func ClusterOf(k *mvcc.Keyspace) (Cluster, error) {
	var c Cluster
	kv, _, err := k.Get(clusterKey, 0)
	if err != nil {
		return c, err
	}
	if kv == nil {
		return c, fmt.Errorf("read the cluster's settings: there are none")
	}
	return c, json.Unmarshal(kv.Value, &c)
}
