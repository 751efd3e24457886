package e2e

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	podresources "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/clusterd/clusterd/e2e/cluster"
)

// plain sends a request without any credentials.
func plain(t *testing.T, method, url string) (int, string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	return answered(t, &http.Client{Timeout: 30 * time.Second}, req)
}

func answered(t *testing.T, client *http.Client, req *http.Request) (int, string) {
	t.Helper()
	code, text, err := askOnce(client, req)
	if err != nil {
		t.Fatal(err)
	}
	return code, text
}

func askOnce(client *http.Client, req *http.Request) (int, string, error) {
	res, err := client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	return res.StatusCode, string(b), err
}

// showPodResources asks at the socket of a node that has the pod "pinned".
func (e *env) showPodResources(n cluster.Node, ns string) {
	e.t.Helper()
	// The name of a socket has 107 bytes at most: it is reached by a short one.
	short, err := os.MkdirTemp("", "pr")
	if err != nil {
		e.t.Fatal(err)
	}
	defer os.RemoveAll(short)
	socket := filepath.Join(n.Data, "pod-resources", "kubelet.sock")
	if st, err := os.Stat(socket); err != nil || st.Mode().Perm() != 0o600 {
		e.t.Fatalf("%v (%v)", st, err)
	}
	if err := os.Symlink(filepath.Dir(socket), filepath.Join(short, "d")); err != nil {
		e.t.Fatal(err)
	}
	conn, err := grpc.NewClient("unix://"+filepath.Join(short, "d", "kubelet.sock"), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		e.t.Fatal(err)
	}
	defer conn.Close()
	client := podresources.NewPodResourcesListerClient(conn)
	ctx, cancel := context.WithTimeout(e.t.Context(), testTimeout)
	defer cancel()
	list, err := client.List(ctx, &podresources.ListPodResourcesRequest{})
	if err != nil {
		e.t.Fatal(err)
	}
	all, err := client.GetAllocatableResources(ctx, &podresources.AllocatableResourcesRequest{})
	if err != nil {
		e.t.Fatal(err)
	}
	if slices.Contains(all.GetCpuIds(), 0) || len(all.GetCpuIds()) == 0 || len(all.GetMemory()) == 0 {
		e.t.Errorf("allocatable: %v", all)
	}
	i := slices.IndexFunc(list.GetPodResources(), func(p *podresources.PodResources) bool { return p.GetNamespace() == ns && p.GetName() == "pinned" })
	if i < 0 {
		e.t.Fatalf("the pod is not among %v", list.GetPodResources())
	}
	c := list.GetPodResources()[i].GetContainers()
	if len(c) != 1 || c[0].GetName() != "main" || len(c[0].GetCpuIds()) != 1 || !slices.Contains(all.GetCpuIds(), c[0].GetCpuIds()[0]) || len(c[0].GetDevices()) != 0 {
		e.t.Fatalf("%v", c)
	}
	if m := c[0].GetMemory(); len(m) != 1 || m[0].GetMemoryType() != "memory" || m[0].GetSize() != 64<<20 {
		e.t.Errorf("memory %v", m)
	}
	// The kernel says the same.
	pids, err := e.Processes(n.Name)
	if err != nil {
		e.t.Fatal(err)
	}
	want, found := fmt.Sprintf("Cpus_allowed_list:\t%d\n", c[0].GetCpuIds()[0]), false
	for _, pid := range pids {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		found = found || strings.Contains(string(b), want)
	}
	if !found {
		e.t.Errorf("no process of the node has %q", want)
	}
	one, err := client.Get(ctx, &podresources.GetPodResourcesRequest{PodNamespace: ns, PodName: "pinned"})
	if err != nil || one.GetPodResources().GetName() != "pinned" {
		e.t.Errorf("%v, %v", one, err)
	}
	if _, err := client.Get(ctx, &podresources.GetPodResourcesRequest{PodNamespace: ns, PodName: "absent"}); status.Code(err) != codes.NotFound {
		e.t.Errorf("a pod that is not: %v", err)
	}
}

// fakeJournal puts a journalctl before the machine's, which may have none.
func fakeJournal(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	script := "#!/bin/sh\nfor a; do case $a in --unit=cron) echo 'Jan 01 00:00:00.000000 host cron[1]: job done';; --unit=*) echo \"no $a\" >&2; exit 1;; esac; done\n"
	if err := os.WriteFile(filepath.Join(dir, "journalctl"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
}

// showNodeLogs asks for the logs of a machine: those who may, those who may not,
// and those who want something else.
func (e *env) showNodeLogs(n cluster.Node) {
	e.t.Helper()
	at := "/api/v1/nodes/" + n.Name + "/proxy/logs/"
	mustContain(e.t, "its own log", e.ctl("get", "--raw", at+"?query=clusterd"), "clusterd runs", "node="+n.Name)
	if lines := strings.Count(e.ctl("get", "--raw", at+"?query=kubelet&tailLines=3"), "\n"); lines != 3 {
		e.t.Errorf("%d lines, want 3", lines)
	}
	mustContain(e.t, "the journal", e.ctl("get", "--raw", at+"?query=cron"), "cron[1]: job done")
	mustContain(e.t, "the folder", e.ctl("get", "--raw", at), "<pre>")
	for _, path := range []string{"?query=--help", "?query=a%3Bid", "?query=../shadow", "?query=/../../etc/shadow", "?query=cron&tailLines=x", "?query=cron&follow=1", "..%2f..%2fetc%2fshadow", "?query=no-such-service-here"} {
		if said := e.refused("", "get", "--raw", at+path); strings.Contains(said, "root:") {
			e.t.Errorf("%s: %s", path, said)
		}
	}
	const ns = "options"
	for _, user := range []string{"reader", "stranger"} {
		e.ctl("create", "serviceaccount", user, "-n", ns)
	}
	e.ctl("create", "clusterrole", "node-log-reader", "--verb=get", "--resource=nodes/log")
	e.ctl("create", "clusterrolebinding", "node-log-reader", "--clusterrole=node-log-reader", "--serviceaccount="+ns+":reader")
	ask := func(user, path string) (code int, err error) {
		e.t.Helper()
		client, err := rest.HTTPClientFor(e.bearer(n, ns, user))
		if err != nil {
			e.t.Fatal(err)
		}
		req, err := http.NewRequestWithContext(e.t.Context(), http.MethodGet, "https://"+net.JoinHostPort(n.Addr.String(), "10250")+path, nil)
		if err != nil {
			e.t.Fatal(err)
		}
		code, _, err = askOnce(client, req)
		return code, err
	}
	for _, q := range []struct {
		what, user, path string
		want             int
	}{
		{"the right counts", "reader", "/logs/?query=clusterd", 200},
		{"a stranger has none", "stranger", "/logs/?query=clusterd", 403},
		{"the right to read logs is none to read pods", "reader", "/pods", 403},
	} {
		e.eventually(q.what, func(context.Context) error { // the certificate may be about to change, the answer to be looked up
			code, err := ask(q.user, q.path)
			if code == http.StatusOK && code != q.want {
				e.t.Fatalf("%s: %s has %s", q.what, q.user, q.path)
			}
			if err != nil || code != q.want {
				return fmt.Errorf("%d, %v", code, err)
			}
			return nil
		})
	}
}

// spanCollector is an OTLP endpoint.
type spanCollector struct {
	collector.UnimplementedTraceServiceServer
	config string // file of the TracingConfiguration that leads here

	mu  sync.Mutex
	all []gotSpan
}

type gotSpan struct {
	service, node, name, trace, id, parent string
	links                                  []string // traces
	attributes                             map[string]string
}

func collectSpans(t *testing.T) *spanCollector {
	t.Helper()
	dir, err := os.MkdirTemp("", "otlp") // its name is short, as those of sockets have to be
	if err != nil {
		t.Fatal(err)
	}
	c := &spanCollector{config: filepath.Join(dir, "tracing.yaml")}
	socket := filepath.Join(dir, "otlp.sock")
	ln, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := grpc.NewServer()
	collector.RegisterTraceServiceServer(srv, c)
	go srv.Serve(ln)
	t.Cleanup(func() {
		srv.Stop()
		_ = os.RemoveAll(dir)
	})
	text := "apiVersion: apiserver.config.k8s.io/v1\nkind: TracingConfiguration\nendpoint: unix://" + socket + "\nsamplingRatePerMillion: 1000000\n"
	if err := os.WriteFile(c.config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return c
}

// Export implements the OTLP service.
func (c *spanCollector) Export(_ context.Context, req *collector.ExportTraceServiceRequest) (*collector.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, r := range req.GetResourceSpans() {
		of := texts(r.GetResource().GetAttributes())
		for _, s := range r.GetScopeSpans() {
			for _, span := range s.GetSpans() {
				var links []string
				for _, l := range span.GetLinks() {
					links = append(links, string(l.GetTraceId()))
				}
				c.all = append(c.all, gotSpan{
					links: links, service: of["service.name"], node: of["k8s.node.name"], name: span.GetName(), trace: string(span.GetTraceId()),
					id: string(span.GetSpanId()), parent: string(span.GetParentSpanId()), attributes: texts(span.GetAttributes()),
				})
			}
		}
	}
	return &collector.ExportTraceServiceResponse{}, nil
}

func texts(list []*common.KeyValue) map[string]string {
	out := map[string]string{}
	for _, kv := range list {
		out[kv.GetKey()] = kv.GetValue().GetStringValue()
	}
	return out
}

// show waits for the spans of a pod on n1: a turn of its worker, what the turn
// began, and the API server's span of a request in it. That one begins a trace
// of its own, linked to the caller's, as the API server does not let callers
// choose its traces, members of system:masters apart.
func (c *spanCollector) show(e *env, uid string) {
	e.t.Helper()
	e.eventually("the pod's spans have come", func(context.Context) error {
		c.mu.Lock()
		defer c.mu.Unlock()
		began := map[string]bool{}
		served := false
		linked := map[string]bool{}
		for _, s := range c.all {
			if s.service == "apiserver" {
				for _, trace := range s.links {
					linked[trace] = true
				}
			}
		}
		for _, turn := range c.all {
			if turn.service != "kubelet" || turn.node != "n1" || turn.name != "syncPod" || turn.attributes["k8s.pod.uid"] != uid || turn.attributes["k8s.pod.name"] != "pinned" {
				continue
			}
			served = served || linked[turn.trace]
			for _, s := range c.all {
				if s.trace == turn.trace && s.service == "kubelet" && s.parent == turn.id {
					began[s.name] = true
				}
			}
		}
		for _, want := range []string{"CreateSandbox", "Start", "update"} {
			if !began[want] {
				return fmt.Errorf("of %d spans none is %s of a turn; there are %v", len(c.all), want, began)
			}
		}
		if !served {
			return fmt.Errorf("of %d spans none of the API server's is linked to a turn's trace", len(c.all))
		}
		return nil
	})
}

// certWatch sees which certificates a node serves while time goes by.
type certWatch struct {
	node  cluster.Node
	roots *x509.CertPool
	first map[string]*x509.Certificate // by port
	kept  map[string]*keptConn
}

// keptConn is a connection over which requests are sent all the time.
type keptConn struct {
	mu   sync.Mutex
	last time.Time // of an answer
	err  error
}

var certPorts = []string{"6443", "10250"}

func (e *env) watchCerts(n cluster.Node) *certWatch {
	e.t.Helper()
	w := &certWatch{node: n, roots: x509.NewCertPool(), first: map[string]*x509.Certificate{}, kept: map[string]*keptConn{}}
	ca := e.config.CAData
	if len(ca) == 0 {
		var err error
		if ca, err = os.ReadFile(e.config.CAFile); err != nil {
			e.t.Fatal(err)
		}
	}
	if !w.roots.AppendCertsFromPEM(ca) {
		e.t.Fatal("no authority")
	}
	for _, port := range certPorts {
		c, err := w.dial(port)
		if err != nil {
			e.t.Fatal(err)
		}
		e.t.Cleanup(func() { _ = c.Close() })
		w.first[port], w.kept[port] = c.ConnectionState().PeerCertificates[0], &keptConn{}
		go w.kept[port].use(c)
	}
	return w
}

// use sends requests until the connection ends, which is at the test's end.
func (k *keptConn) use(c net.Conn) {
	from := bufio.NewReader(c)
	for {
		_ = c.SetDeadline(time.Now().Add(testTimeout))
		_, err := fmt.Fprintf(c, "GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
		if err == nil {
			var res *http.Response
			if res, err = http.ReadResponse(from, nil); err == nil { // whatever it answers
				_, err = io.Copy(io.Discard, res.Body)
			}
		}
		k.mu.Lock()
		if k.err = err; err == nil {
			k.last = time.Now()
		}
		k.mu.Unlock()
		if err != nil {
			return
		}
		time.Sleep(time.Second)
	}
}

// dial makes a connection, and accepts only a certificate that is valid now.
func (w *certWatch) dial(port string) (*tls.Conn, error) {
	return tls.DialWithDialer(&net.Dialer{Timeout: 10 * time.Second}, "tcp", net.JoinHostPort(w.node.Addr.String(), port), &tls.Config{RootCAs: w.roots, NextProtos: []string{"http/1.1"}})
}

// show waits until the first certificates have ended: new connections get others,
// and those that were made before go on.
func (w *certWatch) show(t *testing.T) {
	t.Helper()
	for _, port := range certPorts {
		first := w.first[port]
		if life := first.NotAfter.Sub(first.NotBefore); life > 2*time.Minute {
			t.Fatalf("the certificate of %s lives %s: this test would see nothing", port, life)
		}
		for deadline := time.Now().Add(testTimeout); ; time.Sleep(200 * time.Millisecond) {
			c, err := w.dial(port)
			if err == nil {
				now := c.ConnectionState().PeerCertificates[0]
				_ = c.Close()
				if now.SerialNumber.Cmp(first.SerialNumber) != 0 && time.Now().After(first.NotAfter) {
					break
				}
			}
			if time.Now().After(deadline) {
				t.Fatalf("port %s: the certificate was not replaced: %v", port, err)
			}
		}
		for deadline := time.Now().Add(testTimeout); ; time.Sleep(200 * time.Millisecond) {
			kept := w.kept[port]
			kept.mu.Lock()
			last, err := kept.last, kept.err
			kept.mu.Unlock()
			if err == nil && last.After(first.NotAfter) {
				break
			}
			if err != nil || time.Now().After(deadline) {
				t.Fatalf("port %s: a connection made before: last answered at %s, %v", port, last, err)
			}
		}
	}
}

// storm is a flood of events, and the lease of a node meanwhile.
type storm struct {
	e       *env
	written chan int
	stop    context.CancelFunc
	began   time.Time
	events  atomic.Int64 // written so far
	mu      sync.Mutex
	renewed []time.Time // by the API's clock of the writer
}

// eventStorm begins to write events as fast as it goes, as the node n1 itself,
// and to follow its lease.
func (e *env) eventStorm(ns string) *storm {
	e.t.Helper()
	config := rest.CopyConfig(e.config)
	config.Impersonate = rest.ImpersonationConfig{UserName: "system:node:n1", Groups: []string{"system:nodes", "system:authenticated"}}
	config.QPS = -1
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		e.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(e.t.Context())
	e.t.Cleanup(cancel)
	s := &storm{e: e, written: make(chan int, 1), stop: cancel, began: time.Now()}
	const writers = 4
	counts := make(chan int, writers)
	for w := range writers {
		go func() {
			n := 0
			for ; ctx.Err() == nil; n++ {
				_, err := client.CoreV1().Events(ns).Create(ctx, &corev1.Event{
					ObjectMeta:     metav1.ObjectMeta{Name: fmt.Sprintf("storm-%d-%d", w, n), Namespace: ns},
					InvolvedObject: corev1.ObjectReference{Kind: "Pod", Namespace: ns, Name: "storm"}, Reason: "Storm", Message: strings.Repeat("x", 256),
					Type: corev1.EventTypeNormal, Source: corev1.EventSource{Component: "agent", Host: "n1"}, FirstTimestamp: metav1.Now(), LastTimestamp: metav1.Now(), Count: 1,
				}, metav1.CreateOptions{})
				if err == nil {
					s.events.Add(1)
				} else {
					n--
					select { // it is held back, as one that floods is
					case <-ctx.Done():
					case <-time.After(50 * time.Millisecond):
					}
				}
			}
			counts <- n
		}()
	}
	go func() {
		sum := 0
		for range writers {
			sum += <-counts
		}
		s.written <- sum
	}()
	go func() {
		for ctx.Err() == nil {
			l, err := e.api.CoordinationV1().Leases("kube-node-lease").Get(ctx, "n1", metav1.GetOptions{})
			if err == nil {
				s.mu.Lock()
				if at := l.Spec.RenewTime.Time; len(s.renewed) == 0 || !at.Equal(s.renewed[len(s.renewed)-1]) {
					s.renewed = append(s.renewed, at)
				}
				s.mu.Unlock()
			}
			select {
			case <-ctx.Done():
			case <-time.After(500 * time.Millisecond):
			}
		}
	}()
	return s
}

// show looks at the lease and ends the storm: it moved all the time, each ten seconds
// where the machine allows it.
func (s *storm) show(t *testing.T) {
	t.Helper()
	var gaps []time.Duration
	const many = 500 // fewer events are no storm
	s.e.eventually("the lease was renewed in time in the storm", func(context.Context) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		gaps = nil
		for i := 1; i < len(s.renewed); i++ {
			gaps = append(gaps, s.renewed[i].Sub(s.renewed[i-1]))
		}
		if n := s.events.Load(); n < many || len(gaps) < 3 || slices.Min(gaps) > 11*time.Second {
			return fmt.Errorf("%d events; between renewals %s", n, gaps)
		}
		return nil
	})
	s.stop()
	n := <-s.written
	t.Logf("%d events in %s; between renewals %s", n, time.Since(s.began).Round(time.Second), gaps)
	if worst := slices.Max(gaps); worst >= 40*time.Second {
		t.Errorf("between renewals %s", worst)
	}
	s.e.nodeIs("n1", corev1.NodeReady, corev1.ConditionTrue)
}

var nextWrite = regexp.MustCompile(`msg="Node status was written, and is again if nothing changes" .*\bin=(\S+)`)

// showSpread looks at when the nodes are going to write their statuses again: no
// two times are the same, and each is up to four in a hundred later than five
// minutes.
func (e *env) showSpread() {
	e.t.Helper()
	var all []time.Duration
	for _, n := range e.Nodes() {
		own := 0
		for _, m := range nextWrite.FindAllStringSubmatch(e.log(n.Name), -1) {
			d, err := time.ParseDuration(m[1])
			if err != nil {
				e.t.Fatal(err)
			}
			if d < 5*time.Minute || d > 5*time.Minute*104/100 {
				e.t.Errorf("%s writes again in %s", n.Name, d)
			}
			all = append(all, d)
			own++
		}
		if own == 0 {
			e.t.Errorf("%s has written no status", n.Name)
		}
	}
	slices.Sort(all)
	if len(all) < 4 || len(slices.Compact(slices.Clone(all))) != len(all) {
		b, _ := json.Marshal(all)
		e.t.Errorf("%d times, some the same: %s", len(all), b)
	} else if spread := all[len(all)-1] - all[0]; spread < 100*time.Millisecond { // of twelve seconds: chance does not come so near
		e.t.Errorf("%d times lie within %s", len(all), spread)
	}
}
