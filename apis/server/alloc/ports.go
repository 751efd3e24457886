package alloc

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/apiserver/pkg/registry/generic/registry"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/klog/v2"
)

// PortsPrefix is where the ports in use are stored.
const PortsPrefix = "/alloc/nodeports"

// DefaultPorts are the ports of nodes that Services are given.
var DefaultPorts = utilnet.PortRange{Base: 30000, Size: 2768}

var (
	// ErrPortTaken is returned when the port asked for belongs to another
	// Service.
	ErrPortTaken = errors.New("provided port is already allocated")
	// ErrPortOutside is returned when the port asked for is not in the range.
	ErrPortOutside = errors.New("provided port is not in the valid range")
)

// HoldsPort tells whether a Service has a node port, newest state. It may block.
type HoldsPort func(ctx context.Context, owner Owner, port int32) (bool, error)

// Ports allocates node ports, as Addresses does addresses. A port belongs to
// one Service, whatever its protocols. Safe for concurrent use.
type Ports struct {
	leases leases
	holds  HoldsPort
	ports  utilnet.PortRange

	mu sync.Mutex
	// had are the ports that Services had before the updates under way.
	had map[types.UID]map[int32]*field.Path
}

// NewPorts gives out ports of a range, and keeps what is taken in store, which stores
// Leases under PortsPrefix. What Services have of another range they keep.
func NewPorts(store storage.Interface, holds HoldsPort, ports utilnet.PortRange) *Ports {
	p := &Ports{holds: holds, ports: ports, had: map[types.UID]map[int32]*field.Path{}}
	p.leases = newLeases(store, PortsPrefix, func(ctx context.Context, owner Owner, name string) (bool, error) {
		n, err := strconv.ParseInt(name, 10, 32)
		if err != nil {
			return false, nil
		}
		return holds(ctx, owner, int32(n))
	})
	return p
}

func portName(port int32) string { return strconv.Itoa(int(port)) }

// check is nil for a port of the range.
func (p *Ports) check(port int32) error {
	if p.ports.Contains(int(port)) {
		return nil
	}
	return fmt.Errorf("%w. The range of valid ports is %s", ErrPortOutside, p.ports.String())
}

// Take reserves port for owner.
func (p *Ports) Take(ctx context.Context, port int32, owner Owner) error {
	if err := p.check(port); err != nil {
		return err
	}
	err := p.leases.take(ctx, portName(port), owner)
	if errors.Is(err, ErrTaken) {
		return ErrPortTaken
	}
	return err
}

// TakeAny reserves a free port for owner.
func (p *Ports) TakeAny(ctx context.Context, owner Owner) (int32, error) {
	size := p.ports.Size
	taken, err := p.leases.taken(ctx)
	if err != nil {
		return 0, err
	}
	start := rand.IntN(size)
	for _, wantTaken := range []bool{false, true} { // then those that were abandoned
		for i := range size {
			port := int32(p.ports.Base + (start+i)%size)
			if taken[portName(port)] != wantTaken {
				continue
			}
			switch err := p.Take(ctx, port, owner); {
			case err == nil:
				return port, nil
			case !errors.Is(err, ErrPortTaken):
				return 0, err
			}
		}
	}
	return 0, ErrFull
}

// needed are the ports that service has, with where they stand.
func needed(service *corev1.Service) map[int32]*field.Path {
	out := map[int32]*field.Path{}
	if n := service.Spec.HealthCheckNodePort; n != 0 {
		out[n] = field.NewPath("spec", "healthCheckNodePort")
	}
	for i, port := range service.Spec.Ports {
		if port.NodePort != 0 {
			if _, ok := out[port.NodePort]; !ok {
				out[port.NodePort] = field.NewPath("spec", "ports").Index(i).Child("nodePort")
			}
		}
	}
	return out
}

// begin reserves the ports that service needs and old, which may be nil, has
// not, and writes those it chose into service. The returned function gives them
// back if the write fails.
func (p *Ports) begin(ctx context.Context, service, old *corev1.Service, dry bool) (registry.FinishFunc, error) {
	owner := ownerOfService(service)
	had := map[int32]*field.Path{}
	if old != nil {
		had = needed(old)
	}
	var got []int32
	back := func(ctx context.Context) {
		for _, port := range got {
			p.release(ctx, port, owner)
		}
	}
	take := func(port int32, at *field.Path) error {
		if _, ok := had[port]; ok {
			return nil
		}
		err := p.check(port)
		switch {
		case err != nil:
		case dry:
			if err = p.leases.try(ctx, portName(port), owner); errors.Is(err, ErrTaken) {
				err = ErrPortTaken
			}
		default:
			if err = p.Take(ctx, port, owner); err == nil {
				got = append(got, port)
			}
		}
		if errors.Is(err, ErrPortTaken) || errors.Is(err, ErrPortOutside) {
			return invalid(service, field.Invalid(at, port, err.Error()))
		}
		return err
	}
	choose := func() (int32, error) {
		if dry { // an example
			return int32(p.ports.Base + rand.IntN(p.ports.Size)), nil
		}
		port, err := p.TakeAny(ctx, owner)
		if errors.Is(err, ErrFull) {
			return 0, apierrors.NewInternalError(fmt.Errorf("failed to allocate a nodePort: %w", err))
		}
		if err == nil {
			got = append(got, port)
		}
		return port, err
	}
	if err := assign(service, take, choose); err != nil {
		back(context.WithoutCancel(ctx))
		return nil, err
	}
	if len(had) > 0 && !dry {
		p.mu.Lock()
		p.had[service.UID] = had
		p.mu.Unlock()
	}
	return func(ctx context.Context, success bool) {
		if !success {
			p.mu.Lock()
			delete(p.had, service.UID)
			p.mu.Unlock()
			back(ctx)
		}
	}, nil
}

// assign takes the ports that service names and gives those it lacks: first
// the named ones, so that none is given away that stands further down.
func assign(service *corev1.Service, take func(int32, *field.Path) error, choose func() (int32, error)) error {
	for port, at := range needed(service) {
		if err := take(port, at); err != nil {
			return err
		}
	}
	spec := &service.Spec
	if spec.Type == corev1.ServiceTypeNodePort || spec.Type == corev1.ServiceTypeLoadBalancer && (spec.AllocateLoadBalancerNodePorts == nil || *spec.AllocateLoadBalancerNodePorts) {
		for i := range spec.Ports {
			if spec.Ports[i].NodePort != 0 {
				continue
			}
			if n := sibling(spec.Ports, i); n != 0 {
				spec.Ports[i].NodePort = n
				continue
			}
			n, err := choose()
			if err != nil {
				return err
			}
			spec.Ports[i].NodePort = n
		}
	}
	if spec.Type == corev1.ServiceTypeLoadBalancer && spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal && spec.HealthCheckNodePort == 0 {
		n, err := choose()
		if err != nil {
			return err
		}
		spec.HealthCheckNodePort = n
	}
	return nil
}

// sibling is the node port of the same port with another protocol, as DNS has
// for TCP and UDP: both get one number.
func sibling(ports []corev1.ServicePort, i int) int32 {
	for j := range ports {
		if j == i || ports[j].Port != ports[i].Port || ports[j].NodePort == 0 {
			continue
		}
		free := true
		for k := range ports {
			free = free && !(k != i && ports[k].NodePort == ports[j].NodePort && ports[k].Protocol == ports[i].Protocol)
		}
		if free {
			return ports[j].NodePort
		}
	}
	return 0
}

// updated gives back what an update took from its Service, as it is now: what its
// type cannot have was taken off after begin.
func (p *Ports) updated(ctx context.Context, service *corev1.Service) {
	p.mu.Lock()
	had := p.had[service.UID]
	delete(p.had, service.UID)
	p.mu.Unlock()
	now := needed(service)
	for port := range had {
		if now[port] == nil {
			p.release(ctx, port, ownerOfService(service))
		}
	}
}

// release gives a port back unless its Service turns out to be stored with it.
func (p *Ports) release(ctx context.Context, port int32, owner Owner) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	held, err := p.holds(ctx, owner, port)
	if err == nil && !held {
		err = p.leases.release(ctx, portName(port), owner)
	}
	if err != nil {
		klog.FromContext(ctx).Info("Node port stays reserved until it is wanted", "port", port, "service", owner, "err", err)
	}
}
