package dns

import (
	"context"
	"net/netip"
	"strconv"
	"strings"
	"sync"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coreinformers "k8s.io/client-go/informers/core/v1"
	discoveryinformers "k8s.io/client-go/informers/discovery/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/lru"

	"github.com/clusterd/clusterd/agent/watches"
)

// byAddress is the index of Services and EndpointSlices by the addresses they hold.
const byAddress = "dnsAddress"

// catalog is what is known of the cluster. All it holds is read only.
type catalog struct {
	services, slices, namespaces cache.Indexer
	large                        *lru.Cache // of readEndpoints, by Service: of those with many

	informers []cache.SharedIndexInformer // that run runs
	synced    func() bool
}

func newCatalog(client kubernetes.Interface, services, slices cache.SharedIndexInformer) (*catalog, error) {
	if err := services.AddIndexers(serviceIndexers); err != nil {
		return nil, err
	}
	namespaces := coreinformers.NewNamespaceInformer(client, 0, cache.Indexers{})
	own := []cache.SharedIndexInformer{namespaces}
	if slices == nil {
		slices = discoveryinformers.NewEndpointSliceInformer(client, metav1.NamespaceAll, 0, cache.Indexers{watches.ByService: watches.ServiceOf})
		own = append(own, slices)
	}
	if err := slices.AddIndexers(sliceIndexers); err != nil {
		return nil, err
	}
	for _, i := range own {
		if err := i.SetTransform(trim); err != nil {
			return nil, err
		}
	}
	return &catalog{
		services: services.GetIndexer(), slices: slices.GetIndexer(), namespaces: namespaces.GetIndexer(),
		informers: own, large: lru.New(largeServices),
		synced: func() bool {
			return services.HasSynced() && slices.HasSynced() && namespaces.HasSynced()
		},
	}, nil
}

func (c *catalog) run(ctx context.Context, wg *sync.WaitGroup) {
	for _, i := range c.informers {
		wg.Go(func() { i.RunWithContext(ctx) })
	}
}

var (
	serviceIndexers = cache.Indexers{byAddress: func(obj any) ([]string, error) {
		return obj.(*v1.Service).Spec.ClusterIPs, nil
	}}
	sliceIndexers = cache.Indexers{
		byAddress: func(obj any) ([]string, error) {
			var out []string
			for _, e := range obj.(*discoveryv1.EndpointSlice).Endpoints {
				out = append(out, e.Addresses...)
			}
			return out, nil
		},
	}
)

// trim drops what no answer needs: there may be many endpoints.
func trim(obj any) (any, error) {
	switch o := obj.(type) {
	case *discoveryv1.EndpointSlice:
		o.ManagedFields, o.Annotations, o.OwnerReferences = nil, nil, nil
		for i := range o.Endpoints {
			e := &o.Endpoints[i]
			e.TargetRef, e.NodeName, e.Zone, e.Hints, e.DeprecatedTopology = nil, nil, nil, nil, nil
		}
	case *v1.Namespace:
		o.ManagedFields, o.Annotations = nil, nil // policies read the labels in the node's record of the cluster
	}
	return obj, nil
}

func (c *catalog) hasNamespace(name string) bool {
	_, ok, _ := c.namespaces.GetByKey(name)
	return ok
}

func (c *catalog) service(namespace, name string) *v1.Service {
	obj, ok, _ := c.services.GetByKey(namespace + "/" + name)
	if !ok {
		return nil
	}
	return obj.(*v1.Service)
}

// servicesAt are the Services with that cluster address.
func (c *catalog) servicesAt(a netip.Addr) []*v1.Service {
	objs, _ := c.services.ByIndex(byAddress, a.String())
	out := make([]*v1.Service, 0, len(objs))
	for _, o := range objs {
		out = append(out, o.(*v1.Service))
	}
	return out
}

// endpoint is one that may be named, with the ports of its slices.
type endpoint struct {
	addr  netip.Addr
	name  string // the label below its Service's name
	ports [][]discoveryv1.EndpointPort
	again bool // one before it has the address too, by another name
}

// Reading a thousand endpoints takes a hundred times as long as an answer. What was
// read holds as long as the slices are the same objects.
const (
	manyEndpoints = 16 // reading fewer costs nothing
	largeServices = 64 // of which it is remembered
)

// maxPairs bounds the ports of all endpoints of a Service together: a question for SRV
// records looks at each. Ports beyond that are in no answer.
const maxPairs = 100_000

// readEndpoints are the endpoints that were read from those slices.
type readEndpoints struct {
	slices    map[any]bool
	unready   bool // those that are not ready count
	endpoints []endpoint
}

func (r *readEndpoints) of(slices []any, unready bool) bool {
	if len(slices) != len(r.slices) || unready != r.unready {
		return false
	}
	for _, s := range slices {
		if !r.slices[s] {
			return false
		}
	}
	return true
}

// endpoints are the ready ones of a Service, each address once by each name. They are
// not to be changed.
func (c *catalog) endpoints(s *v1.Service) []endpoint {
	key := s.Namespace + "/" + s.Name
	objs, _ := c.slices.ByIndex(watches.ByService, key)
	if v, ok := c.large.Get(key); ok {
		if r := v.(*readEndpoints); r.of(objs, s.Spec.PublishNotReadyAddresses) {
			return r.endpoints
		}
	}
	out, cost := read(objs, s.Spec.PublishNotReadyAddresses)
	if cost < manyEndpoints {
		c.large.Remove(key)
		return out
	}
	r := &readEndpoints{slices: map[any]bool{}, unready: s.Spec.PublishNotReadyAddresses, endpoints: out}
	for _, o := range objs {
		r.slices[o] = true
	}
	c.large.Add(key, r)
	return out
}

// read lists the endpoints of slices of one Service, and how many addresses it read for
// them. An address may be in several slices: while one is replaced, or as each has some of
// the ports.
func read(objs []any, unready bool) (out []endpoint, cost int) {
	for _, o := range objs {
		cost += len(o.(*discoveryv1.EndpointSlice).Endpoints)
	}
	type named struct {
		addr netip.Addr
		name string
	}
	known, addrs := make(map[named]int, cost), make(map[netip.Addr]bool, cost) // known: where it is in out
	left := maxPairs
	for _, o := range objs {
		slice := o.(*discoveryv1.EndpointSlice)
		of := map[int]bool{} // of out: those that have this slice's ports
		for i := range slice.Endpoints {
			e := &slice.Endpoints[i]
			cost += len(e.Addresses)
			if ready := e.Conditions.Ready; ready != nil && !*ready && !unready {
				continue
			}
			for _, text := range e.Addresses {
				a, err := netip.ParseAddr(text)
				if err != nil {
					continue // a domain name
				}
				id := named{a, endpointName(e, a)}
				at, ok := known[id]
				if !ok {
					at = len(out)
					known[id] = at
					out = append(out, endpoint{addr: a, name: id.name, again: addrs[a]})
					addrs[a] = true
				}
				if !of[at] {
					of[at] = true
					ports := slice.Ports[:min(len(slice.Ports), left)]
					left -= len(ports)
					out[at].ports = append(out[at].ports, ports)
				}
			}
		}
	}
	return out, cost
}

// endpointName is the label an endpoint has below its Service: its host name,
// or its address with dashes.
func endpointName(e *discoveryv1.Endpoint, a netip.Addr) string {
	if e.Hostname != nil && *e.Hostname != "" {
		return strings.ToLower(*e.Hostname)
	}
	return dashed(a)
}

func dashed(a netip.Addr) string {
	if a.Is4() {
		return strings.ReplaceAll(a.String(), ".", "-")
	}
	// A label must not begin or end with a dash: no "::".
	return strings.ReplaceAll(a.StringExpanded(), ":", "-")
}

// undashed is the address that a label spells, if it spells one.
func undashed(label string) (netip.Addr, bool) {
	if strings.Count(label, "-") == 3 {
		if a, err := netip.ParseAddr(strings.ReplaceAll(label, "-", ".")); err == nil {
			return a, true
		}
	}
	a, err := netip.ParseAddr(strings.ReplaceAll(label, "-", ":"))
	return a, err == nil
}

// endpointsAt are the full names, below the zone, of the endpoints with that
// address: those of headless Services, or of others if there are none.
func (c *catalog) endpointsAt(a netip.Addr) []string {
	objs, _ := c.slices.ByIndex(byAddress, a.String())
	var headless, others []string
	for _, o := range objs {
		slice := o.(*discoveryv1.EndpointSlice)
		s := c.service(slice.Namespace, slice.Labels[discoveryv1.LabelServiceName])
		if s == nil {
			continue
		}
		for i := range slice.Endpoints {
			e := &slice.Endpoints[i]
			for _, text := range e.Addresses {
				if text != a.String() {
					continue
				}
				name := endpointName(e, a) + "." + s.Name + "." + s.Namespace + ".svc."
				if s.Spec.ClusterIP == v1.ClusterIPNone {
					headless = append(headless, name)
				} else {
					others = append(others, name)
				}
			}
		}
	}
	if len(headless) > 0 {
		return headless
	}
	return others
}

// reverse is the address that a name below in-addr.arpa or ip6.arpa stands
// for.
func reverse(name string) (netip.Addr, bool) {
	if rest, ok := strings.CutSuffix(name, ".in-addr.arpa."); ok {
		parts := strings.Split(rest, ".")
		if len(parts) != 4 {
			return netip.Addr{}, false
		}
		var b [4]byte
		for i, p := range parts {
			n, err := strconv.ParseUint(p, 10, 8)
			if err != nil || len(p) > 1 && p[0] == '0' {
				return netip.Addr{}, false
			}
			b[3-i] = byte(n)
		}
		return netip.AddrFrom4(b), true
	}
	rest, ok := strings.CutSuffix(name, ".ip6.arpa.")
	if !ok {
		return netip.Addr{}, false
	}
	parts := strings.Split(rest, ".")
	if len(parts) != 32 {
		return netip.Addr{}, false
	}
	var b [16]byte
	for i, p := range parts {
		n, err := strconv.ParseUint(p, 16, 4)
		if err != nil || len(p) != 1 {
			return netip.Addr{}, false
		}
		b[15-i/2] |= byte(n) << (4 * (i % 2))
	}
	return netip.AddrFrom16(b), true
}
