package coordination

import (
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/apis/names"
)

// A node's Lease also says who may use the volumes that the node shares with
// others. Its node renews it, and promises to end the pods that are fenced
// before leaseDurationSeconds have passed since the renewal began. The leader
// takes a Lease that has run out: from that write on every renewal is refused
// until the node has read what became of it.
//
//	held ──leader takes it──▶ taken ──node is back──▶ returning ──its pods are reported as failed──▶ held
//	                            ▲                        │
//	                            └────runs out again──────┘
//
// Only while it is taken are pods of the node replaced. Each arrow is a write
// that names the version it follows.

// Promise notes that the promise holds for the renewal that is about to be
// written. A renewal by a program that knows nothing of it ends it.
func Promise(l *coordinationv1.Lease) {
	if l.Spec.RenewTime != nil {
		metav1.SetMetaDataAnnotation(&l.ObjectMeta, names.FencingPromise, stamp(l.Spec.RenewTime.Time))
	}
}

// Promised reports whether the promise holds for the newest renewal.
func Promised(l *coordinationv1.Lease) bool {
	return l.Spec.RenewTime != nil && l.Annotations[names.FencingPromise] == stamp(l.Spec.RenewTime.Time)
}

// stamp is a time as Leases hold it.
func stamp(t time.Time) string { return t.UTC().Format(metav1.RFC3339Micro) }

// Taken reports whether the Lease was taken from its node.
func Taken(l *coordinationv1.Lease) bool {
	return l.Annotations[names.Fenced] != "" && (l.Spec.HolderIdentity == nil || *l.Spec.HolderIdentity != l.Name)
}

// Returning reports whether the node has its Lease again, and has not said yet
// what became of its pods.
func Returning(l *coordinationv1.Lease) bool {
	return l.Annotations[names.Fenced] != "" && !Taken(l)
}

// Take takes a Lease from its node. The time of the last renewal stays.
func Take(l *coordinationv1.Lease, holder string, now time.Time) {
	metav1.SetMetaDataAnnotation(&l.ObjectMeta, names.Fenced, now.UTC().Format(time.RFC3339))
	hand(l, holder, now)
}

// Return gives a Lease back to its node, which is returning then.
func Return(l *coordinationv1.Lease, now time.Time) { hand(l, l.Name, now) }

// Settle ends the return.
func Settle(l *coordinationv1.Lease) { delete(l.Annotations, names.Fenced) }

func hand(l *coordinationv1.Lease, holder string, now time.Time) {
	transitions := int32(1)
	if n := l.Spec.LeaseTransitions; n != nil {
		transitions += *n
	}
	at := metav1.NewMicroTime(now)
	l.Spec.HolderIdentity, l.Spec.LeaseTransitions, l.Spec.AcquireTime = &holder, &transitions, &at
}
