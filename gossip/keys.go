package gossip

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
)

// SetKeys changes the keys: the first encrypts from now on, all decrypt, and no
// other does.
func (m *Members) SetKeys(keys [][]byte) error {
	if err := checkKeys(keys); err != nil {
		return err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if slices.EqualFunc(keys, m.keys, bytes.Equal) {
		return nil
	}
	m.keys = keys
	if m.ring == nil {
		return nil
	}
	for _, key := range keys {
		if err := m.ring.AddKey(key); err != nil {
			return fmt.Errorf("gossip's keys: %w", err)
		}
	}
	if err := m.ring.UseKey(keys[0]); err != nil {
		return fmt.Errorf("gossip's keys: %w", err)
	}
	for _, key := range slices.Clone(m.ring.GetKeys()) {
		if slices.ContainsFunc(keys, func(k []byte) bool { return bytes.Equal(k, key) }) {
			continue
		}
		if err := m.ring.RemoveKey(key); err != nil {
			return fmt.Errorf("gossip's keys: %w", err)
		}
	}
	select {
	case m.rekeyed <- struct{}{}:
	default:
	}
	return nil
}

func checkKeys(keys [][]byte) error {
	if len(keys) == 0 {
		return errors.New("gossip: Keys: one is required")
	}
	for _, key := range keys {
		if n := len(key); n != 32 {
			return fmt.Errorf("gossip: a key has %d bytes, not 32", n)
		}
	}
	return nil
}
