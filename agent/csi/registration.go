package csi

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/agent/plugin"
)

// maxDriverName is how long a CSI driver's name may be, by the specification.
const maxDriverName = 63

// drivers are those that have registered: a plugin.Handler.
type drivers struct {
	node *nodeObject

	mu     sync.Mutex // guards all below
	byName map[string]*driver
	closed bool
}

// get is the driver of the name, nil: there is none.
func (d *drivers) get(name string) *driver {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.byName[name]
}

func (d *drivers) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, one := range d.byName {
		_ = one.conn.Close()
	}
	d.byName, d.closed = nil, true
}

// Register takes a CSI driver, in the place of one that had its name.
func (d *drivers) Register(ctx context.Context, p plugin.Info) error {
	one, err := d.take(ctx, p)
	if err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.closed {
		_ = one.conn.Close()
		return errors.New("the node's agent stops")
	}
	if before := d.byName[one.name]; before != nil {
		_ = before.conn.Close()
	}
	if d.byName == nil {
		d.byName = map[string]*driver{}
	}
	d.byName[one.name] = one
	klog.FromContext(ctx).Info("CSI driver has registered", "driver", one.name, "nodeID", one.nodeID)
	return nil
}

// Deregister forgets a driver, unless another has its name by now.
func (d *drivers) Deregister(p plugin.Info) {
	d.mu.Lock()
	defer d.mu.Unlock()
	one := d.byName[p.Name]
	if one == nil || one.socket != p.Socket {
		return
	}
	delete(d.byName, p.Name)
	_ = one.conn.Close()
	d.node.remove(p.Name)
	klog.Background().Info("CSI driver has gone", "driver", p.Name)
}

// Settled implements plugin.Handler.
func (d *drivers) Settled() { d.node.settle() }

// take checks what a driver says of itself and writes it into the node's
// objects.
func (d *drivers) take(ctx context.Context, p plugin.Info) (*driver, error) {
	if errs := validation.IsDNS1123Subdomain(strings.ToLower(p.Name)); len(errs) > 0 || len(p.Name) > maxDriverName {
		return nil, fmt.Errorf("name %q: not the name of a CSI driver: at most %d letters, digits, dots and hyphens", p.Name, maxDriverName)
	}
	if len(p.Versions) > 0 && !slices.ContainsFunc(p.Versions, func(v string) bool {
		return strings.HasPrefix(strings.TrimPrefix(v, "v"), "1.")
	}) {
		return nil, fmt.Errorf("driver %s speaks versions %q of CSI, this node 1", p.Name, p.Versions)
	}
	conn, err := plugin.Dial(p.Endpoint, callTimeout)
	if err != nil {
		return nil, err
	}
	one := &driver{name: p.Name, socket: p.Socket, conn: conn, node: spec.NewNodeClient(conn)}
	who, err := one.node.NodeGetInfo(ctx, &spec.NodeGetInfoRequest{})
	if err == nil && who.GetNodeId() == "" {
		err = errors.New("it names no node id")
	}
	if err != nil {
		_ = conn.Close()
		return nil, one.fault("NodeGetInfo", err)
	}
	one.nodeID = who.GetNodeId()
	if err := d.node.add(ctx, p.Name, who); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return one, nil
}
