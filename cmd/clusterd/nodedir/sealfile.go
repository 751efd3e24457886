package nodedir

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/member/pki"
	"github.com/clusterd/clusterd/raftstore/backup"
	"github.com/clusterd/clusterd/raftstore/kubestore"
)

// OwnSealKeys are those of the file seal.keys, newest first, and its content: nil if
// there is none.
func (d KeyDir) OwnSealKeys() (list []byte, keys []kubestore.SealKey, err error) {
	list, err = d.ReadKey(d.Path(SealKeysFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("read the keys for secrets at rest: %w", err)
	}
	if keys, err = kubestore.ParseSealKeys(string(list)); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", d.Path(SealKeysFile), err)
	}
	return list, keys, nil
}

// AddSealKeys writes those of a list into the file seal.keys that are not there
// yet, below what is.
func (d KeyDir) AddSealKeys(list []byte) error {
	add, err := kubestore.ParseSealKeys(string(list))
	if err != nil {
		return fmt.Errorf("the servers' keys for secrets at rest: %w", err)
	}
	lock, err := d.lockSealKeys()
	if err != nil {
		return err
	}
	defer lock.Close()
	content, have, err := d.OwnSealKeys()
	if err != nil {
		return err
	}
	if len(content) > 0 && content[len(content)-1] != '\n' {
		content = append(content, '\n')
	}
	whole := MergeSealKeys(have, add)
	if len(whole) == len(have) {
		return nil
	}
	return d.WriteKey(d.Path(SealKeysFile), append(content, SealLines(whole[len(have):])...))
}

// WriteSealKeys replaces the file of keys for secrets at rest by a list. A running node takes
// it up. Without drop the list has to hold all keys that the file has.
func (d KeyDir) WriteSealKeys(in io.Reader, drop bool) error {
	list, err := io.ReadAll(in)
	if err != nil {
		return err
	}
	keys, err := kubestore.ParseSealKeys(string(list))
	if err != nil {
		return fmt.Errorf("the standard input: %w", err)
	}
	if len(keys) == 0 {
		return fmt.Errorf("the standard input holds no key: lines ID BASE64 are expected; to be without keys of your own remove %s", d.Path(SealKeysFile))
	}
	if _, err := kubestore.NewSeal(MergeSealKeys(nil, keys)); err != nil {
		return fmt.Errorf("the standard input: %w", err)
	}
	// A node whose files are sealed is written to with its sealing key or not at all.
	if _, err := d.ReadKey(d.Path("pki", "node.key")); err != nil {
		return fmt.Errorf("%s is left as it is: %w", SealKeysFile, err)
	}
	lock, err := d.lockSealKeys()
	if err != nil {
		return err
	}
	defer lock.Close()
	_, have, err := d.OwnSealKeys()
	if err != nil {
		return fmt.Errorf("%s is left as it is: %w", SealKeysFile, err)
	}
	var lost []string
	for _, key := range MergeSealKeys(keys, have)[len(keys):] {
		lost = append(lost, key.ID)
	}
	if len(lost) > 0 && !drop {
		return fmt.Errorf("%s is left as it is: it has the keys %q, which the standard input has not; Secrets, their history or backups may need them (--drop if none does)", d.Path(SealKeysFile), lost)
	}
	return d.WriteKey(d.Path(SealKeysFile), onceEach(list))
}

// onceEach is a list without the lines of keys that stand above already.
func onceEach(list []byte) (once []byte) {
	seen := map[string]bool{}
	for line := range bytes.Lines(list) {
		key, err := kubestore.ParseSealKeys(string(line))
		if err == nil && len(key) == 1 {
			if seen[key[0].ID] {
				continue
			}
			seen[key[0].ID] = true
		}
		if once = append(once, line...); line[len(line)-1] != '\n' {
			once = append(once, '\n')
		}
	}
	return once
}

// lockSealKeys keeps other writers of the file seal.keys out, of this process and of
// `clusterd keys`, until the file that it returns is closed.
func (d Dir) lockSealKeys() (*os.File, error) {
	f, err := os.Open(string(d))
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", d, err), f.Close())
	}
	return f, nil
}

// MergeSealKeys are keys and, after them, those of more that are not among them. Two
// that differ under one id both stay: kubestore.Seal refuses them by name.
func MergeSealKeys(keys, more []kubestore.SealKey) []kubestore.SealKey {
	all := slices.Clone(keys)
	for _, key := range more {
		if !slices.ContainsFunc(all, func(k kubestore.SealKey) bool { return k.ID == key.ID && bytes.Equal(k.Secret, key.Secret) }) {
			all = append(all, key)
		}
	}
	return all
}

// SealLines is a list of keys as a file holds it.
func SealLines(keys []kubestore.SealKey) (list []byte) {
	for _, key := range keys {
		list = append(list, SealLine(key)...)
	}
	return list
}

// SplitSealKeys divides a snapshot's list into the keys of the file seal.keys and
// those that follow from authorities.
func SplitSealKeys(list []byte) (own, derived []byte, err error) {
	keys, err := kubestore.ParseSealKeys(string(list))
	if err != nil {
		return nil, nil, fmt.Errorf("the snapshot's keys for secrets at rest: %w", err)
	}
	for _, key := range keys {
		if backup.DerivedSeal(key.ID) {
			derived = append(derived, SealLine(key)...)
		} else {
			own = append(own, SealLine(key)...)
		}
	}
	return own, derived, nil
}

// SealKeyOf is the key for secrets at rest that follows from an authority's.
func SealKeyOf(ca *pki.CA) (kubestore.SealKey, error) {
	master, err := ca.EncodeCAKey()
	if err != nil {
		return kubestore.SealKey{}, err
	}
	id := backup.AuthoritySeal
	if !ca.First() {
		id += "-" + ca.ID()[:12]
	}
	return kubestore.DeriveSealKey(id, master)
}

// SealLine is the key's line in a list of them.
func SealLine(key kubestore.SealKey) []byte {
	return fmt.Appendf(nil, "%s %s\n", key.ID, base64.StdEncoding.EncodeToString(key.Secret))
}
