package main

import (
	"fmt"
	"log/slog"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/clusterd/clusterd/agent/netpol"
	"github.com/clusterd/clusterd/agent/static"
	"github.com/clusterd/clusterd/netsetup/nft"
	"github.com/clusterd/clusterd/netsetup/policy"
)

// newPolicies opens what puts network policies into force on this node. closing
// gives the sockets back; the rules stay. repaired is called when others' changes
// of the rules were undone, fault as netpol.Config says.
func newPolicies(cfg Config, log *slog.Logger, client kubernetes.Interface, attached func(types.UID) bool, running func() []*v1.Pod, repaired func(table, what string), fault func(changed []string, err error)) (_ *netpol.Manager, closing func(), err error) {
	tables, err := nft.OpenTables()
	if err != nil {
		return nil, nil, fmt.Errorf("open the rules of network policies: %w", err)
	}
	closing = func() { _ = tables.Close() }
	manager, err := netpol.New(netpol.Config{NodeName: cfg.Name, Client: client, Enforcer: policy.New(policy.Config{Kernel: tables, Logger: log, Repaired: repaired}), Static: static.IsUID, Attached: attached, Running: running, Fault: fault, Logger: log})
	if err != nil {
		closing()
		return nil, nil, err
	}
	return manager, closing, nil
}

// removePolicies takes back what network policies left in the kernel.
func removePolicies() error {
	tables, err := nft.OpenTables()
	if err != nil {
		return err
	}
	defer func() { _ = tables.Close() }()
	return policy.New(policy.Config{Kernel: tables}).CleanUp()
}
