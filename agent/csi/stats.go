package csi

import (
	"context"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protojson"
	"k8s.io/apimachinery/pkg/types"
)

// Usage is what a driver says of a volume.
type Usage struct {
	// Name is the pod's for the volume.
	Name string
	// Claim is "" for an inline volume.
	Claim string
	// Bytes and Inodes; a Total of 0 is not known.
	Bytes, Inodes struct{ Total, Available, Used int64 }
}

// statsTimeout bounds the question for one volume: a reader of statistics
// does not wait for a driver that is dead.
const statsTimeout = 5 * time.Second

// Usage asks the drivers about the volumes of a pod. Volumes whose drivers do
// not tell, or do not answer, are left out.
func (m *Manager) Usage(ctx context.Context, uid types.UID) []Usage {
	if m.load() != nil {
		return nil
	}
	var out []Usage
	for _, e := range m.entries(func(e *entry) bool { return e.UID == uid && e.Called && len(e.Publish) > 0 }) {
		if u, ok := m.usage(ctx, e); ok {
			out = append(out, u)
		}
	}
	return out
}

func (m *Manager) usage(ctx context.Context, e *entry) (Usage, bool) {
	ctx, cancel := context.WithTimeout(ctx, statsTimeout)
	defer cancel()
	out := Usage{Name: e.Name, Claim: e.Claim}
	driver := m.drivers.get(e.Driver)
	if driver == nil {
		return out, false
	}
	if can, err := driver.caps(ctx); err != nil || !can.stats {
		return out, false
	}
	call := &spec.NodePublishVolumeRequest{}
	if err := protojson.Unmarshal(e.Publish, call); err != nil {
		return out, false
	}
	r, err := driver.node.NodeGetVolumeStats(ctx, &spec.NodeGetVolumeStatsRequest{VolumeId: e.Handle, VolumePath: call.TargetPath, StagingTargetPath: call.StagingTargetPath})
	if err != nil {
		return out, false
	}
	for _, u := range r.GetUsage() {
		to := &out.Bytes
		switch u.GetUnit() {
		case spec.VolumeUsage_BYTES:
		case spec.VolumeUsage_INODES:
			to = &out.Inodes
		default:
			continue
		}
		to.Total, to.Available, to.Used = u.GetTotal(), u.GetAvailable(), u.GetUsed()
	}
	return out, true
}
