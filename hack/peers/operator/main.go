// Command operator is an operator of controller-runtime, as many are: a cache, a
// finalizer, leader election, webhooks that fill in, judge and convert. For each
// Page it keeps a Deployment and a Service, and a ConfigMap that no owner leads
// to, which its finalizer removes.
package main

import (
	"context"
	"fmt"
	"os"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	clientgoscheme "k8s.io/client-go/kubernetes/scheme"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller/controllerutil"
	"sigs.k8s.io/controller-runtime/pkg/healthz"
	"sigs.k8s.io/controller-runtime/pkg/log/zap"
	metrics "sigs.k8s.io/controller-runtime/pkg/metrics/server"
	"sigs.k8s.io/controller-runtime/pkg/webhook"
)

const (
	image     = "clusterd.local/hello:1"
	finalizer = group + "/record"
)

func main() {
	ctrl.SetLogger(zap.New())
	if err := run(ctrl.SetupSignalHandler()); err != nil {
		fmt.Fprintln(os.Stderr, "operator:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context) error {
	config, err := ctrl.GetConfig()
	if err != nil {
		return err
	}
	scheme := runtime.NewScheme()
	if err := clientgoscheme.AddToScheme(scheme); err != nil {
		return err
	}
	addKnownTypes(scheme)
	namespace := os.Getenv("NAMESPACE")
	mgr, err := ctrl.NewManager(config, ctrl.Options{
		Scheme:                  scheme,
		Cache:                   cache.Options{DefaultNamespaces: map[string]cache.Config{namespace: {}}},
		LeaderElection:          true,
		LeaderElectionID:        "pages." + group,
		LeaderElectionNamespace: namespace,
		HealthProbeBindAddress:  ":8081",
		Metrics:                 metrics.Options{BindAddress: ":8080"},
		WebhookServer:           webhook.NewServer(webhook.Options{Port: 9443, CertDir: "/certs"}),
	})
	if err != nil {
		return err
	}
	if err := mgr.AddReadyzCheck("webhooks", mgr.GetWebhookServer().StartedChecker()); err != nil {
		return err
	}
	if err := mgr.AddHealthzCheck("ping", healthz.Ping); err != nil {
		return err
	}
	if err := ctrl.NewWebhookManagedBy(mgr, &Page{}).WithDefaulter(rules{}).WithValidator(rules{}).Complete(); err != nil {
		return err
	}
	r := &reconciler{client: mgr.GetClient(), scheme: scheme}
	if err := ctrl.NewControllerManagedBy(mgr).For(&Page{}).Owns(&appsv1.Deployment{}).Owns(&corev1.Service{}).Complete(r); err != nil {
		return err
	}
	return mgr.Start(ctx)
}

type reconciler struct {
	client client.Client
	scheme *runtime.Scheme
}

// Reconcile makes what one Page asks for.
func (r *reconciler) Reconcile(ctx context.Context, req ctrl.Request) (ctrl.Result, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	var page Page
	if err := r.client.Get(ctx, req.NamespacedName, &page); err != nil {
		return ctrl.Result{}, client.IgnoreNotFound(err)
	}
	record := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "record-" + page.Name, Namespace: page.Namespace}}
	if page.DeletionTimestamp != nil {
		if err := client.IgnoreNotFound(r.client.Delete(ctx, record)); err != nil {
			return ctrl.Result{}, err
		}
		before := page.DeepCopyObject().(*Page)
		if !controllerutil.RemoveFinalizer(&page, finalizer) {
			return ctrl.Result{}, nil
		}
		return ctrl.Result{}, client.IgnoreNotFound(r.client.Patch(ctx, &page, client.MergeFrom(before)))
	}
	if controllerutil.AddFinalizer(&page, finalizer) {
		if err := r.client.Update(ctx, &page); err != nil {
			return ctrl.Result{}, err
		}
	}
	if _, err := controllerutil.CreateOrUpdate(ctx, r.client, record, func() error {
		record.Data = map[string]string{"message": page.Spec.Message}
		return nil
	}); err != nil {
		return ctrl.Result{}, err
	}
	deployment, err := r.serve(ctx, &page)
	if err != nil {
		return ctrl.Result{}, err
	}
	before := page.DeepCopyObject().(*Page)
	page.Status = PageStatus{Ready: deployment.Status.ReadyReplicas, By: os.Getenv("POD_NAME")}
	return ctrl.Result{}, r.client.Status().Patch(ctx, &page, client.MergeFrom(before))
}

// serve makes the servers of a Page and the name in front of them.
func (r *reconciler) serve(ctx context.Context, page *Page) (*appsv1.Deployment, error) {
	labels := map[string]string{"page": page.Name}
	meta := metav1.ObjectMeta{Name: page.Name, Namespace: page.Namespace}
	deployment := &appsv1.Deployment{ObjectMeta: meta}
	_, err := controllerutil.CreateOrUpdate(ctx, r.client, deployment, func() error {
		deployment.Spec.Replicas = page.Spec.Replicas
		deployment.Spec.Selector = &metav1.LabelSelector{MatchLabels: labels}
		deployment.Spec.Template.Labels = labels
		if len(deployment.Spec.Template.Spec.Containers) == 0 {
			deployment.Spec.Template.Spec.Containers = []corev1.Container{{Name: "main", Image: image}}
		}
		deployment.Spec.Template.Spec.Containers[0].Env = []corev1.EnvVar{{Name: "MESSAGE", Value: page.Spec.Message}}
		return controllerutil.SetControllerReference(page, deployment, r.scheme)
	})
	if err != nil {
		return nil, err
	}
	service := &corev1.Service{ObjectMeta: meta}
	_, err = controllerutil.CreateOrUpdate(ctx, r.client, service, func() error {
		service.Spec.Selector = labels
		if len(service.Spec.Ports) == 0 {
			service.Spec.Ports = []corev1.ServicePort{{Port: 8080}}
		}
		return controllerutil.SetControllerReference(page, service, r.scheme)
	})
	return deployment, err
}
