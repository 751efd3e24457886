package main

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
)

// observer follows the hollow nodes and their pods at one server, which lives.
type observer struct {
	client kubernetes.Interface

	mu      sync.Mutex
	ready   map[string]bool // by node
	lost    []string        // nodes that were Ready and then not, with the time
	running map[string]bool // by UID
}

func observe(ctx context.Context, client kubernetes.Interface) (*observer, error) {
	o := &observer{client: client, ready: map[string]bool{}, running: map[string]bool{}}
	f := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithTransform(trim))
	for _, i := range []cache.SharedIndexInformer{f.Core().V1().Nodes().Informer(), f.Core().V1().Pods().Informer()} {
		if _, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: o.see, UpdateFunc: func(_, now any) { o.see(now) }, DeleteFunc: o.gone}); err != nil {
			return nil, err
		}
	}
	f.StartWithContext(ctx)
	for _, ok := range f.WaitForCacheSync(ctx.Done()) {
		if !ok {
			return nil, ctx.Err()
		}
	}
	return o, nil
}

// trim keeps what the observer looks at.
func trim(obj any) (any, error) {
	switch x := obj.(type) {
	case *corev1.Node:
		return &corev1.Node{ObjectMeta: x.ObjectMeta, Status: corev1.NodeStatus{Conditions: x.Status.Conditions}}, nil
	case *corev1.Pod:
		return &corev1.Pod{ObjectMeta: x.ObjectMeta, Status: corev1.PodStatus{Conditions: x.Status.Conditions}}, nil
	}
	return obj, nil
}

func (o *observer) see(obj any) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch x := obj.(type) {
	case *corev1.Node:
		if !strings.HasPrefix(x.Name, namePrefix) {
			return
		}
		for _, c := range x.Status.Conditions {
			if c.Type != corev1.NodeReady {
				continue
			}
			is := c.Status == corev1.ConditionTrue
			if o.ready[x.Name] && !is {
				o.lost = append(o.lost, fmt.Sprintf("%s %s at %s: %s", x.Name, c.Status, time.Now().Format(time.TimeOnly), c.Reason))
			}
			o.ready[x.Name] = is
		}
	case *corev1.Pod:
		for _, c := range x.Status.Conditions {
			if c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue {
				o.running[string(x.UID)] = true
			}
		}
	}
}

func (o *observer) gone(obj any) {
	o.mu.Lock()
	defer o.mu.Unlock()
	switch x := obj.(type) {
	case *corev1.Node:
		delete(o.ready, x.Name)
	case *corev1.Pod:
		delete(o.running, string(x.UID))
	}
}

// now says how many nodes are Ready and pods run, and which nodes were lost.
func (o *observer) now() (ready, running int, lost []string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, is := range o.ready {
		if is {
			ready++
		}
	}
	return ready, len(o.running), o.lost
}

// await waits until so many nodes are Ready and so many pods run.
func (o *observer) await(ctx context.Context, nodes, pods int, within time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	for {
		ready, running, _ := o.now()
		if ready >= nodes && running >= pods {
			return nil
		}
		if err := sleep(ctx, 20*time.Millisecond); err != nil {
			return fmt.Errorf("%d of %d nodes are Ready, %d of %d pods run: %w", ready, nodes, running, pods, err)
		}
	}
}

// leader is the name of the server that leads.
func leader(ctx context.Context, client kubernetes.Interface) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for {
		var list struct {
			Members []struct {
				Name   string
				Leader bool
			}
		}
		b, err := client.Discovery().RESTClient().Get().AbsPath("/clusterd/v1/members").Do(ctx).Raw()
		if err == nil {
			err = json.Unmarshal(b, &list)
		}
		for _, m := range list.Members {
			if m.Leader {
				return m.Name, nil
			}
		}
		if again := sleep(ctx, 100*time.Millisecond); again != nil {
			return "", fmt.Errorf("find the leader: %w", errOr(err, again))
		}
	}
}

func errOr(err, instead error) error {
	if err != nil {
		return err
	}
	return instead
}
