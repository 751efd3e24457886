package main

import (
	"context"
	"crypto"
	"crypto/hkdf"
	"crypto/sha256"
	"crypto/x509"
	"fmt"
	"os"

	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/agent/checkpoint"
	"github.com/clusterd/clusterd/agent/netpol"
	"github.com/clusterd/clusterd/agent/service"
	"github.com/clusterd/clusterd/agent/watches"
	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
)

// checkpointDir has the records of what runs on the node.
const checkpointDir = "checkpoint"

// checkpointKey encrypts the records; it follows from the node's key. So they are as
// secret as that key: where it lies in clear they open to whoever has the data
// directory, where it is sealed they open with the sealing key alone.
func checkpointKey(node crypto.Signer) ([]byte, error) {
	der, err := x509.MarshalPKCS8PrivateKey(node)
	if err != nil {
		return nil, fmt.Errorf("key of the node's records: %w", err)
	}
	return hkdf.Key(sha256.New, der, nil, "clusterd checkpoint v1", checkpoint.KeySize)
}

// newCheckpoint makes what keeps the node's pods able to start without the API, and
// puts it before the node's clients; nil: that is turned off, and nothing is kept.
func newCheckpoint(ctx context.Context, cfg Config, clients *nodeClients) (*checkpoint.Keeper, error) {
	dir := nodedir.Dir(cfg.Data).Path(checkpointDir)
	if cfg.StartWithoutAPIAfter.Duration == 0 {
		if err := os.RemoveAll(dir); err != nil {
			return nil, fmt.Errorf("remove the records of pods: %w", err)
		}
		return nil, nil
	}
	key, err := checkpointKey(clients.key)
	if err != nil {
		return nil, err
	}
	store, err := checkpoint.Open(dir, key)
	if err != nil {
		return nil, err
	}
	gate := checkpoint.NewGate(cfg.Name)
	clients.agent, clients.network, clients.heartbeat = rest.CopyConfig(clients.agent), rest.CopyConfig(clients.network), rest.CopyConfig(clients.heartbeat)
	clients.agent.Wrap(gate.Wrap)
	clients.network.Wrap(gate.WrapOther)
	clients.heartbeat.Wrap(gate.WrapHeartbeat)
	return checkpoint.NewKeeper(ctx, checkpoint.Config{Store: store, Gate: gate, NodeName: cfg.Name, After: cfg.StartWithoutAPIAfter.Duration, MaxAge: cfg.StartWithoutAPIMaxAge.Duration}), nil
}

// followCluster keeps what the node's network follows of the cluster.
func followCluster(kept *checkpoint.Keeper, seen *watches.Watches, policies *netpol.Manager, services *service.Proxy) error {
	if kept == nil {
		return nil
	}
	informers := policies.Informers()
	informers["Service"], informers["EndpointSlice"], informers["Node"] = seen.Services, seen.Slices, seen.Nodes
	informers["ServiceCIDR"] = services.CIDRs()
	for kind, informer := range informers {
		// Pods and namespaces are watched from the first policy on.
		optional := kind == "Pod" || kind == "Namespace" || kind == "ServiceCIDR"
		if err := kept.Follow(kind, informer, optional); err != nil {
			return err
		}
	}
	return nil
}
