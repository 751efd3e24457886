package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/client-go/kubernetes"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/raftstore/kubestore"
	"github.com/clusterd/clusterd/slack"
)

const (
	sealFile = "seal.keys"
	// sealLook is how often the file is looked at.
	sealLook = 10 * time.Second
	sealPage = 500
)

// sealedKinds are encrypted at rest.
var sealedKinds = map[schema.GroupResource]bool{
	corev1.Resource("secrets"): true,
	server.TokenKeys:           true,
}

// sealKeys are those of the file seal.keys, newest first, and after them the
// one that follows from the authority's key. What they protect: the log, its
// snapshots and history, wherever copies of them go. Not: a machine whose whole
// data folder is read, which holds the keys as well.
func (m *Main) sealKeys() ([]kubestore.SealKey, error) {
	_, keys, err := m.dir.ownSealKeys()
	if err != nil {
		return nil, err
	}
	own, err := m.exchange.sealKeys()
	if err != nil {
		return nil, err
	}
	return mergeSealKeys(keys, own), nil
}

// openSeal makes the seal that the store's decorator uses.
func (m *Main) openSeal() error {
	keys, err := m.sealKeys()
	if err != nil {
		return err
	}
	m.seal, err = kubestore.NewSeal(keys)
	return err
}

// sealer is the decorator's choice of what is sealed.
func (m *Main) sealer(resource schema.GroupResource) value.Transformer {
	if sealedKinds[resource] {
		return m.seal
	}
	return nil
}

// keepSeal takes up changes of the file with the keys while the node runs, and seals a
// file that was put there in clear.
func (m *Main) keepSeal(ctx context.Context) error {
	var w sealWatch // the file may have changed since it was read at the start
	for {
		m.lookAtSeal(&w)
		if err := m.sealSettled(&w, time.Now()); err != nil {
			m.log.Error("the keys for secrets at rest lie in clear", "err", err)
		}
		select {
		case <-slack.After(sealLook):
		case <-ctx.Done():
			return nil
		}
	}
}

// sealWatch is what is known of the file with the keys.
type sealWatch struct {
	stamp string // when its content was taken up
	taken bool   // list was
	list  []byte
	right string // the stamp of one that is sealed
}

// lookAtSeal takes the file's keys up if it is another than at the stamp, and reports
// whether it did. The file is stamped before it is read: what changes between is
// seen the next time. One that cannot be taken up is tried again. One that was only
// sealed costs a read.
func (m *Main) lookAtSeal(w *sealWatch) bool {
	now := m.sealStamp()
	if now == w.stamp {
		return false
	}
	list, _, err := m.dir.ownSealKeys()
	if err == nil && w.taken && bytes.Equal(list, w.list) {
		w.stamp = now
		return false
	}
	if err == nil {
		err = m.newSealKeys()
	}
	if err != nil {
		m.log.Error("the keys for secrets at rest stay as they were", "err", err)
		return false
	}
	w.stamp, w.taken, w.list = now, true, list
	return true
}

// sealSettled seals the file if it lies in clear, as it does where somebody has put it
// there by hand, once it has been left alone for as long as sealLook: it is not to
// be sealed in the middle of being written, nor to be put over one that has just come.
func (m *Main) sealSettled(w *sealWatch, now time.Time) error {
	stamp := m.sealStamp()
	if m.dir.seal == nil || stamp == "" || stamp == w.right {
		return nil
	}
	info, err := os.Stat(m.dir.path(sealFile))
	if err != nil {
		return err
	}
	if age := now.Sub(info.ModTime()); age.Abs() < sealLook {
		return nil
	}
	list, _, err := m.dir.ownSealKeys()
	if err != nil {
		return nil // lookAtSeal has said so
	}
	changed, err := m.dir.sealFile(m.dir.path(sealFile), list)
	if err == nil && !changed {
		w.right = stamp // or it has changed since, and has another stamp
	}
	return err
}

// newSealKeys takes up keys that changed.
func (m *Main) newSealKeys() error {
	keys, err := m.sealKeys()
	if err == nil {
		err = m.seal.Use(keys)
	}
	if err != nil {
		return err
	}
	m.log.Info("new keys for secrets at rest", "writes", keys[0].ID, "keys", len(keys))
	select {
	case m.resealNow <- struct{}{}:
	default:
	}
	return nil
}

// sealStamp changes when the file does.
func (m *Main) sealStamp() string {
	info, err := os.Stat(m.dir.path(sealFile))
	if err != nil {
		return ""
	}
	return fmt.Sprint(info.ModTime().UnixNano(), info.Size())
}

// reseal writes, as the leader, every Secret and every key of tokens once, at the beginning of each
// term and when the keys changed here. The store writes only what is not sealed with
// the newest key; the rest costs a read.
func (m *Main) reseal(ctx context.Context) error {
	client, err := kubernetes.NewForConfig(m.api.LoopbackConfig())
	if err != nil {
		return err
	}
	for {
		count, err := resealSecrets(ctx, client)
		if _, keysErr := m.api.ResealTokenKeys(ctx); keysErr != nil {
			err = errors.Join(err, fmt.Errorf("seal the keys of tokens: %w", keysErr))
		}
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			m.log.Warn("not all secrets are sealed with the newest key yet", "done", count, "err", err)
		default:
			m.log.Info("all secrets and the keys of tokens are sealed with the newest key", "secrets", count)
		}
		again := time.After(time.Minute)
		if err == nil {
			again = nil
		}
		select {
		case <-m.resealNow:
		case <-again:
		case <-ctx.Done():
			return nil
		}
	}
}

// namedLeft is how many Secrets that could not be sealed are named.
const namedLeft = 10

// resealSecrets writes all Secrets. One that cannot be written, because of a policy or
// a quota, keeps none of the others.
func resealSecrets(ctx context.Context, client kubernetes.Interface) (done int, err error) {
	var left int
	var errs []error
	options := metav1.ListOptions{Limit: sealPage}
	for {
		page, err := client.CoreV1().Secrets(metav1.NamespaceAll).List(ctx, options)
		if err != nil {
			return done, fmt.Errorf("list secrets: %w", err)
		}
		for i := range page.Items {
			secret := &page.Items[i]
			_, err := client.CoreV1().Secrets(secret.Namespace).Update(ctx, secret, metav1.UpdateOptions{})
			// Who wrote or deleted it meanwhile has sealed it.
			if err != nil && !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) {
				if ctx.Err() != nil {
					return done, ctx.Err()
				}
				if left++; left <= namedLeft {
					errs = append(errs, fmt.Errorf("seal secret %s/%s: %w", secret.Namespace, secret.Name, err))
				}
				continue
			}
			done++
		}
		if page.Continue == "" {
			if left > namedLeft {
				errs = append(errs, fmt.Errorf("and %d more secrets", left-namedLeft))
			}
			return done, errors.Join(errs...)
		}
		options.Continue = page.Continue
	}
}
