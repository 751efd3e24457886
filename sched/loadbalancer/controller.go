// Package loadbalancer gives Services of type LoadBalancer their addresses, from
// the cluster's own pool: the ConfigMap clusterd-load-balancer in kube-system,
// whose key "addresses" lists ranges ("192.0.2.0/28", "192.0.2.20-192.0.2.29",
// single addresses) separated by commas, spaces or lines. Nodes announce them.
// Services with a loadBalancerClass are another program's.
package loadbalancer

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/clusterd/clusterd/sched/loop"
)

// Pool is the ConfigMap with the addresses.
var Pool = loop.Key{Namespace: metav1.NamespaceSystem, Name: "clusterd-load-balancer"}

// all is the one key: addresses are given out over all Services at once.
var all = loop.Key{Name: "all"}

type controller struct {
	*loop.Controller
	client   kubernetes.Interface
	events   record.EventRecorder
	services corelisters.ServiceLister
	maps     corelisters.ConfigMapLister
	nodes    corelisters.NodeLister
	// given is what this loop wrote and the cache may not show yet; reported is what
	// was last said to whom. Only reconcile uses them.
	given    map[loop.Key]grant
	reported map[loop.Key]string
	// pooled is what Services have of a pool: it goes when the pool does, what
	// another program gave stays.
	pooled map[loop.Key]grant
}

// grant is what the Service with that UID was given.
type grant struct {
	uid types.UID
	ips []string
}

// New returns the loop.
func New(env loop.Env) loop.Loop {
	core := env.Informers.Core().V1()
	c := &controller{
		client: env.Client, events: env.Events.For("loadbalancer"), services: core.Services().Lister(), maps: core.ConfigMaps().Lister(), nodes: core.Nodes().Lister(),
		given: map[loop.Key]grant{}, reported: map[loop.Key]string{}, pooled: map[loop.Key]grant{},
	}
	c.Controller = loop.New("loadbalancer", env, 1, c.reconcile)
	loop.Watch(c.Controller, core.Services().Informer(), func(old, s *corev1.Service) {
		if old != nil && holds(old) || s != nil && holds(s) {
			c.Enqueue(all)
		}
	})
	loop.Watch(c.Controller, core.ConfigMaps().Informer(), func(old, m *corev1.ConfigMap) {
		if loop.KeyOf(loop.Latest(old, m)) == Pool {
			c.Enqueue(all)
		}
	})
	loop.Watch(c.Controller, core.Nodes().Informer(), func(old, n *corev1.Node) {
		if old == nil || n == nil || !slices.Equal(old.Status.Addresses, n.Status.Addresses) {
			c.Enqueue(all)
		}
	})
	return c.Loop()
}

func (c *controller) reconcile(ctx context.Context, _ loop.Key) error {
	every, err := c.services.List(labels.Everything())
	if err != nil {
		return err
	}
	var services, others []*corev1.Service
	for _, s := range every {
		switch {
		case balanced(s):
			services = append(services, s)
		case holds(s):
			others = append(others, s)
		}
	}
	nodes, err := c.nodes.List(labels.Everything())
	if err != nil {
		return err
	}
	text, found := "", true
	m, err := c.maps.ConfigMaps(Pool.Namespace).Get(Pool.Name)
	if apierrors.IsNotFound(err) {
		found = false
	} else if err != nil {
		return err
	} else {
		text = m.Data["addresses"]
	}
	ranges, bad := ParsePool(text)
	if bad != nil && c.reported[Pool] != bad.Error() {
		c.reported[Pool] = bad.Error()
		c.events.Event(m, corev1.EventTypeWarning, "InvalidPool", bad.Error())
	}
	names := map[loop.Key]types.UID{}
	for i, s := range services {
		key := loop.KeyOf(s)
		names[key] = s.UID
		if got, ok := c.given[key]; ok && got.uid == s.UID { // newer than the cache
			if slices.Equal(ingress(s), got.ips) {
				delete(c.given, key)
			} else {
				s = s.DeepCopy()
				setIngress(s, got.ips)
				services[i] = s
			}
		}
	}
	gone := func(key loop.Key, uid types.UID) bool {
		now, ok := names[key]
		return !ok || now != uid
	}
	maps.DeleteFunc(c.given, func(key loop.Key, got grant) bool { return gone(key, got.uid) })
	maps.DeleteFunc(c.pooled, func(key loop.Key, got grant) bool { return gone(key, got.uid) })
	maps.DeleteFunc(c.reported, func(key loop.Key, _ string) bool {
		_, ok := names[key]
		return !ok && key != Pool
	})
	var failed []error
	for _, d := range Decide(services, others, nodesAddresses(nodes), ranges) {
		key := loop.KeyOf(d.Service)
		has := ingress(d.Service)
		if !found && len(has) > 0 && !slices.Equal(has, c.pooled[key].ips) {
			continue // another program's: without a pool addresses are not this loop's business
		}
		if d.Fault != "" {
			fault := d.Fault
			if !found {
				fault = fmt.Sprintf("the cluster has no addresses to give: there is no ConfigMap %s with ranges in its key \"addresses\"", Pool)
			}
			if c.reported[key] != fault {
				c.reported[key] = fault
				c.events.Event(d.Service, corev1.EventTypeWarning, "NoAddress", fault)
			}
		} else {
			delete(c.reported, key)
		}
		if slices.Equal(has, d.IPs) {
			c.pooled[key] = grant{d.Service.UID, d.IPs}
			continue
		}
		next := d.Service.DeepCopy()
		setIngress(next, d.IPs)
		if _, err := c.client.CoreV1().Services(key.Namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{}); err != nil {
			if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
				c.EnqueueAfter(all, retryConflict)
				continue
			}
			// It keeps none of those behind it from theirs.
			failed = append(failed, fmt.Errorf("service %s: %w", key, err))
			continue
		}
		got := grant{d.Service.UID, d.IPs}
		c.given[key], c.pooled[key] = got, got
	}
	return errors.Join(failed...)
}
