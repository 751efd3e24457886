package csi

import (
	"context"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protojson"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/slack"
)

// republish tells drivers whose objects ask for it again and again of what they
// have published: with tokens that are good, and for content that changes.
func (m *Manager) republish(ctx context.Context) {
	tick := slack.NewTicker(m.cfg.Republish)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		for _, e := range m.entries(func(e *entry) bool { return e.Called && len(e.Publish) > 0 }) {
			if err := m.republishOne(ctx, e.key()); err != nil && ctx.Err() == nil {
				klog.FromContext(ctx).Info("CSI driver keeps a volume's old content", "driver", e.Driver, "volume", e.Spec, "pod", e.Namespace+"/"+e.Pod, "err", err)
			}
		}
	}
}

func (m *Manager) republishOne(ctx context.Context, key recordKey) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	e := m.entry(key)
	if e == nil {
		return nil
	}
	object, err := m.object(ctx, e.Driver)
	if err != nil || !isTrue(object.Spec.RequiresRepublish) {
		return err
	}
	unlock, err := m.lock(ctx, e.volume())
	if err != nil {
		return err
	}
	defer unlock()
	if e = m.entry(key); e == nil {
		return nil // torn down meanwhile
	}
	driver := m.drivers.get(e.Driver)
	if driver == nil {
		return notRegistered(e.Driver)
	}
	call := &spec.NodePublishVolumeRequest{}
	if err := protojson.Unmarshal(e.Publish, call); err != nil {
		return err
	}
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: e.Namespace, Name: e.Pod, UID: e.UID}, Spec: v1.PodSpec{ServiceAccountName: e.Account}}
	return m.publish(ctx, driver, object, &e.record, pod, call)
}
