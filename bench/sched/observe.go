package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/kubernetes"

	"github.com/clusterd/clusterd/e2e/cluster"
)

// usage is what was used up to a moment.
type usage struct {
	cpu, client time.Duration
	allocated   float64 // bytes, by all servers
	entries     float64 // of the log, of the server that has most
}

func look(ctx context.Context, c *cluster.Netns) (u usage, err error) {
	if u.cpu, err = cpu(c); err != nil {
		return u, err
	}
	if u.client, err = cpuOf(os.Getpid()); err != nil {
		return u, err
	}
	for _, n := range c.Nodes() {
		_, config, err := c.Client(n.Name)
		if err != nil {
			return u, err
		}
		client, err := kubernetes.NewForConfig(config)
		if err != nil {
			return u, err
		}
		body, err := client.Discovery().RESTClient().Get().AbsPath("/metrics").DoRaw(ctx)
		if err != nil {
			return u, fmt.Errorf("metrics of %s: %w", n.Name, err)
		}
		u.allocated += metric(body, "go_memstats_alloc_bytes_total")
		u.entries = max(u.entries, metric(body, "clusterd_raftstore_commit_seconds_count"))
	}
	return u, nil
}

// metric is the value of a metric without labels, 0 if there is none.
func metric(body []byte, name string) float64 {
	lines := bufio.NewScanner(bytes.NewReader(body))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if rest, ok := strings.CutPrefix(lines.Text(), name+" "); ok {
			v, err := strconv.ParseFloat(rest, 64)
			if err != nil {
				return 0
			}
			return v
		}
	}
	return 0
}

// profileFor is how long one profile of processor time is.
const profileFor = 10 * time.Second

// profile takes profiles of all servers, one after the other, until the function
// returned is called, which waits for the last. Servers answer at port 6060 if they
// were built with -tags profile.
func profile(ctx context.Context, c *cluster.Netns, file string, wanted bool) (stop func()) {
	if !wanted {
		return func() {}
	}
	ended := make(chan struct{})
	var wg sync.WaitGroup
	for _, n := range c.Nodes() {
		wg.Go(func() {
			for i := 0; ; i++ {
				url := fmt.Sprintf("http://%s:6060/debug/pprof/profile?seconds=%d", n.Addr, int(profileFor.Seconds()))
				if err := fetch(ctx, url, fmt.Sprintf("%s.%s.%d.cpu", file, n.Name, i)); err != nil {
					fmt.Fprintf(os.Stderr, "# no profile of %s: %v\n", n.Name, err)
					return
				}
				select {
				case <-ended:
					return
				default:
				}
			}
		})
	}
	return func() {
		close(ended)
		wg.Wait()
		for _, n := range c.Nodes() {
			if err := fetch(ctx, fmt.Sprintf("http://%s:6060/debug/pprof/allocs", n.Addr), fmt.Sprintf("%s.%s.allocs", file, n.Name)); err != nil {
				fmt.Fprintf(os.Stderr, "# no profile of %s: %v\n", n.Name, err)
			}
		}
	}
}

func fetch(ctx context.Context, url, file string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer func() { _ = res.Body.Close() }()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		return err
	}
	if res.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", url, res.Status)
	}
	return os.WriteFile(file, body, 0o600)
}

// cpu is the processor time that all servers have taken.
func cpu(c *cluster.Netns) (sum time.Duration, err error) {
	for _, n := range c.Nodes() {
		pid, err := c.Pid(n.Name)
		if err != nil {
			return 0, err
		}
		d, err := cpuOf(pid)
		if err != nil {
			return 0, err
		}
		sum += d
	}
	return sum, nil
}

// cpuOf reads user and system time of a process, in ticks of 10 ms.
func cpuOf(pid int) (time.Duration, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
	if len(fields) < 13 {
		return 0, fmt.Errorf("/proc/%d/stat: %q", pid, b)
	}
	var ticks int
	for _, f := range fields[11:13] {
		n, err := strconv.Atoi(f)
		if err != nil {
			return 0, fmt.Errorf("/proc/%d/stat: %w", pid, err)
		}
		ticks += n
	}
	return time.Duration(ticks) * 10 * time.Millisecond, nil
}

// rss is the first server's, in MiB; it began the cluster and leads it.
func rss(c *cluster.Netns) float64 {
	pid, err := c.Pid(c.Nodes()[0].Name)
	if err != nil {
		return 0
	}
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	if err != nil {
		return 0
	}
	var size, resident int
	if _, err := fmt.Sscan(string(b), &size, &resident); err != nil {
		return 0
	}
	return round(float64(resident) * float64(os.Getpagesize()) / (1 << 20))
}
