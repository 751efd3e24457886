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
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/record"

	"github.com/clusterd/clusterd/apis/core"
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

// grant is what the Service with that UID was given, and what its condition says.
type grant struct {
	uid       types.UID
	ips       []string
	condition metav1.Condition
}

// New returns the loop.
func New(env loop.Env) loop.Loop {
	informers := env.Informers.Core().V1()
	c := &controller{
		client: env.Client, events: env.Events.For("loadbalancer"), services: informers.Services().Lister(), maps: informers.ConfigMaps().Lister(), nodes: informers.Nodes().Lister(),
		given: map[loop.Key]grant{}, reported: map[loop.Key]string{}, pooled: map[loop.Key]grant{},
	}
	c.Controller = loop.New("loadbalancer", env, 1, c.reconcile)
	loop.Watch(c.Controller, informers.Services().Informer(), func(old, s *corev1.Service) {
		if old != nil && holds(old) || s != nil && holds(s) {
			c.Enqueue(all)
		}
	})
	loop.Watch(c.Controller, informers.ConfigMaps().Informer(), func(old, m *corev1.ConfigMap) {
		if loop.KeyOf(loop.Latest(old, m)) == Pool {
			c.Enqueue(all)
		}
	})
	loop.Watch(c.Controller, informers.Nodes().Informer(), func(old, n *corev1.Node) {
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
			if slices.Equal(ingress(s), got.ips) && says(s, got.condition) {
				delete(c.given, key)
			} else {
				s = s.DeepCopy()
				setIngress(s, got.ips)
				meta.SetStatusCondition(&s.Status.Conditions, got.condition)
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
		// Without a pool the addresses that another program gave are not this loop's
		// business.
		other := !found && len(has) > 0 && !slices.Equal(has, c.pooled[key].ips)
		switch {
		case other:
			d.IPs, d.Reason, d.Fault = has, core.ReasonOtherProgram, "another program has given the addresses in the status; nodes do not announce them"
		case d.Fault != "" && !found:
			d.Reason, d.Fault = core.ReasonNoPool, fmt.Sprintf("the cluster has no addresses to give: there is no ConfigMap %s with ranges in its key \"addresses\"", Pool)
		}
		if d.Fault == "" || other {
			delete(c.reported, key)
		} else if c.reported[key] != d.Fault {
			c.reported[key] = d.Fault
			c.events.Event(d.Service, corev1.EventTypeWarning, "NoAddress", d.Fault)
		}
		got := grant{d.Service.UID, d.IPs, condition(d)}
		if slices.Equal(has, d.IPs) && says(d.Service, got.condition) {
			if !other {
				c.pooled[key] = got
			}
			continue
		}
		next := d.Service.DeepCopy()
		if !other {
			setIngress(next, d.IPs)
		}
		meta.SetStatusCondition(&next.Status.Conditions, got.condition)
		if _, err := c.client.CoreV1().Services(key.Namespace).UpdateStatus(ctx, next, metav1.UpdateOptions{}); err != nil {
			if apierrors.IsConflict(err) || apierrors.IsNotFound(err) {
				c.EnqueueAfter(all, retryConflict)
				continue
			}
			// It keeps none of those behind it from theirs.
			failed = append(failed, fmt.Errorf("service %s: %w", key, err))
			continue
		}
		if other {
			continue // the cache shows it in a moment
		}
		c.given[key], c.pooled[key] = got, got
	}
	return errors.Join(failed...)
}
