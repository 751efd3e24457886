package podnetwork

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/clusterd/clusterd/apis/names"
	"github.com/clusterd/clusterd/apis/paths"
	"github.com/clusterd/clusterd/netsetup/overlay"
	"github.com/clusterd/clusterd/netsetup/wireguard"
)

// Encryption of what pods send to other nodes. Each node makes itself a key, and
// tells the others its public part and its port in an annotation of its own Node,
// which no other node may write. A node of whom there is no such word is sent
// nothing, and nothing is taken from it.

// keyFile is below Config.KeyDir: the node's private key, which never leaves it.
const keyFile = "wireguard.json"

// nodeKeys are what nodes say of their WireGuard, by their names.
type nodeKeys map[string]nodeKey

type nodeKey struct {
	wireguard.Public
	fault string // why there is no key to be used, "": there is
}

// keysOf reads them. A key that two nodes name is this node's, or else that of the
// older one: no node takes another's place by naming its key. Pure.
func keysOf(self string, nodes []*v1.Node) nodeKeys {
	byAge := slices.SortedFunc(slices.Values(nodes), func(a, b *v1.Node) int {
		return cmp.Or(own(self, a)-own(self, b), a.CreationTimestamp.Compare(b.CreationTimestamp.Time), strings.Compare(a.Name, b.Name))
	})
	out, holders := nodeKeys{}, map[wireguard.Key]string{}
	for _, node := range byAge {
		text, announced := node.Annotations[names.WireGuard]
		if !announced {
			out[node.Name] = nodeKey{fault: "it has no WireGuard key: its clusterd does not encrypt, its kernel has no WireGuard, or it has just started"}
			continue
		}
		p, err := wireguard.ParsePublic(text)
		switch holder := holders[p.Key]; {
		case err != nil:
			out[node.Name] = nodeKey{fault: fmt.Sprintf("its annotation %s is of no use: %v", names.WireGuard, err)}
		case holder != "":
			out[node.Name] = nodeKey{fault: fmt.Sprintf("it names the WireGuard key of %s", holder)}
		default:
			out[node.Name], holders[p.Key] = nodeKey{Public: p}, node.Name
		}
	}
	return out
}

// own sorts this node before all others.
func own(self string, n *v1.Node) int {
	if n.Name == self {
		return 0
	}
	return 1
}

// inClear are the keys for a node that does not encrypt: none, and a fault for each
// node that does.
func (k nodeKeys) inClear() nodeKeys {
	out := nodeKeys{}
	for name, key := range k {
		if key.Key != (wireguard.Key{}) {
			out[name] = nodeKey{fault: "it encrypts what pods send, this node does not"}
		}
	}
	return out
}

// guardClear sees to it, before there are pods, that nothing passes in clear which is
// to be encrypted, and adds this node's key to what the nodes are. An error of telling
// it to the others keeps nothing from going on: they send nothing until they know.
func (n *Network) guardClear(ctx context.Context, nodes []*v1.Node, between *overlay.Nodes) (unpublished, err error) {
	announced := ""
	for _, node := range nodes {
		if node.Name == n.cfg.NodeName {
			announced = node.Annotations[names.WireGuard]
		}
	}
	if !n.cfg.Encrypt {
		if announced != "" {
			unpublished = n.tellKey(ctx, nil)
		}
		return unpublished, nil
	}
	key, err := wireguard.EnsureKey(filepath.Join(cmp.Or(n.cfg.KeyDir, n.cfg.Dir), keyFile), n.cfg.KeyAge, time.Now())
	if err != nil {
		n.block("NoWireGuardKey", err)
		return nil, err
	}
	public := wireguard.Public{Key: key.Key.PublicKey(), Port: overlay.DefaultWireGuardPort}.String()
	// The others go over to another key when they read of it. So does this node,
	// that no more than a handshake is between.
	between.Key, between.Hold = key.Key, announced != public
	if err := n.routes.Guard(*between); err != nil {
		if !errors.Is(err, overlay.ErrNoWireGuard) {
			n.block("NoWireGuard", err)
			return nil, err
		}
		err = fmt.Errorf("pod traffic is to be encrypted: %w", err)
		n.block("NoWireGuard", err)
		if announced != "" {
			unpublished = n.tellKey(ctx, nil)
		}
		// Pods of before get to no other node, and no packet to them.
		return nil, errors.Join(err, n.routes.Set(ctx, *between), unpublished)
	}
	n.block("", nil)
	if announced != public {
		unpublished = n.tellKey(ctx, &public)
	}
	return unpublished, nil
}

// block makes the node not ready for pods, with an event when that is news; nil: it
// is ready as far as this is concerned.
func (n *Network) block(reason string, err error) {
	why := ""
	if err != nil {
		why = err.Error()
	}
	n.mu.Lock()
	news := why != n.blocked
	n.blocked = why
	n.mu.Unlock()
	if news && why != "" {
		n.cfg.Blocked(reason, why)
	}
}

// tellKey writes the annotation, or takes it away.
func (n *Network) tellKey(ctx context.Context, value *string) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"annotations": map[string]*string{names.WireGuard: value}}})
	if err == nil {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		_, err = n.cfg.Client.CoreV1().Nodes().Patch(ctx, n.cfg.NodeName, types.MergePatchType, patch, metav1.PatchOptions{})
	}
	if err != nil {
		return fmt.Errorf("annotation %s of this node: %w", names.WireGuard, err)
	}
	return nil
}

// tellTunnel adds to the path what is known of its encryption.
func (k nodeKey) tellTunnel(p *paths.Path, links map[wireguard.Key]wireguard.Link, now time.Time) {
	p.KeyFault = k.fault
	l, there := links[k.Key]
	if !there {
		return
	}
	t := &paths.Tunnel{Endpoint: l.Endpoint.String(), Handshake: -1, Received: l.Received, Sent: l.Sent}
	if !l.Handshake.IsZero() {
		t.Handshake = max(now.Sub(l.Handshake).Seconds(), 0)
	}
	p.WireGuard = t
}

// tunnels are the peers of WireGuard by their keys.
func (n *Network) tunnels() map[wireguard.Key]wireguard.Link {
	out := map[wireguard.Key]wireguard.Link{}
	list, err := n.routes.Links()
	if err != nil {
		n.cfg.Logger.Debug("WireGuard does not say how its peers are", "err", err)
	}
	for _, l := range list {
		out[l.Key] = l
	}
	return out
}
