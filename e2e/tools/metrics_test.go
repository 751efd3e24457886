package tools

import (
	"fmt"
	"io"
	"net/http"
	"testing"

	"k8s.io/client-go/rest"
)

// TestE2EMetrics has Prometheus' own parser read every page of metrics, in each
// of the forms that Prometheus asks for.
func TestE2EMetrics(t *testing.T) {
	k := start(t, "tools-metrics")
	// A pod with a probe, for pages that tell of pods.
	k.okIn(`{apiVersion: v1, kind: Pod, metadata: {name: web}, spec: {terminationGracePeriodSeconds: 1, containers: [{name: main, image: "`+image+`",
		readinessProbe: {httpGet: {path: /healthz, port: 8080}, periodSeconds: 1}}]}}`, "clusterctl", "apply", "-f", "-")
	k.ok("clusterctl", "wait", "--for=condition=Ready", "pod/web", "--timeout="+testTimeout.String())
	client, err := rest.HTTPClientFor(k.config)
	if err != nil {
		t.Fatal(err)
	}
	for _, page := range []struct {
		path   string
		series int // at least
	}{
		{"/metrics", 500}, // of the API, the store, the scheduler and the loops
		{"/metrics/slis", 1},
		{"/api/v1/nodes/n1/proxy/metrics", 50},
		{"/api/v1/nodes/n1/proxy/metrics/cadvisor", 20},
		{"/api/v1/nodes/n1/proxy/metrics/resource", 5},
		{"/api/v1/nodes/n1/proxy/metrics/probes", 1},
	} {
		for _, accept := range []string{
			"application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1",
			"text/plain;version=0.0.4",
		} {
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, k.config.Host+page.path, nil)
			if err != nil {
				t.Fatal(err)
			}
			req.Header.Set("Accept", accept)
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			kind := resp.Header.Get("Content-Type")
			if err != nil || resp.StatusCode != http.StatusOK {
				t.Errorf("%s: %s %v %.200s", page.path, resp.Status, err, body)
				continue
			}
			out, errs, code := k.run(string(body), "promparse", kind)
			var families, series int
			_, err = fmt.Sscan(out, &families, &series)
			t.Logf("%s as %s: %d families, %d series", page.path, kind, families, series)
			if code != 0 || err != nil || series < page.series {
				t.Errorf("%s as %s: exit %d, %d series, want %d or more: %s", page.path, kind, code, series, page.series, errs)
			}
		}
	}
}
