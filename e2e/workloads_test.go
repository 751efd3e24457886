package e2e

import (
	"context"
	"fmt"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/clusterd/clusterd/features"
)

// lateJobStops: a Job past its deadline fails and its pods go.
func lateJobStops(e *env, ns string) {
	features.Shows(e.t, 111)
	e.ctlIn(lateJob, "-n", ns, "apply", "-f", "-")
	e.eventually("the late job has failed and its pod is gone", func(ctx context.Context) error {
		j, err := e.api.BatchV1().Jobs(ns).Get(ctx, "late", metav1.GetOptions{})
		if err != nil {
			return err
		}
		pods, err := e.api.CoreV1().Pods(ns).List(ctx, metav1.ListOptions{LabelSelector: "job-name=late"})
		if err != nil {
			return err
		}
		for _, c := range j.Status.Conditions {
			if c.Type == batchv1.JobFailed && c.Status == corev1.ConditionTrue && c.Reason == batchv1.JobReasonDeadlineExceeded && len(pods.Items) == 0 {
				return nil
			}
		}
		return fmt.Errorf("%d pods, status %+v", len(pods.Items), j.Status)
	})
}

const lateJob = `
apiVersion: batch/v1
kind: Job
metadata: {name: late}
spec:
  activeDeadlineSeconds: 2
  template:
    spec:
      restartPolicy: Never
      terminationGracePeriodSeconds: 1
      containers: [{name: main, image: "clusterd.local/hello:1", args: [sleep]}]
`

// jobThroughLeaderLoss kills the leader's clusterd once some pods of a Job have
// ended: in the end every index was counted once, with no failure.
func (e *env) jobThroughLeaderLoss(ns string) {
	e.t.Helper()
	leader := e.leader()
	e.use(e.other(leader))
	e.ctl("-n", ns, "apply", "-f", "../examples/apps/job.yaml")
	e.eventually("some pods have ended", func(ctx context.Context) error {
		j, err := e.api.BatchV1().Jobs(ns).Get(ctx, "pieces", metav1.GetOptions{})
		if err == nil && j.Status.Succeeded < 2 {
			err = fmt.Errorf("status %+v", j.Status)
		}
		return err
	})
	if err := e.Kill(leader); err != nil {
		e.t.Fatal(err)
	}
	if err := e.Start(e.t.Context(), leader); err != nil {
		e.t.Fatal(err)
	}
	e.eventually("the job is complete", func(ctx context.Context) error {
		j, err := e.api.BatchV1().Jobs(ns).Get(ctx, "pieces", metav1.GetOptions{})
		if err != nil {
			return err
		}
		if j.Status.CompletionTime == nil {
			return fmt.Errorf("status %+v", j.Status)
		}
		if s := j.Status; s.Succeeded != 12 || s.CompletedIndexes != "0-11" || s.Failed != 0 || s.Active != 0 {
			e.t.Errorf("counted %+v", s)
		}
		return nil
	})
	pods, err := e.api.CoreV1().Pods(ns).List(e.t.Context(), metav1.ListOptions{LabelSelector: "job-name=pieces"})
	if err != nil {
		e.t.Fatal(err)
	}
	if len(pods.Items) != 12 {
		e.t.Errorf("%d pods for 12 pieces", len(pods.Items))
	}
	for _, p := range pods.Items {
		if len(p.Finalizers) != 0 {
			e.t.Errorf("%s still has finalizers %v", p.Name, p.Finalizers)
		}
	}
}
