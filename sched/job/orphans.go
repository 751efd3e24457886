package job

import (
	"context"
	"fmt"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	batchlisters "k8s.io/client-go/listers/batch/v1"
	corelisters "k8s.io/client-go/listers/core/v1"

	"github.com/clusterd/clusterd/sched/internal/owned"
	"github.com/clusterd/clusterd/sched/internal/podctl"
	"github.com/clusterd/clusterd/sched/loop"
)

const strategic = types.StrategicMergePatchType

// orphans takes the tracking finalizer off pods whose Job does not exist any more, which
// could never be deleted otherwise. Its keys are pods.
type orphans struct {
	*loop.Controller
	client kubernetes.Interface
	jobs   batchlisters.JobLister
	pods   corelisters.PodLister
}

// NewOrphans returns the loop. It watches Jobs and Pods.
func NewOrphans(env loop.Env) (loop.Loop, error) {
	jobs := env.Informers.Batch().V1().Jobs()
	podInformer := env.Informers.Core().V1().Pods()
	if err := owned.Index(podInformer.Informer()); err != nil {
		return loop.Loop{}, fmt.Errorf("index pods by controller: %w", err)
	}
	o := &orphans{client: env.Client, jobs: jobs.Lister(), pods: podInformer.Lister()}
	o.Controller = loop.New("job-orphans", env, 2, o.reconcile)
	loop.Watch(o.Controller, podInformer.Informer(), func(_, pod *corev1.Pod) {
		if pod == nil || !tracked(pod) {
			return
		}
		if ref := metav1.GetControllerOf(pod); ref == nil || !o.known(pod.Namespace, ref) {
			o.Enqueue(loop.KeyOf(pod))
		}
	})
	loop.Watch(o.Controller, jobs.Informer(), func(old, j *batchv1.Job) {
		if j != nil {
			return
		}
		mine, err := owned.By[corev1.Pod](podInformer.Informer().GetIndexer(), old.UID)
		if err != nil {
			return
		}
		for _, pod := range mine {
			o.Enqueue(loop.KeyOf(pod))
		}
	})
	return o.Loop(), nil
}

func (o *orphans) known(namespace string, ref *metav1.OwnerReference) bool {
	j, err := o.jobs.Jobs(namespace).Get(ref.Name)
	return err == nil && j.UID == ref.UID
}

func (o *orphans) reconcile(ctx context.Context, key loop.Key) error {
	pod, err := o.pods.Pods(key.Namespace).Get(key.Name)
	if apierrors.IsNotFound(err) || err == nil && !tracked(pod) {
		return nil
	}
	if err != nil {
		return err
	}
	ref := metav1.GetControllerOf(pod)
	switch {
	case ref == nil:
		jobs, err := o.jobs.Jobs(key.Namespace).List(labels.Everything())
		if err != nil {
			return err
		}
		for _, j := range jobs {
			if j.DeletionTimestamp == nil && podctl.Matches(j.Spec.Selector, pod) {
				return nil // it may adopt the pod
			}
		}
	case ref.Kind != Kind.Kind || ref.APIVersion != Kind.GroupVersion().String() || o.known(key.Namespace, ref):
		return nil
	default:
		// The cache may be behind: the server decides.
		live, err := o.client.BatchV1().Jobs(key.Namespace).Get(ctx, ref.Name, metav1.GetOptions{})
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("read the pod's job: %w", err)
		}
		if err == nil && live.UID == ref.UID {
			return nil
		}
	}
	return releasePod(ctx, o.client, pod)
}
