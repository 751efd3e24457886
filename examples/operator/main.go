// Command operator is an example of a controller for a kind of one's own: for
// each Site it applies a Deployment and a Service, and tells in the Site's
// status how many servers are ready. It is a plain client of the API, as any
// program in a pod may be: its rights are the ServiceAccount's of its pod.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/util/workqueue"
)

var (
	sites       = schema.GroupVersionResource{Group: "example.clusterd.local", Version: "v1", Resource: "sites"}
	deployments = schema.GroupVersionResource{Group: "apps", Version: "v1", Resource: "deployments"}
	services    = schema.GroupVersionResource{Version: "v1", Resource: "services"}
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx); err != nil {
		fmt.Fprintln(os.Stderr, "operator:", err)
		os.Exit(1)
	}
}

type operator struct {
	client dynamic.Interface
	sites  cache.Store
	queue  workqueue.TypedRateLimitingInterface[cache.ObjectName]
}

// run reconciles the Sites of its own namespace until ctx ends.
func run(ctx context.Context) error {
	config, err := rest.InClusterConfig()
	if err != nil {
		return err
	}
	client, err := dynamic.NewForConfig(config)
	if err != nil {
		return err
	}
	o := &operator{client: client, queue: workqueue.NewTypedRateLimitingQueue(workqueue.DefaultTypedControllerRateLimiter[cache.ObjectName]())}
	var watching, working sync.WaitGroup
	defer watching.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	// A Site that changed, and a Deployment that belongs to one.
	var changedSite, changedDeployment cache.Controller
	o.sites, changedSite = o.informer(sites, func(site metav1.Object) (cache.ObjectName, bool) { return cache.MetaObjectToName(site), true })
	_, changedDeployment = o.informer(deployments, ownerOf)
	watching.Go(func() { changedSite.RunWithContext(ctx) })
	watching.Go(func() { changedDeployment.RunWithContext(ctx) })
	if !cache.WaitForCacheSync(ctx.Done(), changedSite.HasSynced, changedDeployment.HasSynced) {
		return nil
	}
	fmt.Println("watching sites")
	working.Go(func() { o.work(ctx) })
	<-ctx.Done()
	o.queue.ShutDown()
	working.Wait()
	return nil
}

// informer watches a kind in the operator's namespace and queues what key makes
// of each object that comes, changes or goes.
func (o *operator) informer(kind schema.GroupVersionResource, key func(metav1.Object) (cache.ObjectName, bool)) (cache.Store, cache.Controller) {
	objects := o.client.Resource(kind).Namespace(os.Getenv("NAMESPACE"))
	queue := func(obj any) {
		if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
			obj = gone.Obj
		}
		if name, ok := key(obj.(metav1.Object)); ok {
			o.queue.Add(name)
		}
	}
	return cache.NewInformerWithOptions(cache.InformerOptions{
		ListerWatcher: &cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, opts metav1.ListOptions) (runtime.Object, error) {
				return objects.List(ctx, opts)
			},
			WatchFuncWithContext: objects.Watch,
		},
		ObjectType: &unstructured.Unstructured{},
		Handler:    cache.ResourceEventHandlerFuncs{AddFunc: queue, UpdateFunc: func(_, obj any) { queue(obj) }, DeleteFunc: queue},
	})
}

// work takes one Site after the other; one that failed comes again, later each
// time.
func (o *operator) work(ctx context.Context) {
	for {
		name, ended := o.queue.Get()
		if ended {
			return
		}
		if err := o.reconcile(ctx, name); err != nil {
			fmt.Fprintf(os.Stderr, "site %s: %v\n", name, err)
			o.queue.AddRateLimited(name)
		} else {
			o.queue.Forget(name)
		}
		o.queue.Done(name)
	}
}

// ownerOf is the Site that controls an object.
func ownerOf(obj metav1.Object) (cache.ObjectName, bool) {
	owner := metav1.GetControllerOf(obj)
	if owner == nil || owner.Kind != "Site" {
		return cache.ObjectName{}, false
	}
	return cache.NewObjectName(obj.GetNamespace(), owner.Name), true
}

// reconcile makes what one Site asks for. What a Site leaves behind when it is
// deleted, the garbage collector takes: everything here is owned by it.
func (o *operator) reconcile(ctx context.Context, name cache.ObjectName) error {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	obj, exists, err := o.sites.GetByKey(name.String())
	if err != nil || !exists {
		return err
	}
	site := obj.(*unstructured.Unstructured)
	mine := metav1.ApplyOptions{FieldManager: "site-operator", Force: true}
	deployment, err := o.client.Resource(deployments).Namespace(site.GetNamespace()).Apply(ctx, site.GetName(), deploymentOf(site), mine)
	if err != nil {
		return err
	}
	if _, err := o.client.Resource(services).Namespace(site.GetNamespace()).Apply(ctx, site.GetName(), serviceOf(site), mine); err != nil {
		return err
	}
	ready, _, err := unstructured.NestedInt64(deployment.Object, "status", "readyReplicas")
	if err != nil {
		return err
	}
	status := object("example.clusterd.local/v1", "Site", site)
	status.Object["status"] = map[string]any{"ready": ready, "observedGeneration": site.GetGeneration()}
	_, err = o.client.Resource(sites).Namespace(site.GetNamespace()).ApplyStatus(ctx, site.GetName(), status, mine)
	return err
}

func object(apiVersion, kind string, site *unstructured.Unstructured) *unstructured.Unstructured {
	return &unstructured.Unstructured{Object: map[string]any{
		"apiVersion": apiVersion, "kind": kind,
		"metadata": map[string]any{"name": site.GetName(), "namespace": site.GetNamespace()},
	}}
}

// owned is an object that goes with its Site.
func owned(apiVersion, kind string, site *unstructured.Unstructured, spec map[string]any) *unstructured.Unstructured {
	obj := object(apiVersion, kind, site)
	obj.SetOwnerReferences([]metav1.OwnerReference{*metav1.NewControllerRef(site, sites.GroupVersion().WithKind("Site"))})
	obj.Object["spec"] = spec
	return obj
}

func deploymentOf(site *unstructured.Unstructured) *unstructured.Unstructured {
	message, _, _ := unstructured.NestedString(site.Object, "spec", "message") // the schema says that it is one
	replicas, _, _ := unstructured.NestedInt64(site.Object, "spec", "replicas")
	labels := map[string]any{"site": site.GetName()}
	return owned("apps/v1", "Deployment", site, map[string]any{
		"replicas": replicas,
		"selector": map[string]any{"matchLabels": labels},
		"template": map[string]any{
			"metadata": map[string]any{"labels": labels},
			"spec": map[string]any{
				"terminationGracePeriodSeconds": int64(1),
				"containers": []any{map[string]any{
					"name": "web", "image": "clusterd.local/hello:1",
					"env":            []any{map[string]any{"name": "MESSAGE", "value": message}},
					"readinessProbe": map[string]any{"httpGet": map[string]any{"path": "/healthz", "port": int64(8080)}, "periodSeconds": int64(1)},
				}},
			},
		},
	})
}

func serviceOf(site *unstructured.Unstructured) *unstructured.Unstructured {
	return owned("v1", "Service", site, map[string]any{
		"selector": map[string]any{"site": site.GetName()},
		"ports":    []any{map[string]any{"port": int64(80), "targetPort": int64(8080)}},
	})
}
