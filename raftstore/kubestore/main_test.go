package kubestore

import (
	"flag"
	"testing"

	"go.uber.org/goleak"

	"github.com/clusterd/clusterd/leaktest"
)

// TestMain lets many tests run at once, because upstream's mostly sleep, and
// checks that every stream and cache has ended.
func TestMain(m *testing.M) {
	flag.Parse()
	if err := flag.Set("test.parallel", "16"); err != nil {
		panic(err)
	}
	leaktest.Main(m,
		// Waits out its three seconds after the cache has stopped.
		goleak.IgnoreAnyFunction("k8s.io/apiserver/pkg/storage/cacher.(*watchCache).waitUntilFreshLocked.func2"))
}
