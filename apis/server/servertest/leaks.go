package servertest

import "go.uber.org/goleak"

// LeftRunning are the goroutines that the libraries below an API server leave
// running after it has ended: what a test that starts one passes to
// leaktest.Main. Whether one of them is met depends on how long the
// test's last part takes, so every package names them all.
func LeftRunning() []goleak.Option {
	return []goleak.Option{
		// klog's check of its own settings runs for as long as the process.
		goleak.IgnoreAnyFunction("k8s.io/apimachinery/pkg/util/wait.Forever"),
		// Waits out its three seconds after the cache has stopped.
		goleak.IgnoreAnyFunction("k8s.io/apiserver/pkg/storage/cacher.(*watchCache).waitUntilFreshLocked.func2"),
		// An audit log's, which removes old files: its Close does not end it.
		goleak.IgnoreAnyFunction("gopkg.in/natefinch/lumberjack%2ev2.(*Logger).millRun"),
		// A stream whose connection ended before the reply to it was written: what
		// writes to it waits for that reply for ever (spdystream's SendReply).
		goleak.IgnoreAnyFunction("github.com/moby/spdystream.(*Stream).waitWriteReply"),
	}
}
