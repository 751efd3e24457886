package join

import (
	"context"
	"errors"
	"fmt"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// ErrRole is returned by SetRole for a member that has the role already.
var ErrRole = errors.New("the member already has this role")

// ErrNotArrived is returned by SetRole for a member that was given a certificate
// and has not been seen since.
var ErrNotArrived = errors.New("the member has not connected yet")

// SetRole records another role of the member with that name, and returns the
// record as it is now. The member learns of it from the servers, fetches a
// certificate of that role (Renew) and starts again as what it is. For a server
// that becomes an agent the caller has taken its vote before. Errors:
// ErrNotMember, ErrRole, ErrNotArrived.
func SetRole(ctx context.Context, s Store, name string, role pki.Role) (Record, error) {
	for {
		holder, _, err := s.Get(ctx, namePrefix+name, raftstore.ReadOptions{})
		if err != nil {
			return Record{}, err
		}
		if holder == nil {
			return Record{}, fmt.Errorf("%s: %w", name, ErrNotMember)
		}
		rec, rev, err := getRecord(ctx, s, string(holder.Value))
		switch {
		case err != nil:
			return Record{}, err
		case rec.IsServer() == (role == pki.Server):
			return rec, fmt.Errorf("%s: %w", name, ErrRole)
		case !rec.Confirmed:
			return rec, fmt.Errorf("%s: %w", name, ErrNotArrived)
		}
		rec.Role = role
		ops := []mvcc.Op{put(memberPrefix+rec.ID, rec)}
		if role == pki.Agent {
			ops = append(ops, GossipKeyRotation(name+" was demoted"))
		}
		res, err := s.Txn(ctx, mvcc.Txn{
			Origin:   origin,
			Compares: []mvcc.Compare{{Key: memberPrefix + rec.ID, ModRevision: rev}},
			Ops:      ops,
		})
		if err != nil {
			return Record{}, fmt.Errorf("record the role of %s: %w", name, err)
		}
		if res.Succeeded {
			return rec, nil
		}
	}
}
