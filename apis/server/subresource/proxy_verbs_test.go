package subresource

import (
	"context"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
)

// TestProxyVerbs: every method arrives at the path that was asked for, over
// HTTP and, with the prefix https:, over TLS; the answer's code comes back.
func TestProxyVerbs(t *testing.T) {
	serve := http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		scheme := "http"
		if req.TLS != nil {
			scheme = "https"
		}
		w.Header().Set("X-Seen", req.Method+" "+scheme+" "+req.URL.RequestURI()) // HEAD has no body
		w.WriteHeader(http.StatusAccepted)
	})
	plain, secure := httptest.NewServer(serve), httptest.NewTLSServer(serve)
	defer plain.Close()
	defer secure.Close()
	for _, test := range []struct {
		id, scheme, port string
		pod              *httptest.Server
	}{
		{"web", "http", "", plain},
		{"web:named", "http", "named", plain},
		{"http:web:80", "http", "80", plain},
		{"https:web:443", "https", "443", secure},
		{"https:web:named", "https", "named", secure},
	} {
		p := newProxy(func(_ context.Context, _, name, port string) (string, error) {
			if name != "web" || port != test.port {
				t.Errorf("%s: asked for %s, port %q", test.id, name, port)
			}
			return test.pod.Listener.Addr().String(), nil
		})
		p.refuse = func(netip.Addr) error { return nil } // the test's pod is on the loopback
		p.path = func(options runtime.Object) string { return options.(*corev1.PodProxyOptions).Path }
		for _, path := range []string{"/", "/some/path/with/suffix", "/slash/at/end/"} {
			api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
				h, err := p.Connect(req.Context(), test.id, &corev1.PodProxyOptions{Path: path}, answer{t})
				if err != nil {
					t.Error(err)
					return
				}
				h.ServeHTTP(w, req)
			}))
			for _, method := range p.ConnectMethods() {
				req, err := http.NewRequestWithContext(t.Context(), method, api.URL+"/api/v1/namespaces/x/pods/"+test.id+"/proxy"+path+"?method="+method, nil)
				if err != nil {
					t.Fatal(err)
				}
				resp, err := http.DefaultClient.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				_ = resp.Body.Close()
				want := method + " " + test.scheme + " " + path + "?method=" + method
				if got := resp.Header.Get("X-Seen"); got != want || resp.StatusCode != http.StatusAccepted {
					t.Errorf("%s: the pod saw %q, code %d; want %q, 202", test.id, got, resp.StatusCode, want)
				}
			}
			api.Close()
		}
		// Without even a slash what may be followed is sent on to the one with it.
		for _, method := range p.ConnectMethods() {
			h, err := p.Connect(t.Context(), test.id, &corev1.PodProxyOptions{}, answer{t})
			if err != nil {
				t.Fatal(err)
			}
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), method, "/pods/"+test.id+"/proxy?method="+method, nil))
			want, at := http.StatusAccepted, ""
			if method == http.MethodGet || method == http.MethodHead {
				want, at = http.StatusMovedPermanently, "/pods/"+test.id+"/proxy/?method="+method
			}
			if w.Code != want || w.Header().Get("Location") != at {
				t.Errorf("%s %s/proxy: code %d to %q, want %d to %q", method, test.id, w.Code, w.Header().Get("Location"), want, at)
			}
		}
		p.Destroy()
	}
}
