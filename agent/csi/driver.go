package csi

import (
	"context"
	"fmt"
	"strings"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// callTimeout bounds one call to a driver. The caller may give it less.
const callTimeout = 2 * time.Minute

// driver is a registered one.
type driver struct {
	name   string
	socket string // by which it registered
	nodeID string
	conn   *grpc.ClientConn
	node   spec.NodeClient
}

// caps are the abilities of a driver's node service that count here.
type caps struct {
	stage, stats, expand, multiWriter, mountGroup bool
}

func (d *driver) caps(ctx context.Context) (caps, error) {
	var out caps
	r, err := d.node.NodeGetCapabilities(ctx, &spec.NodeGetCapabilitiesRequest{})
	if err != nil {
		return out, d.fault("NodeGetCapabilities", err)
	}
	for _, c := range r.GetCapabilities() {
		switch c.GetRpc().GetType() {
		case spec.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME:
			out.stage = true
		case spec.NodeServiceCapability_RPC_GET_VOLUME_STATS:
			out.stats = true
		case spec.NodeServiceCapability_RPC_EXPAND_VOLUME:
			out.expand = true
		case spec.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER:
			out.multiWriter = true
		case spec.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP:
			out.mountGroup = true
		}
	}
	return out, nil
}

// fault names the driver and the call in an error.
func (d *driver) fault(call string, err error) error {
	switch st := status.Convert(err); st.Code() {
	case codes.Unavailable:
		return fmt.Errorf("CSI driver %s does not answer %s: %w", d.name, call, err)
	case codes.DeadlineExceeded:
		return fmt.Errorf("CSI driver %s has not answered %s in time: %w", d.name, call, err)
	default:
		return fmt.Errorf("CSI driver %s: %s: %w", d.name, call, err)
	}
}

// checkName refuses names that would lead out of a directory.
func checkName(what, name string) error {
	if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00") {
		return fmt.Errorf("%s %q: not a name of a folder", what, name)
	}
	return nil
}
