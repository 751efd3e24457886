// Package join is how machines become members and how members become voters:
// where gossip's hints meet raft's membership. Its durable part is a handful
// of records in the store; who is admitted is decided there and nowhere else.
package join

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// origin names these records' maker in the store's history.
const origin = "clusterd members and tokens"

// Keys in the store. They lie outside /registry/, which is the API's.
const (
	memberPrefix = "/clusterd/members/" // + id → Record
	namePrefix   = "/clusterd/names/"   // + node name → id
	removed      = "/clusterd/removed/" // + id → Removal
	tokenPrefix  = "/clusterd/tokens/"  // + token id → tokenRecord
	askPrefix    = "/clusterd/asking/"  // + token id → askRecord
	clusterKey   = "/clusterd/cluster"  // → Cluster
	votersKey    = "/clusterd/voters"   // → votersRecord
)

// Store is what this package needs of the replicated store.
type Store interface {
	Txn(ctx context.Context, t mvcc.Txn) (mvcc.TxnResult, error)
	Get(ctx context.Context, key string, o raftstore.ReadOptions) (*mvcc.KeyValue, int64, error)
	List(ctx context.Context, prefix string, o raftstore.ListOptions) (raftstore.ListResult, error)
}

// Cluster holds the settings that every node must share. They are fixed by
// `clusterd init`, but that a range of the second IP family may be added, see
// Widen, and that encryption of pods' packets may be switched, see SetPodEncryption.
type Cluster struct {
	Name        string    `json:"name"`
	ClusterCIDR Ranges    `json:"clusterCIDR"` // pod addresses, a part of it for each node
	ServiceCIDR Ranges    `json:"serviceCIDR"`
	Created     time.Time `json:"created"`
	// PodEncryption is how packets of pods are encrypted between nodes; empty in
	// records that are older than that: they are not.
	PodEncryption string `json:"podEncryption,omitempty"`
}

// Record records that a key belongs to a member of the cluster.
type Record struct {
	ID   string `json:"id"`
	Name string `json:"name"`
	// Role is empty in records that are older than roles: a server's.
	Role   pki.Role       `json:"role,omitempty"`
	Addr   netip.AddrPort `json:"addr"` // a server's when it joined, gossip knows today's; an agent's of today
	Joined time.Time      `json:"joined"`
	// Confirmed is set once the member has arrived: a server when it was seen in
	// gossip, an agent when it first asked as a member. Until then a machine
	// whose join broke off in the middle may join again by its name.
	Confirmed bool `json:"confirmed"`
	// Token is the id of the token it joined with, until it is confirmed.
	Token string `json:"token,omitempty"`
}

// IsServer reports whether the member is one.
func (r Record) IsServer() bool { return r.Role != pki.Agent }

// Servers are those of the records that are servers.
func Servers(records []Record) []Record {
	return slices.DeleteFunc(slices.Clone(records), func(r Record) bool { return !r.IsServer() })
}

// ErrRecorded is returned by PutCluster when the cluster has its records.
var ErrRecorded = errors.New("the cluster is recorded already")

// ErrNotMember is returned when no member has that name or id.
var ErrNotMember = errors.New("no such member")

// NameTakenError says that another machine already has the node name.
type NameTakenError struct {
	Name, ID string
}

func (e *NameTakenError) Error() string {
	return fmt.Sprintf("the node name %q is taken by a member with another key (%s): choose another with --name, or, if that machine is permanently gone, remove it with `clusterctl members rm %s` and join again", e.Name, e.ID, e.Name)
}

// PutCluster records the cluster's settings and its first member.
// It returns ErrRecorded when there are settings already.
func PutCluster(ctx context.Context, s Store, c Cluster, first Record) error {
	res, err := s.Txn(ctx, mvcc.Txn{
		Origin:   origin,
		Compares: []mvcc.Compare{{Key: clusterKey}},
		Ops:      append(recordOps(first), put(clusterKey, c)),
	})
	if err != nil {
		return fmt.Errorf("record the cluster: %w", err)
	}
	if !res.Succeeded {
		return ErrRecorded
	}
	return nil
}

// GetCluster reads the cluster's settings.
func GetCluster(ctx context.Context, s Store) (Cluster, error) {
	var c Cluster
	kv, _, err := s.Get(ctx, clusterKey, raftstore.ReadOptions{})
	if err != nil {
		return c, fmt.Errorf("read the cluster's settings: %w", err)
	}
	if kv == nil {
		return c, errors.New("read the cluster's settings: there are none")
	}
	return c, json.Unmarshal(kv.Value, &c)
}

// Records lists the members by name. A stale list needs no leader.
func Records(ctx context.Context, s Store, stale bool) ([]Record, error) {
	res, err := s.List(ctx, memberPrefix, raftstore.ListOptions{ReadOptions: raftstore.ReadOptions{Stale: stale}})
	if err != nil {
		return nil, fmt.Errorf("list members: %w", err)
	}
	records := make([]Record, 0, len(res.KVs))
	for _, kv := range res.KVs {
		var r Record
		if err := json.Unmarshal(kv.Value, &r); err != nil {
			return nil, fmt.Errorf("member record %s: %w", kv.Key, err)
		}
		records = append(records, r)
	}
	return records, nil
}

// errChanged is returned when a record that an admission depends on was changed concurrently.
var errChanged = errors.New("record changed concurrently")

// addMember records a member in one transaction with the use of its token. A
// name that belongs to another key gives a *NameTakenError, unless that other
// never arrived; it is no member any more then. errChanged: look again.
func addMember(ctx context.Context, s Store, r Record, token storedToken) error {
	nameKey := namePrefix + r.Name
	holder, _, err := s.Get(ctx, nameKey, raftstore.ReadOptions{})
	if err != nil {
		return fmt.Errorf("look up node name %s: %w", r.Name, err)
	}
	own, ownRev, err := getRecord(ctx, s, r.ID)
	if err != nil && !errors.Is(err, ErrNotMember) {
		return err
	}
	if err == nil && (own.Confirmed || own.Name != r.Name) {
		return &NameTakenError{Name: own.Name, ID: r.ID}
	}
	if gone, _, err := s.Get(ctx, removed+r.ID, raftstore.ReadOptions{}); err != nil || gone != nil {
		return errors.Join(err, &Refusal{CodeRequest, "this key was removed from the cluster: join with a new one"})
	}
	t := mvcc.Txn{Origin: origin, Compares: []mvcc.Compare{{Key: nameKey}, {Key: memberPrefix + r.ID, ModRevision: ownRev}, {Key: removed + r.ID}}, Ops: recordOps(r)}
	again := ownRev != 0 && own.Token == r.Token // or it takes the place of one that joined with the same token and never arrived
	if holder != nil {
		t.Compares[0].ModRevision = holder.ModRevision
		if id := string(holder.Value); id != r.ID {
			old, rev, err := getRecord(ctx, s, id)
			if err != nil && !errors.Is(err, ErrNotMember) {
				return err
			}
			if err == nil && old.Confirmed {
				return &NameTakenError{Name: r.Name, ID: id}
			}
			t.Compares = append(t.Compares, mvcc.Compare{Key: memberPrefix + id, ModRevision: rev})
			if err == nil {
				again = old.Token == r.Token
				t.Ops = append(t.Ops, removalOps(old, Removal{Name: old.Name, Removed: r.Joined.UTC()})...)
				if old.IsServer() {
					t.Ops = append(t.Ops, GossipKeyRotation("another machine joined in the place of "+old.Name))
				}
			}
		}
	}
	use, err := token.use(again)
	if err != nil {
		return err
	}
	t.Compares = append(t.Compares, mvcc.Compare{Key: token.key, ModRevision: token.revision})
	t.Ops = append(t.Ops, use)
	res, err := s.Txn(ctx, t)
	if err != nil {
		return fmt.Errorf("record member %s: %w", r.Name, err)
	}
	if !res.Succeeded {
		return errChanged
	}
	return nil
}

// confirm notes that a member has arrived.
func confirm(ctx context.Context, s Store, id string) error {
	r, rev, err := getRecord(ctx, s, id)
	if err != nil || r.Confirmed {
		return err
	}
	r.Confirmed, r.Token = true, ""
	_, err = s.Txn(ctx, mvcc.Txn{
		Origin:   origin,
		Compares: []mvcc.Compare{{Key: memberPrefix + id, ModRevision: rev}},
		Ops:      []mvcc.Op{put(memberPrefix+id, r)},
	})
	return err
}

// RemoveMember deletes the record of the member with that name and returns
// it. Its key is worth nothing from then on, see Removal.
func RemoveMember(ctx context.Context, s Store, name string, now time.Time) (Record, error) {
	for {
		holder, _, err := s.Get(ctx, namePrefix+name, raftstore.ReadOptions{})
		if err != nil {
			return Record{}, err
		}
		if holder == nil {
			return Record{}, fmt.Errorf("%s: %w", name, ErrNotMember)
		}
		id := string(holder.Value)
		r, rev, err := getRecord(ctx, s, id)
		if err != nil && !errors.Is(err, ErrNotMember) {
			return Record{}, err
		}
		t := mvcc.Txn{
			Origin:   origin,
			Compares: []mvcc.Compare{{Key: namePrefix + name, ModRevision: holder.ModRevision}, {Key: memberPrefix + id, ModRevision: rev}},
			Ops:      []mvcc.Op{{Type: mvcc.OpDelete, Key: namePrefix + name}},
		}
		if rev != 0 {
			t.Ops = append(t.Ops, removalOps(r, Removal{Name: r.Name, Removed: now.UTC()})...)
			if r.IsServer() {
				t.Ops = append(t.Ops, GossipKeyRotation(r.Name+" was removed"))
			}
		}
		res, err := s.Txn(ctx, t)
		if err != nil {
			return Record{}, fmt.Errorf("remove member %s: %w", name, err)
		}
		if res.Succeeded {
			return r, nil
		}
	}
}

// Member returns the record with that id as this member knows it, without
// waiting; ErrNotMember.
func Member(ctx context.Context, s Store, id string) (Record, error) {
	r, _, err := readRecord(ctx, s, id, raftstore.ReadOptions{Stale: true})
	return r, err
}

// MemberNow is Member as the cluster knows it: it asks the leader when this
// member knows of none.
func MemberNow(ctx context.Context, s Store, id string) (Record, error) {
	r, err := Member(ctx, s, id)
	if errors.Is(err, ErrNotMember) {
		r, _, err = getRecord(ctx, s, id)
	}
	return r, err
}

// MemberNamed returns the record of the node name as this member knows it.
func MemberNamed(ctx context.Context, s Store, name string) (Record, error) {
	holder, _, err := s.Get(ctx, namePrefix+name, raftstore.ReadOptions{Stale: true})
	if err != nil {
		return Record{}, err
	}
	if holder == nil {
		return Record{}, fmt.Errorf("%s: %w", name, ErrNotMember)
	}
	return Member(ctx, s, string(holder.Value))
}

// arrived notes that an agent has come, and where it listens now.
func arrived(ctx context.Context, s Store, id string, addr netip.AddrPort) error {
	r, rev, err := getRecord(ctx, s, id)
	if err != nil || r.IsServer() || r.Confirmed && r.Addr == addr {
		return err
	}
	r.Confirmed, r.Token, r.Addr = true, "", addr
	_, err = s.Txn(ctx, mvcc.Txn{
		Origin:   origin,
		Compares: []mvcc.Compare{{Key: memberPrefix + id, ModRevision: rev}},
		Ops:      []mvcc.Op{put(memberPrefix+id, r)},
	})
	return err
}

// getRecord returns a record and its revision, or ErrNotMember and 0.
func getRecord(ctx context.Context, s Store, id string) (Record, int64, error) {
	return readRecord(ctx, s, id, raftstore.ReadOptions{})
}

func readRecord(ctx context.Context, s Store, id string, o raftstore.ReadOptions) (Record, int64, error) {
	kv, _, err := s.Get(ctx, memberPrefix+id, o)
	if err != nil {
		return Record{}, 0, fmt.Errorf("read member %s: %w", id, err)
	}
	if kv == nil {
		return Record{}, 0, fmt.Errorf("%s: %w", id, ErrNotMember)
	}
	var r Record
	if err := json.Unmarshal(kv.Value, &r); err != nil {
		return Record{}, 0, fmt.Errorf("member record %s: %w", id, err)
	}
	return r, kv.ModRevision, nil
}

func recordOps(r Record) []mvcc.Op {
	return []mvcc.Op{
		put(memberPrefix+r.ID, r),
		{Type: mvcc.OpPut, Key: namePrefix + r.Name, Value: []byte(r.ID)},
	}
}

func put(key string, v any) mvcc.Op {
	b, err := json.Marshal(v)
	if err != nil { // plain structs of our own
		panic(fmt.Sprintf("join: encode %s: %v", key, err))
	}
	return mvcc.Op{Type: mvcc.OpPut, Key: key, Value: b}
}

func idOf(key, prefix string) string { return strings.TrimPrefix(key, prefix) }
