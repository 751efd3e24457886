package e2e

import (
	"io"
	"net/http"
	"strings"

	"k8s.io/client-go/rest"
)

// webPage looks at every server's page as a browser does: its files without a
// login, the cluster only with one, and nothing for other sites' pages.
func (e *env) webPage() {
	e.t.Helper()
	for _, n := range e.Nodes() {
		_, config, err := e.Client(n.Name)
		if err != nil {
			e.t.Fatal(err)
		}
		anonymous := rest.AnonymousClientConfig(config)
		for _, test := range []struct {
			name   string
			config *rest.Config
			path   string
			site   string
			code   int
			has    string
		}{
			{"the page", anonymous, "/ui/", "none", 200, "<!doctype html>"},
			{"its program", anonymous, "/ui/main.js", "same-origin", 200, "import"},
			{"the cluster without a login", anonymous, "/api/v1/pods", "same-origin", 401, "Unauthorized"},
			{"the cluster with a certificate", config, "/api/v1/namespaces/hello/pods", "same-origin", 200, "hello-"},
			{"metrics of the libraries, which alerts name", config, "/metrics", "none", 200, "process_resident_memory_bytes "},
			{"the API's own", config, "/metrics", "none", 200, "apiserver_request_total{"},
			{"and their times", config, "/metrics", "none", 200, "apiserver_request_duration_seconds_bucket{"},
			{"the members with a certificate", config, "/clusterd/v1/members", "same-origin", 200, n.Name},
			{"another site's page with the visitor's certificate", config, "/api/v1/namespaces/hello/pods", "cross-site", 403, "another site's page"},
		} {
			code, header, body := e.browse(test.config, test.path, test.site)
			if code != test.code || !strings.Contains(body, test.has) {
				e.t.Errorf("%s, %s: %d %.300q, want %d %q", n.Name, test.name, code, body, test.code, test.has)
			}
			if policy := header.Get("Content-Security-Policy"); strings.HasPrefix(test.path, "/ui/") && !strings.Contains(policy, "default-src 'none'") {
				e.t.Errorf("%s, %s: policy %q", n.Name, test.name, policy)
			}
		}
	}
}

// browse sends a request as a browser does for a page of site.
func (e *env) browse(config *rest.Config, path, site string) (code int, header http.Header, body string) {
	e.t.Helper()
	client, err := rest.HTTPClientFor(config)
	if err != nil {
		e.t.Fatal(err)
	}
	req, err := http.NewRequestWithContext(e.t.Context(), http.MethodGet, config.Host+path, nil)
	if err != nil {
		e.t.Fatal(err)
	}
	req.Header.Set("Sec-Fetch-Site", site)
	resp, err := client.Do(req)
	if err != nil {
		e.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		e.t.Fatal(err)
	}
	return resp.StatusCode, resp.Header, string(b)
}
