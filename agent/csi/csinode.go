package csi

import (
	"context"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/klog/v2"
)

// nodeObject keeps the CSINode object of this node, and the labels of its Node
// that say where it is in a driver's topology.
type nodeObject struct {
	client kubernetes.Interface
	name   string
	node   Node
	wake   chan struct{}

	writing sync.Mutex // held while the object is written

	mu      sync.Mutex // guards all below
	drivers map[string]storagev1.CSINodeDriver
	settled bool // drivers that have not registered since the start are no more
}

func newNodeObject(client kubernetes.Interface, name string, node Node) *nodeObject {
	return &nodeObject{client: client, name: name, node: node, wake: make(chan struct{}, 1), drivers: map[string]storagev1.CSINodeDriver{}}
}

// entry is what a driver's answer says about the node.
func entryOf(name string, who *spec.NodeGetInfoResponse) (storagev1.CSINodeDriver, map[string]string) {
	d := storagev1.CSINodeDriver{Name: name, NodeID: who.GetNodeId()}
	segments := who.GetAccessibleTopology().GetSegments()
	d.TopologyKeys = slices.Sorted(maps.Keys(segments))
	if most := who.GetMaxVolumesPerNode(); most > 0 {
		count := int32(min(most, math.MaxInt32))
		d.Allocatable = &storagev1.VolumeNodeResources{Count: &count}
	}
	return d, segments
}

// add says that a driver is here. It returns when the API has it.
func (n *nodeObject) add(ctx context.Context, name string, who *spec.NodeGetInfoResponse) error {
	d, labels := entryOf(name, who)
	for key, value := range labels {
		if have, ok := n.node.Object().Labels[key]; ok && have != value {
			return fmt.Errorf("driver %s places the node at %s=%s, but the node has the label %s=%s: remove it, or correct the driver", name, key, value, key, have)
		}
	}
	if len(labels) > 0 {
		if err := n.node.SetLabels(ctx, labels); err != nil {
			return fmt.Errorf("label the node for driver %s: %w", name, err)
		}
	}
	n.mu.Lock()
	before, had := n.drivers[name]
	n.drivers[name] = d
	n.mu.Unlock()
	err := n.write(ctx)
	if err != nil {
		n.mu.Lock()
		if had {
			n.drivers[name] = before
		} else {
			delete(n.drivers, name)
		}
		n.mu.Unlock()
		return fmt.Errorf("write CSINode %s for driver %s: %w", n.name, name, err)
	}
	return nil
}

// remove says that a driver is no more.
func (n *nodeObject) remove(name string) {
	n.mu.Lock()
	delete(n.drivers, name)
	n.mu.Unlock()
	n.poke()
}

// settle says that every driver present had its chance to register.
func (n *nodeObject) settle() {
	n.mu.Lock()
	first := !n.settled
	n.settled = true
	n.mu.Unlock()
	if first {
		n.poke()
	}
}

func (n *nodeObject) poke() {
	select {
	case n.wake <- struct{}{}:
	default:
	}
}

// period is how often the object is looked at: it may have been deleted.
const period = time.Minute

// run keeps the object until ctx ends.
func (n *nodeObject) run(ctx context.Context) {
	delay := 100 * time.Millisecond
	failed := false
	for {
		wait := period
		if err := n.write(ctx); err != nil && ctx.Err() == nil {
			if !failed {
				klog.FromContext(ctx).Info("CSINode is not written yet, will retry", "err", err)
			}
			failed = true
			wait, delay = delay, min(2*delay, 10*time.Second)
		} else {
			failed, delay = false, 100*time.Millisecond
		}
		timer := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-n.wake:
			timer.Stop()
		case <-timer.C:
		}
	}
}

// write brings the object up to date. It belongs to the Node's object, and goes
// with it.
func (n *nodeObject) write(ctx context.Context) error {
	n.writing.Lock()
	defer n.writing.Unlock()
	node := n.node.Object()
	if node.UID == "" {
		return fmt.Errorf("node %s is not registered yet", n.name)
	}
	owner := metav1.OwnerReference{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}
	api := n.client.StorageV1().CSINodes()
	for {
		have, err := api.Get(ctx, n.name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) {
			fresh := &storagev1.CSINode{ObjectMeta: metav1.ObjectMeta{Name: n.name, OwnerReferences: []metav1.OwnerReference{owner}}}
			fresh.Spec.Drivers = n.wanted(nil)
			_, err = api.Create(ctx, fresh, metav1.CreateOptions{})
			if apierrors.IsAlreadyExists(err) {
				continue
			}
			return err
		}
		if err != nil {
			return err
		}
		next := have.DeepCopy()
		next.OwnerReferences = []metav1.OwnerReference{owner}
		next.Spec.Drivers = n.wanted(have.Spec.Drivers)
		if equality.Semantic.DeepEqual(next, have) {
			return nil
		}
		// What a driver has once said of a node cannot be changed, only unsaid.
		if changed := without(next.Spec.Drivers, have.Spec.Drivers); len(changed) < len(next.Spec.Drivers) {
			between := next.DeepCopy()
			between.Spec.Drivers = changed
			if next, err = api.Update(ctx, between, metav1.UpdateOptions{}); err == nil {
				next = next.DeepCopy()
				next.Spec.Drivers = n.wanted(have.Spec.Drivers)
			}
		}
		if err == nil {
			_, err = api.Update(ctx, next, metav1.UpdateOptions{})
		}
		if !apierrors.IsConflict(err) {
			return err
		}
	}
}

// wanted is the list of drivers: those registered, and, until every driver had a
// chance to register again, those that were there before.
func (n *nodeObject) wanted(have []storagev1.CSINodeDriver) []storagev1.CSINodeDriver {
	n.mu.Lock()
	defer n.mu.Unlock()
	all := maps.Clone(n.drivers)
	if !n.settled {
		for _, d := range have {
			if _, ok := all[d.Name]; !ok {
				all[d.Name] = d
			}
		}
	}
	return slices.SortedFunc(maps.Values(all), func(a, b storagev1.CSINodeDriver) int { return strings.Compare(a.Name, b.Name) })
}

// without is next less the drivers that say something else in have.
func without(next, have []storagev1.CSINodeDriver) []storagev1.CSINodeDriver {
	return slices.DeleteFunc(slices.Clone(next), func(d storagev1.CSINodeDriver) bool {
		return slices.ContainsFunc(have, func(was storagev1.CSINodeDriver) bool {
			d, was := d, was
			d.Allocatable, was.Allocatable = nil, nil
			return d.Name == was.Name && !equality.Semantic.DeepEqual(d, was)
		})
	})
}
