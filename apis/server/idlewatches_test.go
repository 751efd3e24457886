package server_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"runtime/pprof"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
	"github.com/clusterd/clusterd/raftstore/kubestore"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

const (
	// watcherEnv makes TestWatcherProcess the client of a benchmark.
	watcherEnv = "CLUSTERD_TEST_WATCHER"
	// watchPath is what is watched: nothing happens there.
	watchPath = "/api/v1/namespaces/default/configmaps?watch=true"
)

// watcher is what the client's process is to do.
type watcher struct {
	Host          string
	CA, Cert, Key []byte
	Watches       int
}

// BenchmarkIdleWatches is what a server over the store of a member needs for a watch
// at which nothing happens, with 10 000 of them: of clients in its process, whose part
// is counted too, and of clients elsewhere, which are a process of their own here.
// CLUSTERD_HEAP=FOLDER writes a profile of the heap with all of them open.
func BenchmarkIdleWatches(b *testing.B) {
	const watches = 10_000
	member := raftstoretest.New(b, 1, raftstoretest.Steady)
	member.Leader()
	s := servertest.Start(b, func(c *server.Config) {
		c.Storage = kubestore.NewDecorator(kubestore.Config{Store: member.Store(member.IDs()[0]), Cache: true})
		c.Streams = watches
	})
	admin := s.Listen(b)
	for _, c := range []struct {
		name string
		open func(b *testing.B) (closed func())
	}{
		{"in-process", func(b *testing.B) func() {
			open := make([]io.ReadCloser, watches)
			for i := range open {
				var err error
				if open[i], err = s.Client.CoreV1().RESTClient().Get().RequestURI(watchPath).Stream(b.Context()); err != nil {
					b.Fatal(err)
				}
			}
			return func() {
				for _, one := range open {
					_ = one.Close()
				}
			}
		}},
		{"tls", func(b *testing.B) func() { return watchFromOutside(b, admin, watches) }},
	} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				heap, stacks := inUse()
				goroutines := runtime.NumGoroutine()
				closed := c.open(b)
				heapAfter, stacksAfter := inUse()
				b.ReportMetric((heapAfter-heap)/watches, "heapB/watch")
				b.ReportMetric((stacksAfter-stacks)/watches, "stackB/watch")
				b.ReportMetric(float64(runtime.NumGoroutine()-goroutines)/watches, "goroutines/watch")
				if dir := os.Getenv("CLUSTERD_HEAP"); dir != "" {
					file, err := os.Create(fmt.Sprintf("%s/idle-watches-%s.pprof", dir, c.name))
					if err != nil {
						b.Fatal(err)
					}
					if err := pprof.WriteHeapProfile(file); err != nil {
						b.Fatal(err)
					}
					_ = file.Close()
				}
				closed()
			}
		})
	}
}

// inUse is the memory of objects that live, and of stacks. A stack shrinks by half in
// each collection.
func inUse() (heap, stacks float64) {
	for range 5 {
		runtime.GC()
	}
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return float64(m.HeapAlloc), float64(m.StackInuse)
}

// watchFromOutside has a process open so many watches, and returns when it has.
func watchFromOutside(b *testing.B, config *rest.Config, watches int) (closed func()) {
	b.Helper()
	program, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	cmd := exec.CommandContext(b.Context(), program, "-test.run", "^TestWatcherProcess$")
	cmd.Env = append(os.Environ(), watcherEnv+"=1")
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		b.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		b.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	task := watcher{Host: config.Host, CA: config.CAData, Cert: config.CertData, Key: config.KeyData, Watches: watches}
	if err := json.NewEncoder(in).Encode(task); err != nil {
		b.Fatal(err)
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "open\n" {
		b.Fatalf("the client's process said %q: %v", line, err)
	}
	return func() {
		_ = in.Close()
		_ = cmd.Wait()
	}
}

// TestWatcherProcess is the client of BenchmarkIdleWatches: it opens watches and keeps
// them until its standard input ends.
func TestWatcherProcess(t *testing.T) {
	if os.Getenv(watcherEnv) == "" {
		t.Skip("the client of a benchmark")
	}
	in := json.NewDecoder(os.Stdin)
	var task watcher
	if err := in.Decode(&task); err != nil {
		t.Fatal(err)
	}
	client := must[*http.Client](t)(rest.HTTPClientFor(&rest.Config{Host: task.Host, TLSClientConfig: rest.TLSClientConfig{CAData: task.CA, CertData: task.Cert, KeyData: task.Key}}))
	for i := range task.Watches {
		req := must[*http.Request](t)(http.NewRequestWithContext(t.Context(), http.MethodGet, task.Host+watchPath, nil))
		res, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer res.Body.Close()
		if res.StatusCode != http.StatusOK {
			body, _ := io.ReadAll(res.Body) // to be shown
			t.Fatalf("watch %d: %d %s", i, res.StatusCode, body)
		}
	}
	fmt.Println("open")
	_ = in.Decode(&metav1.Status{}) // until the input ends
}
