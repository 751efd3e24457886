package ui_test

import (
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/clusterd/clusterd/ui"
)

// server serves the page over an API that answers "api" to everything.
func server() http.Handler {
	return ui.Over(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { io.WriteString(w, "api") }))
}

func do(h http.Handler, method, path string, header ...string) *httptest.ResponseRecorder {
	req := httptest.NewRequest(method, path, nil)
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, req)
	return w
}

func TestWhoIsAnswered(t *testing.T) {
	h := server()
	for _, test := range []struct {
		name, method, path string
		header             []string
		code               int
		body               string
	}{
		{"page", "GET", "/ui/", nil, 200, "<!doctype html>"},
		{"page, head", "HEAD", "/ui/", nil, 200, ""},
		{"script", "GET", "/ui/main.js", nil, 200, "import"},
		{"without slash", "GET", "/ui", nil, 302, ""},
		{"index by name", "GET", "/ui/index.html", nil, 404, "the page is at /ui/"},
		{"no file", "GET", "/ui/nope.js", nil, 404, "no such file"},
		{"out of the folder", "GET", "/ui/../ui.go", nil, 404, "no such file"},
		{"folder", "GET", "/ui/assets/", nil, 404, "no such file"},
		{"write", "POST", "/ui/", nil, 405, "only GET and HEAD"},
		{"a person opens the address", "GET", "/", []string{"Sec-Fetch-Dest", "document", "Sec-Fetch-Site", "none"}, 302, ""},
		{"a program asks the root", "GET", "/", nil, 200, "api"},
		{"API, program", "POST", "/api/v1/pods", nil, 200, "api"},
		{"API, own page", "POST", "/api/v1/pods", []string{"Sec-Fetch-Site", "same-origin"}, 200, "api"},
		{"API, typed", "GET", "/api", []string{"Sec-Fetch-Site", "none", "Sec-Fetch-Dest", "document"}, 200, "api"},
		{"API, a link from elsewhere", "GET", "/api", []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Dest", "document"}, 200, "api"},
		{"API, a form of another site", "POST", "/api/v1/pods", []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Dest", "document"}, 403, "another site's page"},
		{"API, a script of another site", "GET", "/api/v1/pods", []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Dest", "empty"}, 403, "another site's page"},
		{"API, a frame in another site", "GET", "/api/v1/pods", []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Dest", "iframe"}, 403, "another site's page"},
		{"API, a front of another site that has a token", "GET", "/api/v1/pods", []string{"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Dest", "empty", "Authorization", "Bearer x"}, 200, "api"},
		{"exec, a WebSocket of another port of this host", "GET", "/api/v1/namespaces/a/pods/b/exec", []string{"Sec-Fetch-Site", "same-site", "Sec-Fetch-Dest", "websocket"}, 403, "same-site"},
	} {
		t.Run(test.name, func(t *testing.T) {
			w := do(h, test.method, test.path, test.header...)
			if w.Code != test.code || !strings.Contains(w.Body.String(), test.body) {
				t.Errorf("%d %.200q, want %d %q", w.Code, w.Body, test.code, test.body)
			}
			if test.code == http.StatusFound && w.Header().Get("Location") != "/ui/" {
				t.Errorf("sent to %q", w.Header().Get("Location"))
			}
		})
	}
}

func TestHeaders(t *testing.T) {
	h := server()
	for path, kind := range map[string]string{
		"/ui/": "text/html; charset=utf-8", "/ui/main.js": "text/javascript; charset=utf-8",
		"/ui/style.css": "text/css; charset=utf-8", "/ui/icon.svg": "image/svg+xml", "/ui/nope": "text/plain; charset=utf-8",
	} {
		got := do(h, "GET", path).Header()
		if got.Get("Content-Type") != kind {
			t.Errorf("%s: Content-Type %q, want %q", path, got.Get("Content-Type"), kind)
		}
		for name, want := range map[string]string{
			"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY", "Referrer-Policy": "no-referrer", "Cross-Origin-Opener-Policy": "same-origin",
		} {
			if got.Get(name) != want {
				t.Errorf("%s: %s %q, want %q", path, name, got.Get(name), want)
			}
		}
		policy := got.Get("Content-Security-Policy")
		for _, want := range []string{"default-src 'none'", "script-src 'self'", "frame-ancestors 'none'", "require-trusted-types-for 'script'"} {
			if !strings.Contains(policy, want) {
				t.Errorf("%s: policy %q lacks %q", path, policy, want)
			}
		}
		if strings.Contains(policy, "unsafe") || strings.Contains(policy, "*") {
			t.Errorf("%s: policy %q", path, policy)
		}
	}
	tag := do(h, "GET", "/ui/main.js").Header().Get("ETag")
	if w := do(h, "GET", "/ui/main.js", "If-None-Match", tag); tag == "" || w.Code != http.StatusNotModified || w.Body.Len() > 0 {
		t.Errorf("with ETag %q: %d, %d bytes", tag, w.Code, w.Body.Len())
	}
}

// maxSize of all files together, in bytes.
const maxSize = 300 << 10

// forbidden is what makes HTML or code of text, or calls another site.
var forbidden = regexp.MustCompile(`innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser|createContextualFragment|srcdoc|localStorage|sessionStorage|document\.cookie|https?://[a-z]`)

// TestAssets reads the page's files as a reviewer would: they are small, load
// nothing from elsewhere, store no secret, and know no way from text to HTML.
// The browser enforces most of it by the policy; this finds it earlier.
func TestAssets(t *testing.T) {
	files, err := filepath.Glob("assets/*")
	if err != nil || len(files) < 5 {
		t.Fatalf("%v %v", files, err)
	}
	h := server()
	size := 0
	for _, name := range files {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		size += len(b)
		for i, line := range strings.Split(string(b), "\n") {
			line = strings.ReplaceAll(line, "http://www.w3.org/2000/svg", "") // a name, not an address
			if bad := forbidden.FindString(line); bad != "" {
				t.Errorf("%s:%d: %q", name, i+1, bad)
			}
		}
		// What one file imports or names is served.
		for _, m := range regexp.MustCompile(`(?:from '\./|src="|href=")([a-z]+\.[a-z]+)`).FindAllStringSubmatch(string(b), -1) {
			if w := do(h, "GET", ui.Path+m[1]); w.Code != 200 {
				t.Errorf("%s names %s: %d", name, m[1], w.Code)
			}
		}
	}
	if size > maxSize {
		t.Errorf("%d bytes, want at most %d", size, maxSize)
	}
}
