package subresource

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

type answer struct{ t *testing.T }

func (a answer) Object(int, runtime.Object) { a.t.Error("answered with an object") }
func (a answer) Error(err error)            { a.t.Errorf("answered with %v", err) }

// TestProxy: a request arrives with its path, query, method and body, and
// without what says who sent it; an upgraded connection carries both ways.
func TestProxy(t *testing.T) {
	pod := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Header.Get("Upgrade") != "" {
			conn, rw, err := w.(http.Hijacker).Hijack()
			if err != nil {
				t.Error(err)
				return
			}
			defer func() { _ = conn.Close() }()
			fmt.Fprintf(rw, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", req.Header.Get("Upgrade"))
			_ = rw.Flush()
			line, _ := rw.ReadString('\n')
			fmt.Fprintf(rw, "echo %s", line)
			_ = rw.Flush()
			return
		}
		body, _ := io.ReadAll(req.Body)
		for name := range req.Header {
			if l := strings.ToLower(name); strings.Contains(l, "auth") || strings.HasPrefix(l, "impersonate") || strings.HasPrefix(l, "x-remote") {
				t.Errorf("the pod was sent %s", name)
			}
		}
		fmt.Fprintf(w, "%s %s %s %s", req.Method, req.URL.RequestURI(), body, req.Header.Get("X-Kept"))
	}))
	defer pod.Close()
	p := newProxy(func(_ context.Context, _, name, port string) (string, error) {
		if name != "web" || port != "80" {
			t.Errorf("asked for %s, port %s", name, port)
		}
		return pod.Listener.Addr().String(), nil
	})
	p.refuse = func(netip.Addr) error { return nil } // the test's pod is on the loopback
	p.path = func(options runtime.Object) string { return options.(*corev1.PodProxyOptions).Path }
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		h, err := p.Connect(req.Context(), "http:web:80", &corev1.PodProxyOptions{Path: "/a/b/"}, answer{t})
		if err != nil {
			t.Error(err)
			return
		}
		h.ServeHTTP(w, req)
	}))
	defer api.Close()

	req, _ := http.NewRequestWithContext(t.Context(), http.MethodPut, api.URL+"/api/v1/namespaces/x/pods/http:web:80/proxy/a/b/?q=1", strings.NewReader("body"))
	for _, name := range []string{"Authorization", "Proxy-Authorization", "Impersonate-User", "Impersonate-Extra-Scopes", "X-Remote-User", "X-Kept"} {
		req.Header.Set(name, "secret")
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	got, _ := io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	if want := "PUT /a/b/?q=1 body secret"; string(got) != want {
		t.Errorf("%q, want %q", got, want)
	}

	conn, err := net.Dial("tcp", api.Listener.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close() }()
	fmt.Fprint(conn, "GET /x HTTP/1.1\r\nHost: api\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n")
	r := bufio.NewReader(conn)
	up, err := http.ReadResponse(r, nil)
	if err != nil || up.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("upgrade: %v %v", up, err)
	}
	fmt.Fprint(conn, "hello\n")
	if line, err := r.ReadString('\n'); err != nil || line != "echo hello\n" {
		t.Errorf("%q, %v", line, err)
	}
}

func TestProxyTargets(t *testing.T) {
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Status: corev1.PodStatus{PodIP: "10.42.0.7"}}
	pod.Spec.Containers = []corev1.Container{{}, {Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}, {Name: "admin", ContainerPort: 9090}}}}
	for port, want := range map[string]string{"": "10.42.0.7:8080", "80": "10.42.0.7:80", "admin": "10.42.0.7:9090", "none": "", "70000": ""} {
		if got, err := podHost(pod, "http", port); got != want || (err == nil) != (want != "") {
			t.Errorf("pod, port %q: %q, %v; want %q", port, got, err, want)
		}
	}
	pod.Spec.Containers = pod.Spec.Containers[:1]
	for scheme, want := range map[string]string{"http": "10.42.0.7:80", "https": "10.42.0.7:443"} {
		if got, err := podHost(pod, scheme, ""); got != want || err != nil {
			t.Errorf("pod without ports, %s: %q, %v; want %q", scheme, got, err, want)
		}
	}
	one := &corev1.Service{Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}}}}
	two := &corev1.Service{Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}, {Name: "admin", Port: 90}}}}
	for _, test := range []struct {
		service    *corev1.Service
		port, want string
	}{{one, "", "http"}, {one, "80", "http"}, {two, "admin", "admin"}, {two, "90", "admin"}, {two, "", ""}, {two, "91", ""}} {
		if got, err := servicePort(test.service, test.port); got != test.want || (err == nil) != (test.want != "") {
			t.Errorf("service, port %q: %q, %v; want %q", test.port, got, err, test.want)
		}
	}
	for addr, refused := range map[string]bool{"127.0.0.1": true, "::1": true, "::ffff:127.0.0.1": true, "169.254.169.254": true, "fe80::1": true, "0.0.0.0": true, "224.0.0.1": true, "10.42.0.7": false, "fd00::1": false} {
		if err := refuseAddr(netip.MustParseAddr(addr)); (err != nil) != refused {
			t.Errorf("%s: %v", addr, err)
		}
	}
}
