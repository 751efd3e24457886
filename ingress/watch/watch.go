package watch

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/clusterd/clusterd/apis/gateway"
	"github.com/clusterd/clusterd/ingress/kinds"
	"github.com/clusterd/clusterd/ingress/route"
)

// settle is how long changes are gathered before a table is made of them.
const settle = 50 * time.Millisecond

// Config of Run. All fields are required unless they say otherwise.
type Config struct {
	Client kubernetes.Interface
	// Kinds are the caches of the kinds of Gateways, which Run runs.
	Kinds *kinds.Kinds
	// Set is given each table that differs from the one before, by one goroutine.
	Set    func(*route.Table)
	Logger *slog.Logger // default slog.Default()
}

// parsed is a Secret's certificate, kept as long as the Secret stays as it is.
type parsed struct {
	uid     types.UID
	version string
	pair    *tls.Certificate
	err     error
}

const byService = "service"

// Run keeps the table until ctx ends. The first one is set when all objects are
// known: before that a request could be answered that there is no rule for it.
func Run(ctx context.Context, cfg Config) error {
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	all := informers.NewSharedInformerFactoryWithOptions(cfg.Client, 0, informers.WithTransform(slim))
	// Secrets of this one type alone: what else is secret is not read.
	secrets := informers.NewSharedInformerFactoryWithOptions(cfg.Client, 0, informers.WithTransform(slim),
		informers.WithTweakListOptions(func(o *metav1.ListOptions) {
			o.FieldSelector = fields.OneTermEqualSelector("type", string(corev1.SecretTypeTLS)).String()
		}))
	net, core := all.Networking().V1(), all.Core().V1()
	ingresses, classes, services := net.Ingresses(), net.IngressClasses(), core.Services()
	spaces, configMaps := core.Namespaces(), core.ConfigMaps()
	endpoints, pairs := all.Discovery().V1().EndpointSlices(), secrets.Core().V1().Secrets()
	if err := endpoints.Informer().AddIndexers(cache.Indexers{byService: func(obj any) ([]string, error) {
		s := obj.(*discoveryv1.EndpointSlice)
		return []string{s.Namespace + "/" + s.Labels[discoveryv1.LabelServiceName]}, nil
	}}); err != nil {
		return fmt.Errorf("watch: %w", err)
	}
	changed := make(chan struct{}, 1)
	poke := func(any) {
		select {
		case changed <- struct{}{}:
		default:
		}
	}
	var known []cache.ResourceEventHandlerRegistration
	for _, informer := range []cache.SharedIndexInformer{ingresses.Informer(), classes.Informer(), services.Informer(), endpoints.Informer(), pairs.Informer(), spaces.Informer(), configMaps.Informer()} {
		h, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: poke, UpdateFunc: func(old, o any) {
			before, ok := old.(*corev1.ConfigMap)
			if now, same := o.(*corev1.ConfigMap); ok && same && maps.Equal(before.Data, now.Data) {
				return // slim leaves what is looked at
			}
			poke(o)
		}, DeleteFunc: poke})
		if err != nil {
			return fmt.Errorf("watch: %w", err)
		}
		known = append(known, h)
	}
	all.StartWithContext(ctx)
	secrets.StartWithContext(ctx)
	defer all.Shutdown()
	defer secrets.Shutdown()
	o := objects{
		service: func(namespace, name string) *corev1.Service {
			s, err := services.Lister().Services(namespace).Get(name)
			if err != nil {
				return nil
			}
			return s
		},
		slices: func(namespace, service string) (out []*discoveryv1.EndpointSlice) {
			found, _ := endpoints.Informer().GetIndexer().ByIndex(byService, namespace+"/"+service)
			for _, f := range found {
				out = append(out, f.(*discoveryv1.EndpointSlice))
			}
			return out
		},
		configMap: func(namespace, name string) *corev1.ConfigMap {
			m, err := configMaps.Lister().ConfigMaps(namespace).Get(name)
			if err != nil {
				return nil
			}
			return m
		},
		namespace: func(name string) labels.Set {
			n, err := spaces.Lister().Get(name)
			if err != nil {
				return nil
			}
			return n.Labels
		},
	}
	lists := func(o *objects) (err error) {
		if o.ingresses, err = ingresses.Lister().List(labels.Everything()); err == nil {
			o.classes, err = classes.Lister().List(labels.Everything())
		}
		return err
	}
	work, ctx := errgroup.WithContext(ctx)
	work.Go(func() error { return cfg.Kinds.Run(ctx, func() { poke(nil) }) })
	work.Go(func() error {
		for _, h := range known {
			select {
			case <-h.HasSyncedChecker().Done():
			case <-ctx.Done():
				return nil
			}
		}
		for !cfg.Kinds.Known() {
			select {
			case <-changed:
			case <-ctx.Done():
				return nil
			}
		}
		return tables(ctx, cfg, o, pairs.Lister(), lists, changed)
	})
	return work.Wait()
}

// tables makes one after another, until ctx ends.
func tables(ctx context.Context, cfg Config, o objects, pairs corelisters.SecretLister, lists func(*objects) error, changed <-chan struct{}) error {
	certificates := map[string]parsed{}
	var reported []string
	for {
		if err := lists(&o); err != nil {
			return fmt.Errorf("watch: %w", err)
		}
		used := map[string]parsed{}
		o.pair = func(namespace, name string) (*tls.Certificate, error) {
			key := namespace + "/" + name
			s, err := pairs.Secrets(namespace).Get(name)
			if err != nil {
				return nil, fmt.Errorf("there is no Secret %q of type %s", name, corev1.SecretTypeTLS)
			}
			p, ok := certificates[key]
			if !ok || p.uid != s.UID || p.version != s.ResourceVersion {
				p = parsed{uid: s.UID, version: s.ResourceVersion}
				p.pair, p.err = parse(s)
			}
			used[key] = p
			return p.pair, p.err
		}
		rules, shown, faults := compile(o)
		table, hidden := route.Build(rules, shown)
		asked := gateway.Objects{Namespace: o.namespace, Service: o.service, ConfigMap: o.configMap, Certificate: o.certificate}
		cfg.Kinds.Fill(&asked)
		listeners, binds, wrong := compileGateways(o, gateway.Evaluate(asked))
		table = route.Merge(table, listeners, binds)
		certificates = used
		for _, h := range hidden {
			faults = append(faults, fmt.Sprintf("Ingress %s: an older one has host %q and path %q", h.Owner, h.Host, h.Path))
		}
		faults = append(faults, wrong...)
		for _, f := range faults {
			if !slices.Contains(reported, f) {
				cfg.Logger.Warn("an Ingress or Gateway is not served as it says", "why", f)
			}
		}
		reported = faults
		cfg.Set(table)
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(settle):
		}
		select { // what came meanwhile is in the next table
		case <-changed:
		default:
		}
	}
}

func parse(s *corev1.Secret) (*tls.Certificate, error) {
	pair, err := tls.X509KeyPair(s.Data[corev1.TLSCertKey], s.Data[corev1.TLSPrivateKeyKey])
	if err != nil {
		// The error of the parser does not repeat what it read.
		return nil, errors.Join(fmt.Errorf("Secret %q holds no certificate with its key in %s and %s", s.Name, corev1.TLSCertKey, corev1.TLSPrivateKeyKey), err)
	}
	return &pair, nil
}

// slim leaves what is not looked at out of the caches.
func slim(obj any) (any, error) {
	switch o := obj.(type) {
	case *discoveryv1.EndpointSlice:
		o.ManagedFields, o.Annotations, o.OwnerReferences = nil, nil, nil
		for i := range o.Endpoints {
			e := &o.Endpoints[i]
			e.TargetRef, e.DeprecatedTopology, e.Hints, e.NodeName, e.Zone = nil, nil, nil, nil, nil
		}
	case *corev1.Service:
		o.ManagedFields, o.Annotations, o.Status = nil, nil, corev1.ServiceStatus{}
	case *corev1.Secret:
		o.ManagedFields, o.Annotations = nil, nil
		o.Data = map[string][]byte{corev1.TLSCertKey: o.Data[corev1.TLSCertKey], corev1.TLSPrivateKeyKey: o.Data[corev1.TLSPrivateKeyKey]}
	case *corev1.ConfigMap:
		o.ManagedFields, o.Annotations, o.BinaryData = nil, nil, nil
		if ca, ok := o.Data[gateway.AuthorityKey]; ok {
			o.Data = map[string]string{gateway.AuthorityKey: ca}
		} else {
			o.Data = nil
		}
	case *corev1.Namespace:
		o.ManagedFields, o.Annotations = nil, nil
	case *networkingv1.Ingress:
		o.ManagedFields, o.Status = nil, networkingv1.IngressStatus{}
	}
	return obj, nil
}
