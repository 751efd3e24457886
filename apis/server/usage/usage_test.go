package usage

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/runtime"
)

// fakeNode answers as a node does whose processors and containers are busy to
// a part that is always the same.
type fakeNode struct {
	mu         sync.Mutex
	asked      int
	began      time.Time
	containers map[string]time.Time // started
	fails      error
	silent     bool
}

func newFakeNode(containers ...string) *fakeNode {
	n := &fakeNode{began: time.Now(), containers: map[string]time.Time{}}
	for _, c := range containers {
		n.containers[c] = n.began
	}
	return n
}

func (n *fakeNode) transport(context.Context, string) (http.RoundTripper, *url.URL, error) {
	return n, &url.URL{Scheme: "http", Host: "n1"}, nil
}

func (n *fakeNode) RoundTrip(req *http.Request) (*http.Response, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.asked++
	if n.silent {
		<-req.Context().Done()
		return nil, req.Context().Err()
	}
	if n.fails != nil {
		return nil, n.fails
	}
	if req.URL.Path != "/metrics/resource" {
		return &http.Response{Status: "404 Not Found", StatusCode: 404, Body: http.NoBody}, nil
	}
	now := time.Now()
	var b strings.Builder
	fmt.Fprintf(&b, "resource_scrape_error 0\nnode_cpu_usage_seconds_total %v %d\n", 1.5*now.Sub(n.began).Seconds(), now.UnixMilli())
	fmt.Fprintf(&b, "node_memory_working_set_bytes 5000 %d\n", now.UnixMilli())
	for name, started := range n.containers {
		l := fmt.Sprintf(`{container=%q,namespace="ns",pod="web"}`, name)
		fmt.Fprintf(&b, "container_cpu_usage_seconds_total%s %v %d\n", l, 0.25*now.Sub(started).Seconds(), now.UnixMilli())
		fmt.Fprintf(&b, "container_memory_working_set_bytes%s 700 %d\ncontainer_start_time_seconds%s %v\n", l, now.UnixMilli(), l, float64(started.UnixMilli())/1000)
	}
	return &http.Response{StatusCode: 200, Body: io.NopCloser(strings.NewReader(sorted(b.String())))}, nil
}

// sorted puts the lines of a family together, as the text format wants them.
func sorted(text string) string {
	by := map[string][]string{}
	var order []string
	for line := range strings.Lines(text) {
		name := line[:strings.IndexAny(line, "{ ")]
		if by[name] == nil {
			order = append(order, name)
		}
		by[name] = append(by[name], line)
	}
	var out strings.Builder
	for _, name := range order {
		kind := "gauge"
		if strings.HasSuffix(name, "_total") {
			kind = "counter"
		}
		out.WriteString("# TYPE " + name + " " + kind + "\n" + strings.Join(by[name], ""))
	}
	return out.String()
}

func (n *fakeNode) start(c string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.containers[c] = time.Now()
}

// want is what a question gives: how long it took, how often the node was
// asked by then, and over which window the rates are.
func want(t *testing.T, s *Source, n *fakeNode, took time.Duration, asked int, window time.Duration, containers ...string) {
	t.Helper()
	began := time.Now()
	u, err := s.Of(t.Context(), "n1")
	if err != nil {
		t.Fatal(err)
	}
	if got := time.Since(began); got != took {
		t.Errorf("took %s, want %s", got, took)
	}
	if n.asked != asked {
		t.Errorf("the node was asked %d times, want %d", n.asked, asked)
	}
	pod := PodUsage{}
	for _, c := range containers {
		pod[c] = Sample{Window: window, CPU: 0.25, Memory: 700}
	}
	wanted := &Usage{Node: Sample{Window: window, CPU: 1.5, Memory: 5000}, Pods: map[Pod]PodUsage{}}
	if len(pod) > 0 {
		wanted.Pods[Pod{"ns", "web"}] = pod
	}
	if diff := cmp.Diff(wanted, u, cmp.Transformer("rounded", func(s Sample) [3]any {
		return [3]any{s.Window, fmt.Sprintf("%.6f", s.CPU), s.Memory}
	})); diff != "" {
		t.Error(diff)
	}
}

// TestRates: what a question costs and over which time its answer is.
func TestRates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		time.Sleep(500 * time.Millisecond)
		n := newFakeNode("a", "b")
		s := NewSource(n.transport)
		want(t, s, n, time.Second, 2, time.Second, "a", "b") // the first takes a window
		want(t, s, n, 0, 2, time.Second, "a", "b")           // others get the same
		time.Sleep(20 * time.Second)
		want(t, s, n, 0, 3, 20*time.Second, "a", "b") // from the last on
		time.Sleep(time.Hour)
		want(t, s, n, time.Second, 5, time.Second, "a", "b") // a rate of now
		time.Sleep(20 * time.Second)
		n.start("a") // again: its counter starts at zero
		time.Sleep(time.Second)
		want(t, s, n, time.Second, 7, time.Second, "a", "b")
		s.Keep(map[string]runtime.Object{"n2": nil})
		want(t, s, n, time.Second, 9, time.Second, "a", "b") // it was forgotten
		n.start("new")
		want(t, s, n, 0, 9, time.Second, "a", "b") // within the time that an answer counts
		time.Sleep(fresh)
		want(t, s, n, time.Second, 11, time.Second, "a", "b", "new")
	})
}

// TestTogether: many who ask at once cost the node no more than one.
func TestTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNode("a")
		s := NewSource(n.transport)
		var wg sync.WaitGroup
		for range 50 {
			wg.Go(func() {
				if _, err := s.Of(t.Context(), "n1"); err != nil {
					t.Error(err)
				}
			})
		}
		wg.Wait()
		if n.asked != 2 {
			t.Errorf("asked %d times", n.asked)
		}
	})
}

// TestNoAnswer: each way of not answering ends, in words.
func TestNoAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newFakeNode()
		s := NewSource(n.transport)
		n.silent = true
		if _, err := s.Of(t.Context(), "n1"); err == nil || err.Error() != "node n1: it has not answered within 10s" {
			t.Errorf("silent: %v", err)
		}
		n.silent, n.fails = false, errors.New("connection refused")
		if _, err := s.Of(t.Context(), "n1"); err == nil || err.Error() != "node n1: connection refused" {
			t.Errorf("refused: %v", err)
		}
		if _, err := NewSource(nil).Of(t.Context(), "n1"); err == nil || err.Error() != "node n1: this server has no way to reach it" {
			t.Errorf("no transport: %v", err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		n.fails = nil
		if _, err := s.Of(ctx, "n1"); !errors.Is(err, context.Canceled) {
			t.Errorf("left: %v", err)
		}
		n.containers["a"] = time.Now() // after all that it answers
		time.Sleep(time.Second)
		u, err := s.Of(t.Context(), "n1")
		if err != nil || len(u.Pods) != 1 {
			t.Errorf("%+v %v", u, err)
		}
	})
}

func TestParse(t *testing.T) {
	const cpu = "# TYPE node_cpu_usage_seconds_total counter\nnode_cpu_usage_seconds_total "
	for text, want := range map[string]string{
		"":             "it does not tell its processor time",
		cpu + "5\n":    "it does not tell its processor time", // nor when
		cpu + "five\n": "read its metrics: ",
		cpu + "5 1000\n# TYPE resource_scrape_error gauge\nresource_scrape_error 1\n": "could not measure its pods",
		cpu + "5 1000\n": "",
	} {
		_, err := parse(strings.NewReader(text), time.Now())
		if want == "" && err != nil || want != "" && (err == nil || !strings.Contains(err.Error(), want)) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}
