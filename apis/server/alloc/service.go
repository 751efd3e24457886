package alloc

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/util/dryrun"
	"k8s.io/klog/v2"
)

// releaseTimeout bounds the release of an address, which outlives the request
// that caused it: a client that goes away must not leave it reserved.
const releaseTimeout = 10 * time.Second

// Attach makes the store of Services give each Service the cluster address and
// the node ports that it needs, and take them back.
func Attach(services *registry.Store, a *Addresses, p *Ports) {
	services.BeginCreate = func(ctx context.Context, obj runtime.Object, options *metav1.CreateOptions) (registry.FinishFunc, error) {
		service, dry := obj.(*corev1.Service), dryrun.IsDryRun(options.DryRun)
		return both(ctx,
			func() (registry.FinishFunc, error) { return a.begin(ctx, service, dry) },
			func() (registry.FinishFunc, error) { return p.begin(ctx, service, nil, dry) })
	}
	services.BeginUpdate = func(ctx context.Context, obj, old runtime.Object, options *metav1.UpdateOptions) (registry.FinishFunc, error) {
		service, dry := obj.(*corev1.Service), dryrun.IsDryRun(options.DryRun)
		return both(ctx,
			func() (registry.FinishFunc, error) {
				// A Service that becomes an ExternalName keeps its reservation: it is
				// taken back as any that no Service holds.
				if old.(*corev1.Service).Spec.Type != corev1.ServiceTypeExternalName {
					return func(context.Context, bool) {}, nil
				}
				return a.begin(ctx, service, dry)
			},
			func() (registry.FinishFunc, error) { return p.begin(ctx, service, old.(*corev1.Service), dry) })
	}
	// Before this hook an update may still fail: what it dropped is kept so long.
	services.AfterUpdate = func(obj runtime.Object, options *metav1.UpdateOptions) {
		if !dryrun.IsDryRun(options.DryRun) {
			p.updated(context.TODO(), obj.(*corev1.Service)) // the hook is given no context
		}
	}
	services.AfterDelete = func(obj runtime.Object, options *metav1.DeleteOptions) {
		if dryrun.IsDryRun(options.DryRun) {
			return
		}
		service := obj.(*corev1.Service)
		a.release(context.TODO(), service)
		for port := range needed(service) {
			p.release(context.TODO(), port, ownerOfService(service))
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

// begin reserves what service needs and writes it into its spec. If the write
// of service then fails, the reservation is given back.
func (a *Addresses) begin(ctx context.Context, service *corev1.Service, dry bool) (registry.FinishFunc, error) {
	nothing := func(context.Context, bool) {}
	spec := &service.Spec
	if spec.Type == corev1.ServiceTypeExternalName {
		return nothing, nil
	}
	if fault := a.families(spec); fault != nil {
		return nil, invalid(service, fault)
	}
	if spec.ClusterIP == corev1.ClusterIPNone {
		return nothing, nil
	}
	address, err := a.choose(ctx, spec, ownerOfService(service), dry)
	switch {
	case errors.Is(err, errMalformed):
		return nothing, nil // validation comes next, and says so
	case errors.Is(err, ErrTaken), errors.Is(err, ErrOutside):
		return nil, invalid(service, refused(spec, err))
	case errors.Is(err, ErrFull):
		return nil, apierrors.NewInternalError(fmt.Errorf("failed to allocate a serviceIP: %w", err))
	case err != nil:
		return nil, err
	}
	spec.ClusterIP, spec.ClusterIPs = address.String(), []string{address.String()}
	return func(ctx context.Context, success bool) {
		if !success && !dry {
			a.release(ctx, service)
		}
	}, nil
}

var errMalformed = errors.New("not an IP address")

// choose reserves the address that spec names, or any. A dry run reserves
// nothing: what it shows is an example.
func (a *Addresses) choose(ctx context.Context, spec *corev1.ServiceSpec, owner Owner, dry bool) (netip.Addr, error) {
	if spec.ClusterIP == "" {
		if dry {
			return a.span.at(a.span.static), nil
		}
		return a.TakeAny(ctx, owner)
	}
	address, err := netip.ParseAddr(spec.ClusterIP)
	if err != nil {
		return netip.Addr{}, fmt.Errorf("%w: %w", errMalformed, err)
	}
	if dry {
		return address, a.check(ctx, address, owner)
	}
	return address, a.Take(ctx, address, owner)
}

// families fills in the one address family there is, and refuses others.
func (a *Addresses) families(spec *corev1.ServiceSpec) *field.Error {
	family, at := corev1.IPv6Protocol, field.NewPath("spec")
	if a.span.cidr.Addr().Is4() {
		family = corev1.IPv4Protocol
	}
	if p := spec.IPFamilyPolicy; p != nil && *p == corev1.IPFamilyPolicyRequireDualStack {
		return field.Invalid(at.Child("ipFamilyPolicy"), *p, "this cluster is not configured for dual-stack services")
	}
	for i, f := range spec.IPFamilies {
		if f != family {
			return field.Invalid(at.Child("ipFamilies").Index(i), f, "not configured on this cluster")
		}
	}
	if spec.IPFamilyPolicy == nil {
		policy := corev1.IPFamilyPolicySingleStack
		spec.IPFamilyPolicy = &policy
	}
	spec.IPFamilies = []corev1.IPFamily{family}
	return nil
}

func refused(spec *corev1.ServiceSpec, err error) *field.Error {
	return field.Invalid(field.NewPath("spec", "clusterIPs"), spec.ClusterIPs, fmt.Sprintf("failed to allocate IP %s: %v", spec.ClusterIP, err))
}

func invalid(service *corev1.Service, fault *field.Error) error {
	return apierrors.NewInvalid(corev1.SchemeGroupVersion.WithKind("Service").GroupKind(), service.Name, field.ErrorList{fault})
}

func ownerOfService(service *corev1.Service) Owner {
	return Owner{Namespace: service.Namespace, Name: service.Name, UID: service.UID}
}

// release gives the address of service back, unless service turns out to be
// stored with it: a write whose outcome is unknown may have happened. A
// release that fails is made up for by the next allocation of the address.
func (a *Addresses) release(ctx context.Context, service *corev1.Service) {
	address, err := netip.ParseAddr(service.Spec.ClusterIP)
	if err != nil {
		return // it had none
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	owner := ownerOfService(service)
	held, err := a.holds(ctx, owner, address)
	if err == nil && !held {
		err = a.Release(ctx, address, owner)
	}
	if err != nil {
		klog.FromContext(ctx).Info("Cluster address stays reserved until it is wanted", "address", address, "service", owner, "err", err)
	}
}
