package kubestore

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/storage"

	"github.com/clusterd/clusterd/raftstore"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	storewatch "github.com/clusterd/clusterd/raftstore/watch"
)

// retryAfterSeconds is how soon a client should come back when the cluster has
// no leader; an election takes about that long.
const retryAfterSeconds = 1

// faults says, for each way the store can fail, what a client gets. A fault
// after which nothing has been written carries a Retry-After, which makes
// clients repeat the request by themselves; one with an unknown outcome must
// not. The first match counts.
var faults = []struct {
	is   error
	tell func(err error) error
}{
	{raftstore.ErrUnknownOutcome, func(err error) error {
		return apierrors.NewTimeoutError(fmt.Sprintf("it is not known whether the change was stored (%v); read the object before trying again", err), 0)
	}},
	{raftstore.ErrNoLeader, func(err error) error {
		var lasting *raftstore.NoLeaderError
		if errors.As(err, &lasting) {
			// Without a Retry-After: clients would repeat the request ten times
			// in silence before they say why.
			return unavailable(fmt.Sprintf("the cluster has had no leader for %s, nothing was changed: %d of its %d voters are needed. "+
				"Start clusterd on the others (`clusterctl members` shows which are alive). If they are permanently lost: `clusterctl recover`",
				lasting.For.Round(time.Second), lasting.Needed(), lasting.Voters), 0)
		}
		return unavailable(fmt.Sprintf("the cluster has no leader at the moment, nothing was changed: %v", err), retryAfterSeconds)
	}},
	{raftstore.ErrTooLarge, func(err error) error {
		return apierrors.NewRequestEntityTooLargeError(err.Error() + "; split the object into several")
	}},
	{raftstore.ErrNoSpace, noSpace},
	{raftstore.ErrClosed, closing},
	{storewatch.ErrClosed, closing},
	{mvcc.ErrCompacted, func(err error) error {
		return apierrors.NewResourceExpired(tooOld + oldest(err))
	}},
	{context.DeadlineExceeded, func(err error) error {
		return apierrors.NewTimeoutError(fmt.Sprintf("the store did not answer in time: %v", err), 0)
	}},
}

// ReasonInsufficientStorage is the reason of a Status with code 507: there is
// no room for what was sent. Kubernetes has none for it.
const ReasonInsufficientStorage metav1.StatusReason = "InsufficientStorage"

// noSpace tells what is full and what helps. Clients must not repeat the
// request by themselves.
func noSpace(err error) error {
	message := fmt.Sprintf("the cluster cannot store more: %v; give the servers' disks more room", err)
	var quota *raftstore.QuotaError
	switch {
	case !errors.As(err, &quota):
	case quota.Folder != "":
		message = fmt.Sprintf("the cluster cannot store more: the quota of %s is used up (%s of %s, %s more were asked for);"+
			" delete some of its objects, or raise its line under storeQuotas in the servers' configuration",
			shownFolder(quota.Folder), bytesText(quota.Used), bytesText(quota.Quota), bytesText(quota.Growth))
	default:
		message = fmt.Sprintf("the cluster cannot store more: the quota of the store is used up (%s of %s, %s more were asked for);"+
			" delete objects (`clusterctl store top` shows what takes the room; deletes, status and heartbeats still work), or raise storeQuota on every server",
			bytesText(quota.Used), bytesText(quota.Quota), bytesText(quota.Growth))
	}
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status: metav1.StatusFailure, Code: http.StatusInsufficientStorage, Reason: ReasonInsufficientStorage, Message: message,
	}}
}

// shownFolder names a folder of the store as its objects are known:
// /registry/core/secrets/team-a/ holds secrets in the namespace team-a.
func shownFolder(folder string) string {
	parts := strings.Split(strings.Trim(strings.TrimPrefix(folder, DefaultPrefix), "/"), "/")
	if len(parts) < 2 || !strings.HasPrefix(folder, DefaultPrefix) {
		return folder
	}
	name := parts[1]
	if parts[0] != "core" {
		name += "." + parts[0]
	}
	if len(parts) > 2 {
		name += " in namespace " + strings.Join(parts[2:], "/")
	}
	return name
}

// bytesText is n in the largest binary unit that leaves at least one.
func bytesText(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d bytes", n)
	}
	v, unit := float64(n)/1024, 0
	for v >= 1024 && unit < len(units)-1 {
		v, unit = v/1024, unit+1
	}
	return fmt.Sprintf("%.1f %ciB", v, units[unit])
}

// oldest says from where on a client can go on, if err knows.
func oldest(err error) string {
	var rev *mvcc.CompactedError
	if errors.As(err, &rev) {
		return fmt.Sprintf(" The oldest one available is %d.", rev.Oldest)
	}
	return ""
}

func closing(err error) error {
	return unavailable(fmt.Sprintf("this server is shutting down: %v", err), retryAfterSeconds)
}

// The words of expired lists and watches; clients and upstream's tests look for
// their beginnings.
const (
	tooOld         = "The resourceVersion for the provided list is too old."
	watchTooOld    = "The resourceVersion for the provided watch is too old."
	continueTooOld = "The provided continue parameter is too old to display a consistent list result." +
		" Start the list again without it, or use the continue parameter of this answer to see the rest as it is now:" +
		" objects created, changed or deleted since the first chunk may then be missing or shown twice."
)

// Explain turns an error of the store into the Status that a client of the API
// server receives; other errors, and nil, are returned as they are.
func Explain(err error) error { return explain(err) }

// explain turns an error of the store into what the API server's client
// receives; errors without an entry above pass through.
func explain(err error) error {
	for _, f := range faults {
		if errors.Is(err, f.is) {
			return f.tell(err)
		}
	}
	return err
}

// tooLarge is the error of a read at a revision that this node does not have.
func (s *Storage) tooLarge(rev int64) error {
	return storage.NewTooLargeResourceVersionError(uint64(rev), uint64(s.store.Revision()), retryAfterSeconds)
}

// continueExpired is the error of a chunk whose revision is gone. It carries a
// token that goes on from the same key at whatever revision is current then,
// which the revision -1 in the token stands for.
func continueExpired(fromKey, keyPrefix string) error {
	status := apierrors.NewResourceExpired(continueTooOld)
	token, err := storage.EncodeContinue(fromKey, keyPrefix, -1)
	if err != nil {
		return apierrors.NewResourceExpired(tooOld)
	}
	status.ErrStatus.ListMeta.Continue = token
	return status
}

func unavailable(message string, retryAfter int32) error {
	return &apierrors.StatusError{ErrStatus: metav1.Status{
		Status:  metav1.StatusFailure,
		Code:    http.StatusServiceUnavailable,
		Reason:  metav1.StatusReasonServiceUnavailable,
		Message: message,
		Details: &metav1.StatusDetails{RetryAfterSeconds: retryAfter},
	}}
}

// watchStatus is what the last event of a failed watch says.
func watchStatus(err error) *metav1.Status {
	var deleted *corruptDeletedError
	switch {
	case errors.Is(err, mvcc.ErrCompacted), errors.Is(err, storewatch.ErrRewound):
		err = apierrors.NewResourceExpired(watchTooOld + oldest(err))
	case errors.As(err, &deleted):
		return &metav1.Status{
			Status:  metav1.StatusFailure,
			Code:    http.StatusInternalServerError,
			Reason:  metav1.StatusReasonStoreReadError,
			Message: deleted.Error(),
		}
	default:
		err = explain(err)
	}
	var api apierrors.APIStatus
	if !errors.As(err, &api) {
		api = apierrors.NewInternalError(err)
	}
	status := api.Status()
	return &status
}
