package dra

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	dra "k8s.io/kubelet/pkg/apis/dra/v1"
)

// Prepare has the drivers prepare the claims of a pod. What is prepared already
// needs neither API nor driver. It can be called again after whatever went
// wrong.
func (m *Manager) Prepare(ctx context.Context, pod *v1.Pod) error {
	if err := m.load(); err != nil {
		return err
	}
	claims, err := wantedBy(pod)
	if err != nil {
		return err
	}
	var fresh []*record
	var uids []types.UID
	for _, w := range claims {
		if r := m.byName(pod.Namespace, w.name); has(r, pod.UID) && r.prepared() {
			continue
		}
		claim, err := m.fetch(ctx, pod, w)
		if err != nil {
			return err
		}
		r := newRecord(claim)
		if err := m.registered(r); err != nil {
			return err
		}
		if !slices.Contains(uids, r.UID) {
			fresh, uids = append(fresh, r), append(uids, r.UID)
		}
	}
	if len(fresh) == 0 {
		return nil
	}
	unlock, err := m.lock(ctx, uids)
	if err != nil {
		return err
	}
	defer unlock()
	return m.prepare(ctx, pod.UID, fresh)
}

// registered says which driver of a claim that has something to do is missing.
func (m *Manager) registered(r *record) error {
	for _, name := range slices.Sorted(maps.Keys(r.Drivers)) {
		if !r.Drivers[name].Prepared && m.drivers.get(name) == nil {
			return notRegistered(r.Name, name)
		}
	}
	return nil
}

// prepare has claims prepared for a pod. The caller holds their locks.
func (m *Manager) prepare(ctx context.Context, pod types.UID, fresh []*record) error {
	batches := map[string][]*record{}
	for _, r := range fresh {
		if before := m.get(r.UID); before != nil {
			if !before.allocatedAs(r) {
				return fmt.Errorf("ResourceClaim %s: devices that it had before it was allocated anew are still prepared for other pods: it is waited until they are taken back", r.Name)
			}
			r = before.clone()
		} else if other := m.byName(r.Namespace, r.Name); other != nil {
			return fmt.Errorf("ResourceClaim %s: one of that name and UID %s, which was deleted, is still prepared for other pods: it is waited until it is taken back", r.Name, other.UID)
		} else if err := m.taken(r); err != nil {
			return err
		}
		if !slices.Contains(r.Pods, pod) {
			r.Pods = append(r.Pods, pod)
		}
		for name, s := range r.Drivers {
			if !s.Prepared {
				s.Called = true
				r.Drivers[name] = s
				batches[name] = append(batches[name], r)
			}
		}
		if err := m.keep(r); err != nil {
			return err
		}
	}
	return m.each(batches, func(driver string, claims []*record) error {
		one := m.drivers.get(driver)
		if one == nil {
			return notRegistered(claims[0].Name, driver)
		}
		answers, err := one.prepare(ctx, messages(claims))
		if err != nil {
			return fmt.Errorf("ResourceClaim %s: %w", names(claims), err)
		}
		var errs []error
		for _, r := range claims {
			answer, ok := answers[string(r.UID)]
			switch {
			case !ok:
				errs = append(errs, fmt.Errorf("ResourceClaim %s: driver %s: NodePrepareResources said nothing of it", r.Name, driver))
			case answer.GetError() != "":
				errs = append(errs, fmt.Errorf("ResourceClaim %s: driver %s: NodePrepareResources: %s", r.Name, driver, answer.GetError()))
			default:
				errs = append(errs, m.change(r.UID, driver, func(s *share) { s.Prepared, s.Devices = true, devicesOf(answer) }))
			}
		}
		return errors.Join(errs...)
	})
}

// devicesOf reads a driver's answer.
func devicesOf(answer *dra.NodePrepareResourceResponse) []device {
	var out []device
	for _, d := range answer.GetDevices() {
		out = append(out, device{Requests: d.GetRequestNames(), Pool: d.GetPoolName(), Name: d.GetDeviceName(), Share: d.GetShareId(), CDI: d.GetCdiDeviceIds()})
	}
	return out
}

// each calls fn for every driver, all at once: one that hangs holds up nothing
// of another.
func (m *Manager) each(batches map[string][]*record, fn func(driver string, claims []*record) error) error {
	var wg sync.WaitGroup
	names := slices.Sorted(maps.Keys(batches))
	errs := make([]error, len(names))
	for i, name := range names {
		wg.Go(func() { errs[i] = fn(name, batches[name]) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// change writes what one driver has done to a claim whose lock is held. Drivers
// of one claim answer at the same time.
func (m *Manager) change(claim types.UID, driver string, fn func(*share)) error {
	unlock, err := m.busy.Lock(context.Background(), "record/"+string(claim))
	if err != nil {
		return err
	}
	defer unlock()
	r := m.get(claim).clone()
	s := r.Drivers[driver]
	fn(&s)
	r.Drivers[driver] = s
	return m.keep(r)
}

// messages are claims as drivers receive them.
func messages(claims []*record) []*dra.Claim {
	var out []*dra.Claim
	for _, r := range claims {
		out = append(out, &dra.Claim{Namespace: r.Namespace, Uid: string(r.UID), Name: r.Name})
	}
	return out
}

// names are those of claims, for an error.
func names(claims []*record) string {
	out := ""
	for i, r := range claims {
		if i > 0 {
			out += ", "
		}
		out += r.Name
	}
	return out
}

// Unprepare has the drivers take back what was prepared for the pod and is used
// by no other pod of the node. It can be called again after it failed half-way.
func (m *Manager) Unprepare(ctx context.Context, pod types.UID) error {
	if err := m.load(); err != nil {
		return err
	}
	var uids []types.UID
	for _, r := range m.usedBy(pod) {
		uids = append(uids, r.UID)
	}
	if len(uids) == 0 {
		return nil
	}
	unlock, err := m.lock(ctx, uids)
	if err != nil {
		return err
	}
	defer unlock()
	batches := map[string][]*record{}
	var last []*record
	for _, uid := range uids {
		r := m.get(uid)
		if !has(r, pod) {
			continue
		}
		if len(r.Pods) > 1 {
			r = r.clone()
			r.Pods = slices.DeleteFunc(r.Pods, func(u types.UID) bool { return u == pod })
			if err := m.keep(r); err != nil {
				return err
			}
			continue
		}
		last = append(last, r)
		// Whatever becomes of the calls: who uses the claim next has it prepared again.
		if asked := r.clone(); asked.forget() {
			if err := m.keep(asked); err != nil {
				return err
			}
		}
		for name, s := range r.Drivers {
			if s.Called && s.Unprepares {
				batches[name] = append(batches[name], r)
			}
		}
	}
	err = m.each(batches, func(driver string, claims []*record) error {
		one := m.drivers.get(driver)
		if one == nil {
			return fmt.Errorf("ResourceClaim %s: driver %s is not registered on this node and has to take back what it has prepared: run its node plugin here again", names(claims), driver)
		}
		done, err := one.unprepare(ctx, messages(claims))
		for _, uid := range done {
			err = errors.Join(err, m.change(types.UID(uid), driver, func(s *share) { s.Called, s.Prepared, s.Devices = false, false, nil }))
		}
		return err
	})
	if err != nil {
		return err
	}
	for _, r := range last {
		if err := m.drop(r.UID); err != nil {
			return err
		}
	}
	return nil
}
