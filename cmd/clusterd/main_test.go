package main

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

// asClusterd is set for a copy of this program that is clusterd.
const asClusterd = "CLUSTERD_DEBUG_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(asClusterd) != "" {
		main()
		return
	}
	// The library's check that logging works runs for as long as the process.
	goleak.VerifyTestMain(m, goleak.IgnoreAnyFunction("k8s.io/apimachinery/pkg/util/wait.Forever"),
		// Waits out its three seconds after the cache has stopped.
		goleak.IgnoreAnyFunction("k8s.io/apiserver/pkg/storage/cacher.(*watchCache).waitUntilFreshLocked.func2"),
		// A log's, which removes old files and has no end: Close leaves it.
		goleak.IgnoreAnyFunction("gopkg.in/natefinch/lumberjack%2ev2.(*Logger).millRun"))
}
