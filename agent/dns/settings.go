package dns

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	coreinformers "k8s.io/client-go/informers/core/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/slack"
)

// SettingsName and the namespace kube-system are where the cluster's own
// settings of DNS are: the ConfigMap that kube-dns has read since ever, with
// stubDomains, {"acme.example": ["192.0.2.53"]}, and upstreamNameservers,
// ["192.0.2.1", "192.0.2.2:5353"], both JSON.
const SettingsName = "kube-dns"

// settings follows the ConfigMap.
type settings struct {
	informer cache.SharedIndexInformer // nil: there are no settings
	changed  chan struct{}
	// current is what the ConfigMap said when it last made sense.
	current atomic.Pointer[routes]
}

// routes are servers by domain, as written; nil upstreams: the node's.
type routes struct {
	stubs     map[string][]string
	upstreams []string
}

func (s *settings) watch(client kubernetes.Interface) {
	s.changed = make(chan struct{}, 1)
	s.current.Store(&routes{})
	if client == nil {
		return
	}
	s.informer = coreinformers.NewFilteredConfigMapInformer(client, metav1.NamespaceSystem, 0, cache.Indexers{}, func(o *metav1.ListOptions) {
		o.FieldSelector = fields.OneTermEqualSelector("metadata.name", SettingsName).String()
	})
}

func (s *settings) run(ctx context.Context, wg *sync.WaitGroup) {
	if s.informer == nil {
		return
	}
	set := func(obj any) {
		r, err := parseSettings(obj.(*v1.ConfigMap).Data)
		if err != nil {
			klog.FromContext(ctx).Error(err, "The settings of cluster DNS are wrong; the former ones stay in force", "configmap", metav1.NamespaceSystem+"/"+SettingsName)
			return
		}
		s.current.Store(r)
		s.poke()
	}
	_, err := s.informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: set, UpdateFunc: func(_, obj any) { set(obj) },
		DeleteFunc: func(any) { s.current.Store(&routes{}); s.poke() },
	})
	if err != nil {
		return // the informer has been stopped
	}
	wg.Go(func() { s.informer.RunWithContext(ctx) })
}

// Informers are the watches of the Server's own, by kind.
func (s *Server) Informers() map[string]cache.SharedIndexInformer {
	own := map[string]cache.SharedIndexInformer{"Namespace": s.catalog.informers[0]}
	if s.settings.informer != nil {
		own["ConfigMap"] = s.settings.informer
	}
	return own
}

func (s *settings) poke() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

func parseSettings(data map[string]string) (*routes, error) {
	r := &routes{}
	if text := data["stubDomains"]; text != "" {
		if err := json.Unmarshal([]byte(text), &r.stubs); err != nil {
			return nil, fmt.Errorf(`stubDomains: write it as {"acme.example": ["192.0.2.53"]}: %w`, err)
		}
	}
	if text := data["upstreamNameservers"]; text != "" {
		if err := json.Unmarshal([]byte(text), &r.upstreams); err != nil {
			return nil, fmt.Errorf(`upstreamNameservers: write it as ["192.0.2.1"]: %w`, err)
		}
	}
	for domain, servers := range r.stubs {
		if _, ok := dns.IsDomainName(domain); !ok || domain == "" {
			return nil, fmt.Errorf("stubDomains: %q is no domain", domain)
		}
		if len(servers) == 0 {
			return nil, fmt.Errorf("stubDomains: %s: name a server", domain)
		}
	}
	for _, server := range slices.Concat(append(slices.Collect(maps.Values(r.stubs)), r.upstreams)...) {
		if withPort(server) == "" {
			return nil, fmt.Errorf("%q is not the address of a name server, such as 192.0.2.53 or 192.0.2.53:5353", server)
		}
	}
	return r, nil
}

// upstreamCheck is how often the node's own resolv.conf is read.
const upstreamCheck = 5 * time.Second

// keepUpstreams keeps the forwarder's servers those of the settings and the
// node.
func (s *Server) keepUpstreams(ctx context.Context) {
	tick := slack.NewTicker(upstreamCheck)
	defer tick.Stop()
	var host []string
	var own []netip.AddrPort
	for _, a := range s.cfg.Addrs {
		own = append(own, netip.AddrPortFrom(a, s.cfg.Port))
	}
	for {
		now, err := s.cfg.Upstreams()
		if err == nil {
			host = now // else the former ones
		}
		for _, u := range s.forward.set(plan(*s.settings.current.Load(), host, own)) {
			s.forward.probe(ctx, u)
			if u.loops.Load() {
				klog.FromContext(ctx).Error(nil, "A name server of this node asks cluster DNS itself and is left out; name another one with --resolv-conf", "server", u.addr)
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-s.settings.changed:
		case <-tick.C:
		}
	}
}

// plan is which servers are asked for which domain. Own addresses are left
// out: a question must not come back. Pure.
func plan(r routes, host []string, own []netip.AddrPort) map[string][]string {
	usable := func(list []string) []string {
		var out []string
		for _, server := range list {
			a := withPort(server)
			if a == "" || slices.Contains(own, netip.MustParseAddrPort(a)) || slices.Contains(out, a) {
				continue
			}
			out = append(out, a)
		}
		return out
	}
	if len(r.upstreams) > 0 {
		host = r.upstreams
	}
	out := map[string][]string{".": usable(host)}
	for domain, servers := range r.stubs {
		out[domain] = usable(servers)
	}
	return out
}
