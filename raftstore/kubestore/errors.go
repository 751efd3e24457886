package kubestore

import (
	"context"
	"errors"
	"fmt"
	"net/http"

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

// faults says, for each way the store can fail, what a client is told. A fault
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
		return unavailable(fmt.Sprintf("the cluster has no leader at the moment, nothing was changed: %v", err), retryAfterSeconds)
	}},
	{raftstore.ErrTooLarge, func(err error) error {
		return apierrors.NewRequestEntityTooLargeError(err.Error())
	}},
	{raftstore.ErrNoSpace, func(err error) error {
		return &apierrors.StatusError{ErrStatus: metav1.Status{
			Status:  metav1.StatusFailure,
			Code:    http.StatusInsufficientStorage,
			Message: fmt.Sprintf("the cluster cannot store more: %v; delete something, or give the servers' disks more room", err),
		}}
	}},
	{raftstore.ErrClosed, closing},
	{storewatch.ErrClosed, closing},
	{mvcc.ErrCompacted, func(error) error {
		return apierrors.NewResourceExpired(tooOld)
	}},
	{context.DeadlineExceeded, func(err error) error {
		return apierrors.NewTimeoutError(fmt.Sprintf("the store did not answer in time: %v", err), 0)
	}},
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

// explain turns an error of the store into what the API server's client is
// told; errors without an entry above pass through.
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
		err = apierrors.NewResourceExpired(watchTooOld)
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
