// Package gateway keeps what serves Gateways: the kinds themselves and the
// GatewayClass, made once, and, as soon as there is a Gateway of a class of ours,
// the proxies, with the ports that its listeners have. It writes the statuses of
// classes, Gateways and routes, so that the proxies only read. What the objects
// mean is said by apis/gateway.
package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	apiequality "k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	gatewayv1 "sigs.k8s.io/gateway-api/apis/v1"

	"github.com/clusterd/clusterd/apis/gateway"
	"github.com/clusterd/clusterd/sched/ingress"
	"github.com/clusterd/clusterd/sched/loop"
)

const (
	// settle is how long changes are gathered before all is judged again.
	settle = 100 * time.Millisecond
	// discoveryDelay is how long it takes until a kind that was just made is looked
	// for again.
	discoveryDelay = time.Second
)

var (
	// kindsKey asks for the kinds and the class, allKey for all statuses.
	kindsKey = loop.Key{Name: "!kinds"}
	allKey   = loop.Key{Name: "!all"}
)

// Kinds are caches of the kinds of Gateways. Run blocks until ctx ends and calls
// changed, which does not block, after each change; the others may be called
// meanwhile from any goroutine.
type Kinds interface {
	Run(ctx context.Context, changed func()) error
	// Known reports whether the caches hold what there was at the start.
	Known() bool
	// Served reports whether the server knows Gateways, and the caches hold all of them
	// and of their classes.
	Served() bool
	// Fill sets the lists of o, whose objects are not to be changed.
	Fill(o *gateway.Objects)
}

type controller struct {
	*loop.Controller
	env     loop.Env
	client  kubernetes.Interface
	dynamic dynamic.Interface
	kinds   Kinds
	proxies *ingress.Proxies

	services   corelisters.ServiceLister
	secrets    corelisters.SecretLister
	configMaps corelisters.ConfigMapLister
	spaces     corelisters.NamespaceLister
}

// New returns the loop.
func New(env loop.Env, client dynamic.Interface, kinds Kinds) loop.Loop {
	core := env.Informers.Core().V1()
	c := &controller{
		env: env, client: env.Client, dynamic: client, kinds: kinds, proxies: ingress.NewProxies(env),
		services: core.Services().Lister(), secrets: core.Secrets().Lister(), configMaps: core.ConfigMaps().Lister(), spaces: core.Namespaces().Lister(),
	}
	c.Controller = loop.New("gateway", env, 1, c.reconcile)
	loop.Watch(c.Controller, core.Secrets().Informer(), func(old, s *corev1.Secret) {
		if loop.Latest(old, s).Type == corev1.SecretTypeTLS {
			c.all()
		}
	})
	loop.Watch(c.Controller, core.ConfigMaps().Informer(), func(old, m *corev1.ConfigMap) {
		if authorities(old) != authorities(m) {
			c.all()
		}
	})
	loop.Watch(c.Controller, core.Namespaces().Informer(), func(old, n *corev1.Namespace) {
		if old == nil || n == nil || !apiequality.Semantic.DeepEqual(old.Labels, n.Labels) {
			c.all()
		}
	})
	loop.Watch(c.Controller, core.Services().Informer(), func(old, s *corev1.Service) {
		if old == nil || s == nil || !apiequality.Semantic.DeepEqual(old.Spec, s.Spec) ||
			own(s) && !apiequality.Semantic.DeepEqual(old.Status, s.Status) {
			c.all()
		}
	})
	c.proxies.Watch(c.Controller, c.all)
	return loop.Loop{Name: "gateway", Run: func(ctx context.Context) error {
		work, ctx := errgroup.WithContext(ctx)
		ready := make(chan struct{})
		work.Go(func() error { return c.RunReady(ctx, func() { close(ready) }) })
		work.Go(func() error {
			select {
			case <-ready:
			case <-ctx.Done():
				return nil
			}
			c.Enqueue(kindsKey)
			return c.kinds.Run(ctx, c.all)
		})
		return work.Wait()
	}}
}

func authorities(m *corev1.ConfigMap) string {
	if m == nil {
		return ""
	}
	return m.Data[gateway.AuthorityKey]
}

func (c *controller) all() { c.EnqueueAfter(allKey, settle) }

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	if key == kindsKey {
		done, err := c.install(ctx)
		if err == nil && !done {
			c.EnqueueAfter(kindsKey, discoveryDelay)
		}
		return err
	}
	if !c.kinds.Known() {
		return nil
	}
	whole := c.kinds.Served() // asked first: what is read then is all there is
	o := c.objects()
	v := gateway.Evaluate(o)
	addresses, err := c.reach(ctx, v, gateway.Kept(o), whole)
	return errors.Join(err, c.tell(ctx, o, v, addresses))
}

// objects are all that Gateways are about, as they are now.
func (c *controller) objects() gateway.Objects {
	o := gateway.Objects{
		Namespace: func(name string) labels.Set {
			n, err := c.spaces.Get(name)
			if err != nil {
				return nil
			}
			return n.Labels
		},
		Service: func(namespace, name string) *corev1.Service {
			s, err := c.services.Services(namespace).Get(name)
			if err != nil {
				return nil
			}
			return s
		},
		ConfigMap: func(namespace, name string) *corev1.ConfigMap {
			m, err := c.configMaps.ConfigMaps(namespace).Get(name)
			if err != nil {
				return nil
			}
			return m
		},
		Certificate: c.certificate,
	}
	c.kinds.Fill(&o)
	return o
}

func (c *controller) certificate(namespace, name string) error {
	s, err := c.secrets.Secrets(namespace).Get(name)
	if err != nil || s.Type != corev1.SecretTypeTLS {
		return fmt.Errorf("there is no Secret %s/%s of type %s", namespace, name, corev1.SecretTypeTLS)
	}
	if _, err := tls.X509KeyPair(s.Data[corev1.TLSCertKey], s.Data[corev1.TLSPrivateKeyKey]); err != nil {
		return fmt.Errorf("Secret %s/%s holds no certificate with its key in %s and %s", namespace, name, corev1.TLSCertKey, corev1.TLSPrivateKeyKey)
	}
	return nil
}

// reach has the proxies run, and in front of them a Service for each Gateway with the
// ports of its listeners; some share one. It returns the Services' addresses by their
// names. The Services of Gateways that are gone go if whole, which is: v has all
// Gateways that there are.
func (c *controller) reach(ctx context.Context, v *gateway.View, kept map[string]bool, whole bool) (map[string][]gatewayv1.GatewayStatusAddress, error) {
	wanted := v.Services()
	var failed []error
	if _, shared := wanted[gateway.SharedService]; shared {
		_, err := c.proxies.Ensure(ctx)
		failed = append(failed, err)
	} else if len(wanted) > 0 {
		failed = append(failed, c.proxies.EnsurePods(ctx))
	}
	list, err := c.services.Services(gateway.ServiceNamespace).List(labels.Everything())
	if err != nil {
		return nil, err
	}
	list = slices.DeleteFunc(list, func(s *corev1.Service) bool { return !own(s) && s.Name != gateway.SharedService })
	services := c.client.CoreV1().Services(gateway.ServiceNamespace)
	todo, err := plan(list, wanted, kept)
	failed = append(failed, err)
	for _, s := range todo.create {
		if _, err := services.Create(ctx, s, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
			failed = append(failed, fmt.Errorf("make service %s/%s: %w", gateway.ServiceNamespace, s.Name, err))
		}
	}
	for _, s := range todo.update {
		if _, err := services.Update(ctx, s, metav1.UpdateOptions{}); err != nil {
			failed = append(failed, fmt.Errorf("change service %s/%s: %w", gateway.ServiceNamespace, s.Name, err))
		}
	}
	for _, s := range todo.remove {
		if !whole {
			break
		}
		if err := services.Delete(ctx, s.Name, *metav1.NewPreconditionDeleteOptions(string(s.UID))); err != nil && !apierrors.IsNotFound(err) {
			failed = append(failed, fmt.Errorf("delete service %s/%s: %w", gateway.ServiceNamespace, s.Name, err))
		}
	}
	out := map[string][]gatewayv1.GatewayStatusAddress{}
	for _, s := range list {
		out[s.Name] = addresses(s)
	}
	return out, errors.Join(failed...)
}

// tell writes the statuses that are not what they should be. One that cannot be
// written keeps no other from being so.
func (c *controller) tell(ctx context.Context, o gateway.Objects, v *gateway.View, addresses map[string][]gatewayv1.GatewayStatusAddress) error {
	now := metav1.NewTime(c.env.Clock.Now())
	var failed []error
	write := func(resource, kind string, m metav1.Object, status any) {
		if err := c.status(ctx, resource, kind, m, status); err != nil {
			failed = append(failed, fmt.Errorf("status of %s %s/%s: %w", kind, m.GetNamespace(), m.GetName(), err))
		}
	}
	for _, class := range o.Classes {
		if class.Spec.ControllerName != gateway.Controller {
			continue
		}
		if want := gateway.ClassStatus(class, now); !apiequality.Semantic.DeepEqual(class.Status, want) {
			write(gateway.Classes, "GatewayClass", class, &want)
		}
	}
	for _, g := range v.Gateways {
		want := g.Status(addresses[g.Service], now)
		want.AttachedListenerSets = g.Gateway.Status.AttachedListenerSets
		if !apiequality.Semantic.DeepEqual(g.Gateway.Status, want) {
			write(gateway.Gateways, "Gateway", g.Gateway, &want)
		}
	}
	ours := map[metav1.Object][]gatewayv1.RouteParentStatus{}
	for _, r := range v.Routes {
		ours[r.Object()] = r.ParentStatuses(now)
	}
	route := func(resource, kind string, m metav1.Object, old []gatewayv1.RouteParentStatus) {
		want, ok := ours[m]
		if !ok {
			want = gateway.Foreign(old)
		}
		if !apiequality.Semantic.DeepEqual(old, want) && len(old)+len(want) > 0 {
			write(resource, kind, m, &gatewayv1.RouteStatus{Parents: want})
		}
	}
	for _, r := range o.HTTPRoutes {
		route(gateway.HTTPRoutes, gateway.HTTPRoute, r, r.Status.Parents)
	}
	for _, r := range o.GRPCRoutes {
		route(gateway.GRPCRoutes, gateway.GRPCRoute, r, r.Status.Parents)
	}
	for _, p := range v.Policies {
		if want := p.PolicyStatus(now); !apiequality.Semantic.DeepEqual(p.Status, want) && len(p.Status.Ancestors)+len(want.Ancestors) > 0 {
			write(gateway.Policies, "BackendTLSPolicy", p.BackendTLSPolicy, &want)
		}
	}
	return errors.Join(failed...)
}

// status writes one, a pointer to a struct, unless the object has changed meanwhile.
func (c *controller) status(ctx context.Context, resource, kind string, m metav1.Object, status any) error {
	fields, err := runtime.DefaultUnstructuredConverter.ToUnstructured(status)
	if err != nil {
		return err
	}
	u := &unstructured.Unstructured{Object: map[string]any{"status": fields}}
	u.SetGroupVersionKind(schema.GroupVersionKind{Group: gateway.Group, Version: "v1", Kind: kind})
	u.SetNamespace(m.GetNamespace())
	u.SetName(m.GetName())
	u.SetUID(m.GetUID())
	u.SetResourceVersion(m.GetResourceVersion())
	gvr := schema.GroupVersionResource{Group: gateway.Group, Version: "v1", Resource: resource}
	_, err = c.dynamic.Resource(gvr).Namespace(m.GetNamespace()).UpdateStatus(ctx, u, metav1.UpdateOptions{FieldManager: "clusterd-gateway"})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return nil // it has changed or is gone; the cache will show it
	}
	return err
}
