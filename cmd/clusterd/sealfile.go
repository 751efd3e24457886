package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"regexp"
	"slices"

	"github.com/clusterd/clusterd/raftstore/kubestore"
)

// derivedSeals are the ids of keys that follow from authorities'.
var derivedSeals = regexp.MustCompile(`^` + authoritySeal + `(-[a-z2-7]{12})?$`)

// ownSealKeys are those of the file seal.keys, newest first, and its content: nil if
// there is none.
func (d keyDir) ownSealKeys() (list []byte, keys []kubestore.SealKey, err error) {
	list, err = d.readKey(d.path(sealFile))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("read the keys for secrets at rest: %w", err)
	}
	if keys, err = kubestore.ParseSealKeys(string(list)); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", d.path(sealFile), err)
	}
	return list, keys, nil
}

// addSealKeys writes those of a list into the file seal.keys that are not there
// yet, below what is.
func (d keyDir) addSealKeys(list []byte) error {
	add, err := kubestore.ParseSealKeys(string(list))
	if err != nil {
		return fmt.Errorf("the servers' keys for secrets at rest: %w", err)
	}
	content, have, err := d.ownSealKeys()
	if err != nil {
		return err
	}
	if len(content) > 0 && content[len(content)-1] != '\n' {
		content = append(content, '\n')
	}
	whole := mergeSealKeys(have, add)
	if len(whole) == len(have) {
		return nil
	}
	return d.writeKey(d.path(sealFile), append(content, sealLines(whole[len(have):])...))
}

// mergeSealKeys are keys and, after them, those of more that are not among them. Two
// that differ under one id both stay: kubestore.Seal refuses them by name.
func mergeSealKeys(keys, more []kubestore.SealKey) []kubestore.SealKey {
	all := slices.Clone(keys)
	for _, key := range more {
		if !slices.ContainsFunc(all, func(k kubestore.SealKey) bool { return k.ID == key.ID && bytes.Equal(k.Secret, key.Secret) }) {
			all = append(all, key)
		}
	}
	return all
}

// sealLines is a list of keys as a file holds it.
func sealLines(keys []kubestore.SealKey) (list []byte) {
	for _, key := range keys {
		list = append(list, sealLine(key)...)
	}
	return list
}

// splitSealKeys divides a snapshot's list into the keys of the file seal.keys and
// those that follow from authorities.
func splitSealKeys(list []byte) (own, derived []byte, err error) {
	keys, err := kubestore.ParseSealKeys(string(list))
	if err != nil {
		return nil, nil, fmt.Errorf("the snapshot's keys for secrets at rest: %w", err)
	}
	for _, key := range keys {
		if derivedSeals.MatchString(key.ID) {
			derived = append(derived, sealLine(key)...)
		} else {
			own = append(own, sealLine(key)...)
		}
	}
	return own, derived, nil
}
