package sched

import (
	"context"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/kubernetes/fake"
	"k8s.io/client-go/tools/cache"
)

// TestSharedInformers: the informers that loops asked for are found by their
// kinds, others are not made.
func TestSharedInformers(t *testing.T) {
	client := fake.NewSimpleClientset()
	s := newSharedInformers(client)
	s.Core().V1().Pods().Informer()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.loop().Run(ctx) }()
	defer func() { cancel(); <-ended }()

	pods := s.of(ctx, corev1.SchemeGroupVersion.WithResource("pods"), "Pod")
	if pods == nil {
		t.Fatal("pods: no informer, though a loop asked for one")
	}
	if !cache.WaitForCacheSync(ctx.Done(), pods.HasSynced) { // it is the one that runs
		t.Fatal("pods: the informer does not run")
	}
	if got := s.of(ctx, appsv1.SchemeGroupVersion.WithResource("deployments"), "Deployment"); got != nil {
		t.Error("deployments: an informer, though no loop asked for one")
	}
	if got := s.of(ctx, schema.GroupVersionResource{Group: "example.com", Version: "v1", Resource: "widgets"}, "Widget"); got != nil {
		t.Error("a custom kind has an informer")
	}
}
