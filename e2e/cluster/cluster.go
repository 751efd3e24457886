// Package cluster makes whole clusters to test against and to show: the same
// harness runs the demo, the tests and the benchmarks. A runner decides what a
// machine is; the netns runner here makes one of a network namespace, a data
// folder and a cgroup of its own.
package cluster

import (
	"context"
	"io"
	"net/netip"
	"os/exec"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
)

// Node is one machine of a cluster.
type Node struct {
	Name       string     `json:"name"`
	Addr       netip.Addr `json:"addr"`
	Addr6      netip.Addr `json:"addr6,omitzero"`  // of the second family, if it has one
	Moved      bool       `json:"moved,omitempty"` // it joined with another address
	Agent      bool       `json:"agent,omitempty"` // it has no API of its own
	Far        bool       `json:"far,omitempty"`   // a router is between it and the others
	Data       string     `json:"data"`            // its data directory
	CgroupRoot string     `json:"cgroupRoot"`      // parent of its pods' cgroups
}

// Kubeconfig is the administrator's, leading to this node.
func (n Node) Kubeconfig() string { return n.Data + "/admin.kubeconfig" }

// Cluster is a running cluster and the faults that can befall it. Its methods
// may be called concurrently for different nodes.
type Cluster interface {
	// Nodes in the order they joined.
	Nodes() []Node
	// Client speaks to the API of one node.
	Client(node string) (kubernetes.Interface, *rest.Config, error)

	// Kill ends clusterd on the node at once (SIGKILL); containers go on.
	Kill(node string) error
	// Stop ends clusterd on the node in order (SIGTERM); containers go on.
	Stop(ctx context.Context, node string) error
	// Start starts clusterd on the node again.
	Start(ctx context.Context, node string) error
	// Pause and Resume freeze and thaw clusterd on the node.
	Pause(node string) error
	Resume(node string) error
	// PowerOff ends everything that runs on the node at once: clusterd, podmon
	// and every container.
	PowerOff(node string) error
	// Partition cuts the node's link to all others, Heal restores it.
	Partition(node string) error
	Heal(node string) error

	// Pid is the process of clusterd on the node.
	Pid(node string) (int, error)
	// Logs are what clusterd wrote on the node since it was made.
	Logs(node string) (io.ReadCloser, error)
	// Exec prepares a command that runs in the node's network.
	Exec(ctx context.Context, node string, name string, args ...string) *exec.Cmd

	// Down ends the cluster and removes all of it.
	Down(ctx context.Context) error
}
