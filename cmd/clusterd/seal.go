package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore/kubestore"
	"github.com/clusterd/clusterd/slack"
)

// sealLook is how often the file with the keys is looked at.
const sealLook = 10 * time.Second

// sealedKinds are encrypted at rest with the cluster's own keys, unless an
// EncryptionConfiguration names them.
var sealedKinds = map[schema.GroupResource]bool{
	corev1.Resource("secrets"): true,
	server.TokenKeys:           true,
}

// sealKeys are those of the file seal.keys, newest first, and after them the
// one that follows from the authority's key. What they protect: the log, its
// snapshots and history, wherever copies of them go. Not: a machine whose whole
// data directory is read, which holds the keys as well.
func (m *Main) sealKeys() ([]kubestore.SealKey, error) {
	_, keys, err := m.dir.OwnSealKeys()
	if err != nil {
		return nil, err
	}
	own, err := m.derivedSealKeys()
	if err != nil {
		return nil, err
	}
	return nodedir.MergeSealKeys(keys, own), nil
}

// openSeal makes the seal that the store's decorator uses.
func (m *Main) openSeal() error {
	keys, err := m.sealKeys()
	if err != nil {
		return err
	}
	if m.seal, err = kubestore.NewSeal(keys); err != nil {
		return err
	}
	return m.openAtRest()
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
	list, _, err := m.dir.OwnSealKeys()
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
	if m.dir.Seal == nil || stamp == "" || stamp == w.right {
		return nil
	}
	info, err := os.Stat(m.dir.Path(nodedir.SealKeysFile))
	if err != nil {
		return err
	}
	if age := now.Sub(info.ModTime()); age.Abs() < sealLook {
		return nil
	}
	list, _, err := m.dir.OwnSealKeys()
	if err != nil {
		return nil // lookAtSeal has said so
	}
	changed, err := m.dir.SealFile(m.dir.Path(nodedir.SealKeysFile), list)
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
	m.resealSoon()
	return nil
}

// sealStamp changes when the file does.
func (m *Main) sealStamp() string {
	info, err := os.Stat(m.dir.Path(nodedir.SealKeysFile))
	if err != nil {
		return ""
	}
	return fmt.Sprint(info.ModTime().UnixNano(), info.Size())
}

// derivedSealKeys are the keys for secrets at rest that follow from authorities, which are those for
// that purpose: of the first one, then of those beside it and of the past, which only read.
func (m *Main) derivedSealKeys() ([]kubestore.SealKey, error) {
	m.idMu.Lock()
	trust, retired := m.id.Trust, m.id.RetiredSeals
	m.idMu.Unlock()
	var keys []kubestore.SealKey
	for _, ca := range trust.For(pki.ForSecrets).All() {
		key, err := nodedir.SealKeyOf(ca)
		if err != nil {
			return nil, err
		}
		keys = append(keys, key)
	}
	past, err := kubestore.ParseSealKeys(string(retired))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", m.dir.Path("pki", "retired-seal.keys"), err)
	}
	for _, key := range past {
		if !slices.ContainsFunc(keys, func(k kubestore.SealKey) bool { return k.ID == key.ID }) {
			keys = append(keys, key)
		}
	}
	return keys, nil
}

// ownSeals is the list of keys of the file seal.keys.
func (m *Main) ownSeals() ([]byte, error) {
	_, keys, err := m.dir.OwnSealKeys()
	return nodedir.SealLines(keys), err
}

// retiredSeals is the list of keys of authorities of the past.
func (m *Main) retiredSeals() []byte {
	m.idMu.Lock()
	defer m.idMu.Unlock()
	return m.id.RetiredSeals
}
