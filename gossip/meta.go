package gossip

import (
	"encoding/json"
	"fmt"
)

// Meta is what a node says of itself. ID is not in the encoded form: it is
// memberlist's own name of the node.
type Meta struct {
	// ID is the fingerprint of the node's key.
	ID string `json:"-"`
	// Name is the Kubernetes node name.
	Name string `json:"n"`
	// Version is the clusterd release the node runs.
	Version string `json:"v,omitempty"`
	// Leaving is set when the node leaves permanently. (memberlist v0.5 does not
	// tell its delegates a member that left from one that died.)
	Leaving bool `json:"l,omitempty"`
}

func (m Meta) encode(limit int) ([]byte, error) {
	b, err := json.Marshal(m)
	if err != nil {
		return nil, err
	}
	if len(b) > limit {
		return nil, fmt.Errorf("gossip: meta has %d bytes, more than %d: choose a shorter node name than %q", len(b), limit, m.Name)
	}
	return b, nil
}

func decodeMeta(b []byte) (Meta, error) {
	var m Meta
	if err := json.Unmarshal(b, &m); err != nil {
		return Meta{}, fmt.Errorf("decode meta: %w", err)
	}
	if m.Name == "" {
		return Meta{}, fmt.Errorf("decode meta: no node name")
	}
	return m, nil
}
