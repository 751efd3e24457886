package csi

import (
	"context"
	"sync"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protojson"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/slack"
)

// republish tells drivers whose objects ask for it again and again of what they
// have published: with tokens that are good, and for content that changes. One that
// does not answer holds up itself alone.
func (m *Manager) republish(ctx context.Context) {
	tick := slack.NewTicker(m.cfg.Republish)
	defer tick.Stop()
	var rounds rounds
	defer rounds.wg.Wait()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		drivers := map[string][]*entry{}
		for _, e := range m.entries(func(e *entry) bool { return e.Called && len(e.Publish) > 0 }) {
			drivers[e.Driver] = append(drivers[e.Driver], e)
		}
		for driver, entries := range drivers {
			rounds.begin(driver, func() {
				for _, e := range entries {
					if err := m.republishOne(ctx, e.key()); err != nil && ctx.Err() == nil {
						klog.FromContext(ctx).Info("CSI driver keeps a volume's old content", "driver", e.Driver, "volume", e.Spec, "pod", e.Namespace+"/"+e.Pod, "err", err)
					}
				}
			})
		}
	}
}

// rounds are calls of drivers, side by side; the zero value has none.
type rounds struct {
	wg sync.WaitGroup
	mu sync.Mutex // guards at
	at map[string]bool
}

// begin calls the driver, unless a call of it is under way.
func (r *rounds) begin(driver string, call func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.at[driver] {
		return
	}
	if r.at == nil {
		r.at = map[string]bool{}
	}
	r.at[driver] = true
	r.wg.Go(func() {
		call()
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.at, driver)
	})
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
