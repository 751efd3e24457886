package fault

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
)

const (
	namespace = "fault"
	writers   = 4
	// pace of each writer: faults are to be met by writes, not by load.
	pace = 25 * time.Millisecond
	// requestTimeout bounds one request. Longer than an election, shorter than a fault.
	requestTimeout = 2 * time.Second
)

// ack is a write that the cluster acknowledged.
type ack struct {
	key      string
	n        int   // the value
	revision int64 // of the object, as answered
}

// acks are all acknowledged writes, in the order of each key.
type acks struct {
	mu  sync.Mutex
	all map[string][]ack
	// failed counts the writes that were refused or have an unknown outcome.
	failed atomic.Int64
}

func (a *acks) add(k ack) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.all[k.key] = append(a.all[k.key], k)
}

func (a *acks) count() (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, l := range a.all {
		n += len(l)
	}
	return n
}

// write counts one ConfigMap up, through one node after the other, until ctx
// ends. It alone writes it, so that whatever it reads tells of its own writes:
// a read must show the last acknowledged one or a later one, whose answer was
// lost.
func (r *run) write(ctx context.Context, key string) {
	tick := time.NewTicker(pace)
	defer tick.Stop()
	var last ack
	tried := 0 // the highest value ever sent
	// A node that failed is left alone for a moment: the others' writes are
	// what a fault is to be met by.
	avoid := make([]time.Time, len(r.apis))
	for turn := 0; ; turn++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		reads, writes := turn%len(r.apis), (turn+1)%len(r.apis)
		if now := time.Now(); now.Before(avoid[reads]) {
			continue
		} else if now.Before(avoid[writes]) {
			writes = (writes + 1) % len(r.apis)
		}
		api := r.api(reads)
		ask, cancel := context.WithTimeout(ctx, requestTimeout)
		cm, err := api.CoreV1().ConfigMaps(namespace).Get(ask, key, metav1.GetOptions{})
		cancel()
		if err != nil {
			avoid[reads] = time.Now().Add(requestTimeout)
			continue
		}
		n, revision, err := counted(cm)
		if err != nil {
			r.t.Errorf("%s: %v", key, err)
			return
		}
		if n < last.n || revision < last.revision || n > tried {
			r.t.Errorf("LOST OR STALE: n%d reads %s = %d at revision %d, after %d was acknowledged at %d and up to %d was written",
				reads+1, key, n, revision, last.n, last.revision, tried)
			return
		}
		// The write goes through another node than the read.
		api = r.api(writes)
		cm.Data["n"] = strconv.Itoa(n + 1)
		tried = max(tried, n+1)
		ask, cancel = context.WithTimeout(ctx, requestTimeout)
		cm, err = api.CoreV1().ConfigMaps(namespace).Update(ask, cm, metav1.UpdateOptions{})
		cancel()
		if err != nil {
			r.acks.failed.Add(1)
			avoid[writes] = time.Now().Add(requestTimeout)
			continue
		}
		n, revision, err = counted(cm)
		if err != nil || n != tried || revision <= last.revision {
			r.t.Errorf("%s: wrote %d after revision %d, was answered %d at revision %d (%v)", key, tried, last.revision, n, revision, err)
			return
		}
		last = ack{key, n, revision}
		r.acks.add(last)
	}
}

func counted(cm *corev1.ConfigMap) (n int, revision int64, err error) {
	if n, err = strconv.Atoi(cm.Data["n"]); err != nil {
		return 0, 0, fmt.Errorf("the value: %w", err)
	}
	if revision, err = strconv.ParseInt(cm.ResourceVersion, 10, 64); err != nil {
		return 0, 0, fmt.Errorf("the revision: %w", err)
	}
	return n, revision, nil
}

// churn scales and rolls the Deployment until ctx ends. What fails is tried
// again with other values.
func (r *run) churn(ctx context.Context) {
	tick := time.NewTicker(4 * time.Second)
	defer tick.Stop()
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		patch := fmt.Sprintf(`{"spec":{"replicas":%d}}`, replicas-i%4*2)
		if i%3 == 2 {
			patch = fmt.Sprintf(`{"spec":{"template":{"metadata":{"annotations":{"roll":"%d"}}}}}`, i)
		}
		_ = r.patchDeployment(ctx, r.api(i%len(r.apis)), patch)
	}
}

func (r *run) patchDeployment(ctx context.Context, api kubernetes.Interface, patch string) error {
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	_, err := api.AppsV1().Deployments(namespace).Patch(ctx, "web", types.MergePatchType, []byte(patch), metav1.PatchOptions{})
	return err
}
