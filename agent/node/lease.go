package node

import (
	"context"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	typed "k8s.io/client-go/kubernetes/typed/coordination/v1"
	"k8s.io/klog/v2"
	"k8s.io/utils/ptr"

	"github.com/clusterd/clusterd/apis/coordination"
)

// RenewDeadline is how long after a renewal was begun pods that are fenced may
// run. What is left of the Lease's duration is for killing them and for clocks
// that do not run at the same speed.
func RenewDeadline(leaseTime time.Duration) time.Duration { return leaseTime * 3 / 4 }

// firstRetry is how soon a renewal that failed is tried again; the time doubles up
// to the period.
const firstRetry = 200 * time.Millisecond

// renew keeps the Lease.
func (n *Node) renew(ctx context.Context) {
	var lease *coordinationv1.Lease
	wait := time.NewTimer(0)
	defer wait.Stop()
	failed, retry := false, firstRetry
	for {
		began, at := time.Now(), n.cfg.Clock()
		var err error
		lease, err = n.renewOnce(ctx, lease)
		if apierrors.IsConflict(err) { // another client has written it: it may have been taken
			lease, err = n.renewOnce(ctx, nil)
		}
		if err != nil && ctx.Err() == nil {
			if !failed {
				klog.FromContext(ctx).Info("Lease was not renewed", "err", err)
			}
			failed, lease = true, nil
			wait.Reset(retry)
			retry = min(2*retry, n.cfg.Period)
		} else {
			failed, retry = false, firstRetry
			n.renewal.Store(n.renewal.Load().next(at, n.cfg.LeaseTime/2))
			wait.Reset(n.cfg.Period - time.Since(began))
		}
		select {
		case <-ctx.Done():
			return
		case <-wait.C:
		}
	}
}

// renewal is one of the Lease that came through. It is never changed.
type renewal struct {
	at    int64  // when it began, by Clock
	spell uint64 // the same as before unless renewals had paused
}

// next is the renewal that follows; after a pause a new spell begins.
func (r *renewal) next(at int64, pause time.Duration) *renewal {
	switch {
	case r == nil:
		return &renewal{at, 1}
	case time.Duration(at-r.at) < pause:
		return &renewal{at, r.spell}
	}
	return &renewal{at, r.spell + 1}
}

// Fresh is not zero while the Lease was renewed within half its duration: the servers
// that the node asks are of the cluster, and others take it for alive. It is another
// number each time that this was not so before: others may have taken it for dead.
func (n *Node) Fresh() uint64 {
	if r := n.renewal.Load(); r != nil && time.Duration(n.cfg.Clock()-r.at) < n.cfg.LeaseTime/2 {
		return r.spell
	}
	return 0
}

// renewOnce writes the Lease; lease is the one of last time, nil: look it up. A
// Lease that was taken is held again when it returns.
func (n *Node) renewOnce(ctx context.Context, lease *coordinationv1.Lease) (*coordinationv1.Lease, error) {
	ctx, cancel := context.WithTimeout(ctx, n.cfg.Period)
	defer cancel()
	leases := n.cfg.Heartbeat.CoordinationV1().Leases(LeaseNamespace)
	promises := n.cfg.Fence != nil && n.cfg.Fence.Promises(ctx)
	if lease == nil {
		var err error
		lease, err = leases.Get(ctx, n.cfg.Name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			return n.create(ctx, leases, promises)
		}
		if err != nil {
			return nil, err
		}
	}
	if n.cfg.Fence != nil && (coordination.Taken(lease) || coordination.Returning(lease)) {
		return n.comeBack(ctx, leases, lease, promises)
	}
	return n.write(ctx, leases, lease, promises, nil)
}

// write renews the Lease, changed by change.
func (n *Node) write(ctx context.Context, leases typed.LeaseInterface, lease *coordinationv1.Lease, promises bool, change func(*coordinationv1.Lease)) (*coordinationv1.Lease, error) {
	lease = lease.DeepCopy()
	if change != nil {
		change(lease)
	}
	began := n.fill(lease, promises)
	stored, err := leases.Update(ctx, lease, metav1.UpdateOptions{})
	if err != nil {
		return nil, err
	}
	n.renewed(ctx, stored, began)
	return stored, nil
}

// fill makes lease a renewal that begins now, and says when that is.
func (n *Node) fill(lease *coordinationv1.Lease, promises bool) (began int64) {
	if n.cfg.Fence != nil {
		began = n.cfg.Fence.Now()
	}
	now := metav1.NewMicroTime(time.Now())
	lease.Spec.HolderIdentity = &n.cfg.Name
	lease.Spec.LeaseDurationSeconds = ptr.To(int32(n.cfg.LeaseTime.Seconds()))
	lease.Spec.RenewTime = &now
	if promises {
		coordination.Promise(lease)
	}
	return began
}

// renewed gives the pods that are fenced more time, once the node has a Lease
// that is not taken.
func (n *Node) renewed(ctx context.Context, lease *coordinationv1.Lease, began int64) {
	if n.cfg.Fence != nil && coordination.Promised(lease) && !coordination.Returning(lease) {
		n.cfg.Fence.Renewed(ctx, began)
	}
}

// create makes the Lease. If pods of the node may have been replaced under one
// that is gone, the node returns.
func (n *Node) create(ctx context.Context, leases typed.LeaseInterface, promises bool) (*coordinationv1.Lease, error) {
	lease := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: n.cfg.Name, Namespace: LeaseNamespace}}
	if node := n.Object(); node.UID != "" {
		lease.OwnerReferences = []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}}
	}
	if promises && !n.cfg.Fence.Held(ctx) {
		now := time.Now()
		coordination.Take(lease, n.cfg.Name, now)
	}
	began := n.fill(lease, promises)
	lease, err := leases.Create(ctx, lease, metav1.CreateOptions{})
	if err != nil {
		return nil, err
	}
	n.renewed(ctx, lease, began)
	if n.cfg.Fence != nil && coordination.Returning(lease) {
		return n.comeBack(ctx, leases, lease, promises)
	}
	return lease, nil
}

// comeBack takes up the Lease after the leader had it. Each write names the
// version before, and each step can be done again by an agent that comes later.
func (n *Node) comeBack(ctx context.Context, leases typed.LeaseInterface, lease *coordinationv1.Lease, promises bool) (*coordinationv1.Lease, error) {
	// Nothing that may run elsewhere runs here,
	if err := n.cfg.Fence.End(ctx); err != nil {
		return nil, err
	}
	// from here on nothing more of this node is replaced,
	lease, err := n.write(ctx, leases, lease, promises, func(l *coordinationv1.Lease) {
		if coordination.Taken(l) {
			coordination.Return(l, time.Now())
		}
	})
	if err != nil {
		return nil, err
	}
	// all that was is known not to run here,
	if err := n.cfg.Fence.Settle(ctx); err != nil {
		return nil, err
	}
	// and other pods may begin.
	return n.write(ctx, leases, lease, promises, coordination.Settle)
}
