package atrest

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage/value"

	"github.com/clusterd/clusterd/raftstore/kubestore"
)

// Transformer is that of one resource. It follows changes of the file.
func (s *Sealing) Transformer(resource schema.GroupResource) value.Transformer {
	return &transformer{s, resource}
}

// Covers reports whether the resource is to be sealed.
func (s *Sealing) Covers(resource schema.GroupResource) bool {
	if chain := s.chain(resource); chain != nil {
		return !chain.clear
	}
	return s.cfg.Sealed[resource]
}

// chain is what the file says of the resource; nil: nothing.
func (s *Sealing) chain(resource schema.GroupResource) *chain {
	if s.cfg.Private(resource) {
		return nil
	}
	return s.current.Load().chain(resource)
}

type transformer struct {
	sealing  *Sealing
	resource schema.GroupResource
}

var _ value.Transformer = &transformer{}

// TransformFromStorage implements value.Transformer.
func (t *transformer) TransformFromStorage(ctx context.Context, data []byte, at value.Context) ([]byte, bool, error) {
	own, chain := t.sealing.cfg.Own, t.sealing.chain(t.resource)
	by := kubestore.SealedBy(data)
	switch {
	case by == "" && chain != nil:
		return data, !chain.clear, nil
	case by == "" && !t.sealing.cfg.Sealed[t.resource]:
		return data, false, nil
	case by == "" || bytes.HasPrefix(data, []byte(kubestore.SealPrefix)):
		out, stale, err := own.TransformFromStorage(ctx, data, at)
		if err != nil {
			return nil, false, fmt.Errorf("%s sealed by %s: %w", t.resource, by, err)
		}
		return out, stale || chain != nil || !t.sealing.cfg.Sealed[t.resource], nil
	case chain == nil || !slices.ContainsFunc(chain.prefixes, func(p string) bool { return bytes.HasPrefix(data, []byte(p)) }):
		return nil, false, t.unknown(by)
	}
	out, stale, err := chain.transformer.TransformFromStorage(ctx, data, at)
	if err != nil {
		return nil, false, fmt.Errorf("%s sealed by %s: the provider of that name in %s does not open it: %w", t.resource, by, t.sealing.cfg.File, err)
	}
	return out, stale, nil
}

// unknown is the error of a value of a provider that this server does not have.
func (t *transformer) unknown(by string) error {
	file := t.sealing.cfg.File
	if file == "" {
		return fmt.Errorf("%s sealed by %s of an EncryptionConfiguration, and this server has none: give it --encryption-provider-config with the file of the other servers", t.resource, by)
	}
	return fmt.Errorf("%s sealed by %s, which %s has no provider for under this resource: put the provider back below the others until all is sealed anew, and give all servers the same file", t.resource, by, file)
}

// TransformToStorage implements value.Transformer.
func (t *transformer) TransformToStorage(ctx context.Context, data []byte, at value.Context) ([]byte, error) {
	if chain := t.sealing.chain(t.resource); chain != nil {
		return chain.transformer.TransformToStorage(ctx, data, at)
	}
	if t.sealing.cfg.Sealed[t.resource] {
		return t.sealing.cfg.Own.TransformToStorage(ctx, data, at)
	}
	return data, nil
}

// Key is what some resources are written with.
type Key struct {
	// Resources are as the file names them.
	Resources []string
	Provider  string // identity, aesgcm, aescbc, secretbox, kms
	// ID is the key's name; of kms the provider's name and a hash of its key's id.
	ID string
	// Err is why there is no key to write with now.
	Err string
}

// String is the key in a line.
func (k Key) String() string {
	what := k.Provider
	if k.ID != "" {
		what += " " + k.ID
	}
	if k.Err != "" {
		what += " (" + k.Err + ")"
	}
	return strings.Join(k.Resources, ",") + ": " + what
}

func keysText(keys []Key) string {
	var lines []string
	for _, k := range keys {
		k.Err = "" // which comes and goes
		lines = append(lines, k.String())
	}
	return strings.Join(lines, "; ")
}
