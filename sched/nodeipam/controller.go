// Package nodeipam gives each Node a pod network of its own out of each of the
// cluster's ranges, one of each IP family it has. What it has given stands in the Node and nowhere else, so that
// there is nothing to lose and nothing to restore.
package nodeipam

import (
	"context"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	corelisters "k8s.io/client-go/listers/core/v1"
	"k8s.io/client-go/tools/record"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/sched/loop"
)

type controller struct {
	*loop.Controller
	client kubernetes.Interface
	events record.EventRecorder
	nodes  corelisters.NodeLister
	ranges []Range

	// Of the one worker alone, so without a lock:
	// given holds what was written and the cache may not show yet, by node UID.
	given map[types.UID][]netip.Prefix
	// last are the networks given last, of each range: the next search begins behind
	// it, so that the network of a node just removed is not given away while routes
	// and connections to it linger.
	last []netip.Prefix

	mu sync.Mutex
	// starved are the nodes that there was no network for. Each got an event
	// once, and is looked at again when a network has become free.
	starved map[types.UID]bool
}

// Range is cut into networks with prefixes of so many bits.
type Range struct {
	Cluster netip.Prefix
	Bits    int
}

// New returns the loop; it watches Nodes. ranges are one or two, of different
// families; a node's networks stand in their order.
func New(env loop.Env, ranges []Range) (loop.Loop, error) {
	for i := range ranges {
		r := &ranges[i]
		if r.Cluster = r.Cluster.Masked(); r.Bits < r.Cluster.Bits() || r.Bits > r.Cluster.Addr().BitLen() {
			return loop.Loop{}, fmt.Errorf("cut %v into networks of /%d: not a part of it", r.Cluster, r.Bits)
		}
	}
	informer := env.Informers.Core().V1().Nodes()
	c := &controller{
		client: env.Client, events: env.Events.For("node-ipam"), nodes: informer.Lister(),
		ranges: ranges, given: map[types.UID][]netip.Prefix{}, last: make([]netip.Prefix, len(ranges)), starved: map[types.UID]bool{},
	}
	c.Controller = loop.New("nodeipam", env, 1, c.reconcile) // one: allocation is a single thought
	loop.Watch(c.Controller, informer.Informer(), func(old, node *corev1.Node) {
		switch {
		case node == nil:
			if starved := c.setStarved(old, false); !starved {
				c.wakeStarved() // a network has become free
			}
		case len(lacks(node.Spec.PodCIDRs, c.ranges)) > 0 && node.DeletionTimestamp == nil && !c.isStarved(node):
			c.Enqueue(loop.KeyOf(node))
		}
	})
	return c.Loop(), nil
}

func (c *controller) isStarved(node *corev1.Node) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.starved[node.UID]
}

// setStarved notes whether a node is without a network because none is free.
// It reports whether that is new.
func (c *controller) setStarved(node *corev1.Node, starved bool) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	was := c.starved[node.UID]
	if starved {
		c.starved[node.UID] = true
	} else {
		delete(c.starved, node.UID)
	}
	return was != starved
}

func (c *controller) wakeStarved() {
	nodes, err := c.nodes.List(labels.Everything())
	if err != nil {
		return
	}
	for _, node := range nodes {
		if len(lacks(node.Spec.PodCIDRs, c.ranges)) > 0 {
			c.Enqueue(loop.KeyOf(node))
		}
	}
}

func (c *controller) reconcile(ctx context.Context, key loop.Key) error {
	node, err := c.nodes.Get(key.Name)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	missing := lacks(node.Spec.PodCIDRs, c.ranges)
	if len(missing) == 0 || node.DeletionTimestamp != nil {
		return nil
	}
	all, err := c.nodes.List(labels.Everything())
	if err != nil {
		return err
	}
	used := c.used(ctx, all)
	// One that has its first network already keeps it, and gets the second.
	texts := slices.Clone(node.Spec.PodCIDRs)
	given := slices.Clone(c.given[node.UID])
	for _, i := range missing {
		r := c.ranges[i]
		at := slices.IndexFunc(given, func(p netip.Prefix) bool { return r.Cluster.Contains(p.Addr()) })
		if at < 0 {
			prefix, ok := next(r.Cluster, r.Bits, c.last[i], used)
			if !ok {
				// Trying again would not help, and its events would fill the store:
				// what helps is a node that goes.
				if c.setStarved(node, true) {
					c.events.Eventf(node, corev1.EventTypeWarning, "CIDRNotAvailable", "no network of /%d is free in %v for node %s: %d nodes exist; give the cluster a larger --cluster-cidr, or remove nodes", r.Bits, r.Cluster, node.Name, len(all))
					klog.FromContext(ctx).Info("no pod network is free", "node", node.Name, "cluster", r.Cluster, "bits", r.Bits, "nodes", len(all))
				}
				return nil
			}
			at, given = len(given), append(given, prefix)
		}
		texts = append(texts, given[at].String())
	}
	c.setStarved(node, false)
	return c.give(ctx, node, texts, given)
}

// give writes the node's networks; given are those of them that are new.
func (c *controller) give(ctx context.Context, node *corev1.Node, texts []string, given []netip.Prefix) error {
	patch, err := json.Marshal(map[string]any{
		// The version makes sure that the node was not given another.
		"metadata": map[string]any{"uid": node.UID, "resourceVersion": node.ResourceVersion},
		"spec":     map[string]any{"podCIDR": texts[0], "podCIDRs": texts},
	})
	if err != nil {
		return fmt.Errorf("encode podCIDR: %w", err)
	}
	// Noted before it is sent and kept whatever the answer: an answer that got
	// lost must not let the network be given twice. It is freed with the node.
	c.given[node.UID] = given
	for i, r := range c.ranges {
		for _, p := range given {
			if r.Cluster.Contains(p.Addr()) {
				c.last[i] = p
			}
		}
	}
	if _, err := c.client.CoreV1().Nodes().Patch(ctx, node.Name, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
		if apierrors.IsNotFound(err) {
			return nil
		}
		return fmt.Errorf("give %v to node: %w", texts, err)
	}
	klog.FromContext(ctx).Info("node has a pod network", "node", node.Name, "podCIDRs", texts)
	return nil
}

// used returns all networks that nodes have or are about to have.
func (c *controller) used(ctx context.Context, all []*corev1.Node) []netip.Prefix {
	exists := map[types.UID]bool{}
	owner := map[netip.Prefix]string{}
	var out []netip.Prefix
	for _, node := range all {
		exists[node.UID] = true
		for _, text := range node.Spec.PodCIDRs {
			prefix, err := netip.ParsePrefix(text)
			if err != nil {
				continue // validation lets none pass
			}
			if other, twice := owner[prefix]; twice {
				klog.FromContext(ctx).Error(nil, "two nodes have the same pod network; delete one Node and let it register again",
					"podCIDR", prefix, "node", node.Name, "other", other)
			}
			owner[prefix] = node.Name
			out = append(out, prefix)
		}
	}
	for uid, given := range c.given {
		if exists[uid] {
			out = append(out, given...)
		} else {
			delete(c.given, uid)
		}
	}
	return out
}
