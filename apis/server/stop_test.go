package server_test

import (
	"context"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/client-go/tools/cache"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

// withoutQuorum is a storage whose writes wait as long as they may.
type withoutQuorum struct {
	storage.Interface
	entered func()
}

func (s withoutQuorum) Create(ctx context.Context, _ string, _, _ runtime.Object, _ uint64) error {
	s.entered()
	<-ctx.Done()
	return context.Cause(ctx)
}

// TestStopCancelsOwnRequests stops a server while a client in its process waits
// for a write that cannot be committed: an event of the agent's.
func TestStopCancelsOwnRequests(t *testing.T) {
	entered, answered := make(chan struct{}), make(chan error, 1)
	var began time.Time
	t.Run("server", func(t *testing.T) { // stopped at its end
		s := servertest.Start(t, func(c *server.Config) {
			c.Storage = stuckEvents(c.Storage, sync.OnceFunc(func() { close(entered) }))
		})
		go func() {
			_, err := s.Client.CoreV1().Events("default").Create(context.Background(), &corev1.Event{
				ObjectMeta:     metav1.ObjectMeta{Name: "e"},
				InvolvedObject: corev1.ObjectReference{Namespace: "default"},
			}, metav1.CreateOptions{})
			answered <- err
		}()
		select {
		case <-entered:
		case err := <-answered:
			t.Fatalf("the write did not wait: %v", err)
		}
		began = time.Now()
	})
	if took := time.Since(began); took > 45*time.Second { // the write may wait for a minute
		t.Errorf("it took %s to stop", took)
	}
	if err := <-answered; err == nil {
		t.Error("the write was acknowledged")
	}
}

func stuckEvents(next generic.StorageDecorator, entered func()) generic.StorageDecorator {
	return func(config *storagebackend.ConfigForResource, prefix string, keyFunc func(runtime.Object) (string, error),
		newFunc, newListFunc func() runtime.Object, attrs storage.AttrFunc, trigger storage.IndexerFuncs, indexers *cache.Indexers,
	) (storage.Interface, factory.DestroyFunc, error) {
		s, destroy, err := next(config, prefix, keyFunc, newFunc, newListFunc, attrs, trigger, indexers)
		if err == nil && config.GroupResource.Resource == "events" {
			s = withoutQuorum{s, entered}
		}
		return s, destroy, err
	}
}
