package server_test

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

// TestSlowBodies: 450 requests of a node whose bodies do not arrive cost another
// node nothing: at most a hundred are waited for, without a seat, and the others
// are refused at once.
func TestSlowBodies(t *testing.T) {
	// However slow this machine is, no body is given up before the test has seen it.
	s := servertest.Start(t, func(c *server.Config) { c.RequestTimeout = 10 * time.Minute })
	const slow, waitedFor = 450, 100
	n1 := s.ClientConfigFor("system:node:n1", "system:nodes")
	client := must[*http.Client](t)(rest.HTTPClientFor(n1))
	bodies := make([]*io.PipeWriter, slow)
	var refused, other atomic.Int64
	var requests sync.WaitGroup
	for i := range bodies {
		var body *io.PipeReader
		body, bodies[i] = io.Pipe()
		requests.Go(func() {
			req, err := http.NewRequestWithContext(t.Context(), "PATCH", n1.Host+"/api/v1/nodes/n1/status", body)
			if err != nil {
				t.Error(err)
				return
			}
			req.Header.Set("Content-Type", "application/merge-patch+json")
			resp, err := client.Do(req)
			if err != nil {
				other.Add(1)
				return
			}
			defer resp.Body.Close()
			if resp.StatusCode == http.StatusTooManyRequests && resp.Header.Get("Retry-After") != "" {
				refused.Add(1)
			} else {
				other.Add(1)
			}
		})
	}
	comesTrue(t, "the refusal of all but a hundred", func(context.Context) bool { return refused.Load() == slow-waitedFor })
	n2 := s.ClientFor(t, "system:node:n2", "system:nodes")
	begin := time.Now()
	must[*corev1.Node](t)(n2.CoreV1().Nodes().Create(t.Context(), &corev1.Node{ObjectMeta: meta("n2")}, metav1.CreateOptions{}))
	t.Logf("the other node's write took %v", time.Since(begin))
	// What is not sent slowly, of the same node, is worked on too: it reads.
	if code, _, _ := ask(t, t.Context(), n1, "/api/v1/nodes/n2"); code != http.StatusOK && code != http.StatusForbidden {
		t.Errorf("a read of the slow node: %d", code)
	}
	if other.Load() > 0 || refused.Load() != slow-waitedFor {
		t.Errorf("%d refused, %d otherwise answered, want %d and 0", refused.Load(), other.Load(), slow-waitedFor)
	}
	for _, body := range bodies {
		_ = body.Close()
	}
	requests.Wait()
}

// stallsAlone sends a part of a body by HTTP/1.1, where the end of the wait ends the
// connection: net/http takes a read that failed for a client that has gone.
func stallsAlone(t *testing.T, config *tls.Config, addr string) {
	t.Helper()
	config = config.Clone()
	config.NextProtos = []string{"http/1.1"}
	conn := must[*tls.Conn](t)(tls.Dial("tcp", addr, config))
	defer conn.Close()
	fmt.Fprint(conn, "POST /api/v1/namespaces/default/configmaps HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\nc\r\n{\"metadata\":\r\n")
	_ = conn.SetReadDeadline(time.Now().Add(testTimeout))
	if answer, err := io.ReadAll(conn); errors.Is(err, os.ErrDeadlineExceeded) || strings.HasPrefix(string(answer), "HTTP/1.1 2") {
		t.Errorf("%q, %v", answer, err)
	}
}

// TestBodyThatStalls: a body that does not arrive over the network is given up,
// and its client learns that: by an answer, or by HTTP/1.1 by the connection's end.
func TestBodyThatStalls(t *testing.T) {
	s := servertest.Start(t, func(c *server.Config) { c.RequestTimeout = 20 * time.Second })
	admin := s.Listen(t)
	for _, protocol := range []string{"HTTP/1.1", "HTTP/2.0"} {
		t.Run(protocol, func(t *testing.T) {
			t.Parallel()
			config := must[*tls.Config](t)(rest.TLSConfigFor(admin))
			transport := &http.Transport{TLSClientConfig: config, ForceAttemptHTTP2: protocol == "HTTP/2.0"}
			defer transport.CloseIdleConnections()
			client := &http.Client{Transport: transport}
			send := func(body io.Reader) (int, string) {
				req := must[*http.Request](t)(http.NewRequestWithContext(waitContext(t), "POST", admin.Host+"/api/v1/namespaces/default/configmaps", body))
				req.Header.Set("Content-Type", "application/json")
				resp, err := client.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				defer resp.Body.Close()
				if resp.Proto != protocol {
					t.Errorf("answered by %s", resp.Proto)
				}
				text, _ := io.ReadAll(resp.Body)
				return resp.StatusCode, string(text)
			}
			if protocol == "HTTP/1.1" {
				stallsAlone(t, config, strings.TrimPrefix(admin.Host, "https://"))
			} else {
				stalls, begun := io.Pipe()
				go func() { _, _ = begun.Write([]byte(`{"metadata":`)) }()
				if code, text := send(stalls); code != http.StatusRequestTimeout || !strings.Contains(text, "did not arrive within 10s: 12 bytes of it did") {
					t.Errorf("%d %s, want 408", code, text)
				}
				_ = begun.Close()
			}
			// One that arrives in parts is taken, and the connection serves on.
			for i := range 2 {
				whole, parts := io.Pipe()
				go func() {
					for _, part := range []string{`{"metadata":`, `{"name":"`, fmt.Sprintf("%s%d", strings.ToLower(protocol[:4]+protocol[5:6]), i), `"}}`} {
						_, _ = parts.Write([]byte(part))
					}
					_ = parts.Close()
				}()
				if code, text := send(whole); code != http.StatusCreated {
					t.Errorf("%d %s, want 201", code, text)
				}
			}
			if code, text := send(strings.NewReader(`{"data":{"k":""` + strings.Repeat(`,"k":""`, 1<<15) + `}}`)); code != http.StatusRequestEntityTooLarge || !strings.Contains(text, "at most 32768 are allowed") {
				t.Errorf("more entries than may be: %d %s, want 413", code, text)
			}
			if code, text := send(strings.NewReader(`{"data":{"k":"` + strings.Repeat("x", 3<<20) + `"}}`)); code != http.StatusRequestEntityTooLarge {
				t.Errorf("more than 3 MiB: %d %s, want 413", code, text)
			}
		})
	}
}
