package agent

import (
	"context"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/clusterd/clusterd/apis/names"
)

// Membership is this node's in its cluster. Methods may block until ctx ends, and are
// called by one goroutine.
type Membership interface {
	// MayLeave returns why the cluster cannot do without this node; nil: it can.
	MayLeave(ctx context.Context) error
	// Leave takes it out of the cluster; the process ends soon after.
	Leave(ctx context.Context) error
}

// member is a shutdown.Member.
type member struct {
	Membership
	client kubernetes.Interface
	node   string
}

// MayLeave implements shutdown.Member.
func (m member) MayLeave(ctx context.Context) error {
	if err := m.holdsNoData(ctx); err != nil {
		return err
	}
	return m.Membership.MayLeave(ctx)
}

// Leave implements shutdown.Member. A claim may have been bound meanwhile.
func (m member) Leave(ctx context.Context) error {
	if err := m.holdsNoData(ctx); err != nil {
		return err
	}
	return m.Membership.Leave(ctx)
}

// holdsNoData refuses, by an error, while volumes have their only data in directories of
// this node: a machine that has left comes back by `clusterd reset`, which removes them.
func (m member) holdsNoData(ctx context.Context) error {
	list, err := m.client.CoreV1().PersistentVolumes().List(ctx, metav1.ListOptions{LabelSelector: labels.Set{names.LocalPathNode: m.node}.String()})
	if err != nil {
		return fmt.Errorf("list the volumes of this node: %w", err)
	}
	var claims []string
	for _, v := range list.Items {
		if v.DeletionTimestamp != nil || v.Status.Phase == v1.VolumeReleased && v.Spec.PersistentVolumeReclaimPolicy == v1.PersistentVolumeReclaimDelete {
			continue
		}
		name := "volume " + v.Name
		if c := v.Spec.ClaimRef; c != nil {
			name = c.Namespace + "/" + c.Name
		}
		claims = append(claims, name)
	}
	if len(claims) == 0 {
		return nil
	}
	slices.Sort(claims)
	more := ""
	if n := len(claims) - mostClaims; n > 0 {
		claims, more = claims[:mostClaims], fmt.Sprintf(" and %d more", n)
	}
	return fmt.Errorf("the data of claims %s%s are on this node alone, and clusterd reset removes them: copy them to another node and delete the claims, then clusterctl members rm %s", strings.Join(claims, ", "), more, m.node)
}

// mostClaims is how many an error names.
const mostClaims = 10

// Evict implements shutdown.Member.
func (m member) Evict(ctx context.Context, pod *v1.Pod) error {
	return m.client.PolicyV1().Evictions(pod.Namespace).Evict(ctx, &policyv1.Eviction{
		ObjectMeta:    metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name},
		DeleteOptions: &metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &pod.UID}},
	})
}

// Cordon implements shutdown.Member.
func (m member) Cordon(ctx context.Context, on bool) (bool, error) {
	nodes := m.client.CoreV1().Nodes()
	n, err := nodes.Get(ctx, m.node, metav1.GetOptions{})
	if err != nil || n.Spec.Unschedulable == on {
		return false, err
	}
	_, err = nodes.Patch(ctx, m.node, types.MergePatchType, fmt.Appendf(nil, `{"spec":{"unschedulable":%t}}`, on), metav1.PatchOptions{})
	return err == nil, err
}
