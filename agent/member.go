package agent

import (
	"context"
	"fmt"

	v1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
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
