package kubeletapi

import (
	"io"
	"net/http"
	"net/http/httptest"
	"testing"
)

func TestReadOnly(t *testing.T) {
	var asked []string
	h := ReadOnly(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.URL.Path)
		_, _ = io.WriteString(w, "told")
	}))
	for _, c := range []struct {
		method, path string
		want         int
	}{
		{"GET", "/pods", 200},
		{"HEAD", "/healthz", 200},
		{"GET", "/stats/summary?only_cpu_and_memory=true", 200},
		{"GET", "/metrics/cadvisor", 200},
		{"POST", "/pods", 405},
		{"DELETE", "/pods", 405},
		{"GET", "/pods/", 404},
		{"GET", "/configz", 404},
		{"GET", "/logs/", 404},
		{"GET", "/images", 404},
		{"POST", "/images/load", 404},
		{"GET", "/containerLogs/default/web/main", 404},
		{"POST", "/exec/default/web/main?command=sh", 404},
		{"GET", "/attach/default/web/main", 404},
		{"GET", "/portForward/default/web", 404},
		{"GET", "//exec/default/web/main", 404},
	} {
		before := len(asked)
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(c.method, c.path, nil))
		if w.Code != c.want || (c.want == 200) != (len(asked) > before) {
			t.Errorf("%s %s: %d (%q asked), want %d", c.method, c.path, w.Code, asked[before:], c.want)
		}
	}
}
