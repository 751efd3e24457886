package alloc

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/util/dryrun"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/apis/core"
)

// releaseTimeout bounds the release of an address, which outlives the request
// that caused it: a client that goes away must not leave it reserved.
const releaseTimeout = 10 * time.Second

// Attach makes the store of Services give each Service the cluster addresses and
// the node ports that it needs, and take them back.
func Attach(services *registry.Store, f *Families, p *Ports) {
	services.BeginCreate = func(ctx context.Context, obj runtime.Object, options *metav1.CreateOptions) (registry.FinishFunc, error) {
		service, dry := obj.(*corev1.Service), dryrun.IsDryRun(options.DryRun)
		return both(ctx,
			func() (registry.FinishFunc, error) { return f.begin(ctx, service, nil, dry) },
			func() (registry.FinishFunc, error) { return p.begin(ctx, service, nil, dry) })
	}
	services.BeginUpdate = func(ctx context.Context, obj, old runtime.Object, options *metav1.UpdateOptions) (registry.FinishFunc, error) {
		service, before, dry := obj.(*corev1.Service), old.(*corev1.Service), dryrun.IsDryRun(options.DryRun)
		if service.UID == "" { // the library fills it in later: what is reserved now is reserved for this object
			service.UID = before.UID
		}
		core.KeepGiven(&service.Spec, &before.Spec) // what is not mentioned is not to be allocated again
		return both(ctx,
			func() (registry.FinishFunc, error) { return f.begin(ctx, service, before, dry) },
			func() (registry.FinishFunc, error) { return p.begin(ctx, service, before, dry) })
	}
	// Before this hook an update may still fail: what it dropped is kept so long.
	services.AfterUpdate = func(obj runtime.Object, options *metav1.UpdateOptions) {
		if !dryrun.IsDryRun(options.DryRun) {
			f.updated(context.Background(), obj.(*corev1.Service)) // the hook is given no context
			p.updated(context.Background(), obj.(*corev1.Service))
		}
	}
	services.AfterDelete = func(obj runtime.Object, options *metav1.DeleteOptions) {
		if dryrun.IsDryRun(options.DryRun) {
			return
		}
		service := obj.(*corev1.Service)
		f.release(context.Background(), service, service.Spec.ClusterIPs)
		for port := range needed(service) {
			p.release(context.Background(), port, ownerOfService(service))
		}
	}
}

// both begins two things; when the second fails the first is undone.
func both(ctx context.Context, first, second func() (registry.FinishFunc, error)) (registry.FinishFunc, error) {
	one, err := first()
	if err != nil {
		return nil, err
	}
	two, err := second()
	if err != nil {
		one(ctx, false)
		return nil, err
	}
	return func(ctx context.Context, success bool) {
		two(ctx, success)
		one(ctx, success)
	}, nil
}

// hadAddresses are what Services had before the updates under way. Safe for
// concurrent use.
type hadAddresses struct {
	mu sync.Mutex // guards by
	by map[types.UID][]string
}

func (h *hadAddresses) put(uid types.UID, addresses []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.by[uid] = addresses
}

func (h *hadAddresses) take(uid types.UID) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	addresses := h.by[uid]
	delete(h.by, uid)
	return addresses
}

// begin reserves what service needs and old, which may be nil, has not, and writes
// it into its spec. If the write of service then fails, the reservation is given
// back.
func (f *Families) begin(ctx context.Context, service, old *corev1.Service, dry bool) (registry.FinishFunc, error) {
	nothing := func(context.Context, bool) {}
	spec := &service.Spec
	if err := f.external(ctx, service, old); err != nil {
		return nil, err
	}
	if spec.Type == corev1.ServiceTypeExternalName {
		// One that becomes so keeps its reservation: it is taken back as any that no
		// Service holds.
		return nothing, nil
	}
	var had *corev1.ServiceSpec
	if old != nil && old.Spec.Type != corev1.ServiceTypeExternalName {
		had = &old.Spec
	}
	if faults := f.settle(spec, had); len(faults) > 0 {
		return nil, invalid(service, faults...)
	}
	if spec.ClusterIP == corev1.ClusterIPNone {
		return nothing, nil
	}
	addresses, got, err := f.choose(ctx, service, had, dry)
	back := func(ctx context.Context) { f.release(ctx, service, got) }
	if err != nil {
		back(ctx)
		return nil, err
	}
	spec.ClusterIP, spec.ClusterIPs = addresses[0], addresses
	if had != nil && !dry && len(had.ClusterIPs) > len(addresses) {
		f.had.put(service.UID, had.ClusterIPs)
	}
	return func(ctx context.Context, success bool) {
		if !success && !dry {
			f.had.take(service.UID)
			back(ctx)
		}
	}, nil
}

// external refuses external addresses out of the Services' ranges, but for those that
// old, which may be nil, had: packets for an address that another Service has, or gets
// later, would go to this one's pods.
func (f *Families) external(ctx context.Context, service, old *corev1.Service) error {
	// Equal ones are looked at once, and all are compared with the ranges as they were
	// read once: how many there are is validated later.
	seen := map[string]bool{}
	if old != nil {
		for _, text := range old.Spec.ExternalIPs {
			seen[text] = true
		}
	}
	var all []span
	var errs field.ErrorList
	for i, text := range service.Spec.ExternalIPs {
		addr, err := netip.ParseAddr(text)
		if err != nil || seen[text] {
			continue // validation says so
		}
		if seen[text] = true; all == nil {
			for _, family := range f.order {
				spans, err := f.by[family].spans(ctx)
				if err != nil {
					return err
				}
				all = append(all, spans...)
			}
		}
		for _, s := range all {
			if s.cidr.Contains(addr.Unmap()) {
				errs = append(errs, field.Invalid(field.NewPath("spec", "externalIPs").Index(i), text, fmt.Sprintf("is in %s, the range of cluster addresses: name an address outside of it", s.cidr)))
			}
		}
	}
	if len(errs) > 0 {
		return invalid(service, errs...)
	}
	return nil
}

// choose reserves an address of each family of service, but for those it has
// already; got are those that are new.
func (f *Families) choose(ctx context.Context, service *corev1.Service, had *corev1.ServiceSpec, dry bool) (all, got []string, err error) {
	for i, family := range service.Spec.IPFamilies {
		text := ""
		if i < len(service.Spec.ClusterIPs) {
			text = service.Spec.ClusterIPs[i]
		}
		if text != "" && had != nil && slices.Contains(had.ClusterIPs, text) {
			all = append(all, text)
			continue
		}
		a := f.by[family]
		if a == nil { // the cluster had it once
			return nil, got, invalid(service, field.Invalid(field.NewPath("spec", "ipFamilies").Index(i), family, "not configured on this cluster"))
		}
		address, err := a.choose(ctx, text, ownerOfService(service), dry)
		switch {
		case errors.Is(err, ErrTaken), errors.Is(err, ErrOutside):
			return nil, got, invalid(service, field.Invalid(field.NewPath("spec", "clusterIPs"), service.Spec.ClusterIPs, fmt.Sprintf("failed to allocate IP %s: %v", text, err)))
		case errors.Is(err, ErrFull):
			return nil, got, apierrors.NewInternalError(fmt.Errorf("failed to allocate a serviceIP: %w", err))
		case err != nil:
			return nil, got, err
		}
		all = append(all, address.String())
		if !dry {
			got = append(got, address.String())
		}
	}
	return all, got, nil
}

// updated gives back what an update took from its Service.
func (f *Families) updated(ctx context.Context, service *corev1.Service) {
	dropped := slices.DeleteFunc(slices.Clone(f.had.take(service.UID)), func(a string) bool { return slices.Contains(service.Spec.ClusterIPs, a) })
	f.release(ctx, service, dropped)
}

// choose reserves the address of that text, or any if it is empty. A dry run
// reserves nothing: what it shows is an example.
func (a *Addresses) choose(ctx context.Context, text string, owner Owner, dry bool) (netip.Addr, error) {
	if text == "" {
		if dry {
			return a.span.at(a.span.static), nil
		}
		return a.TakeAny(ctx, owner)
	}
	address, err := netip.ParseAddr(text) // validation has let it pass
	if err != nil {
		return netip.Addr{}, fmt.Errorf("%w: %w", ErrOutside, err)
	}
	if dry {
		if err := a.check(ctx, address, owner); err != nil {
			return address, err
		}
		return address, a.leases.try(ctx, address.String(), owner)
	}
	return address, a.Take(ctx, address, owner)
}

func invalid(service *corev1.Service, faults ...*field.Error) error {
	return apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("Service").GroupKind(), service.Name, faults)
}

func ownerOfService(service *corev1.Service) Owner {
	return Owner{Namespace: service.Namespace, Name: service.Name, UID: service.UID}
}

// release gives addresses back, unless service turns out to be stored with them: a
// write whose outcome is unknown may have happened. A release that fails is made up
// for by the next allocation of the address.
func (f *Families) release(ctx context.Context, service *corev1.Service, addresses []string) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	owner := ownerOfService(service)
	for _, text := range addresses {
		address, err := netip.ParseAddr(text)
		if err != nil {
			continue // it had none
		}
		a := f.by[f.order[0]] // any: the leases of all are in one place
		held, err := a.holds(ctx, owner, address)
		if err == nil && !held {
			err = a.Release(ctx, address, owner)
		}
		if err != nil {
			klog.FromContext(ctx).Info("Cluster address stays reserved until it is wanted", "address", address, "service", owner, "err", err)
		}
	}
}
