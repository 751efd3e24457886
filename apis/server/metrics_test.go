package server_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/clusterd/clusterd/apis/server"
	"github.com/clusterd/clusterd/apis/server/servertest"
)

// TestOwnMetrics: each of two servers in one process shows its own metrics, and the
// process's beside them.
func TestOwnMetrics(t *testing.T) {
	for _, value := range []float64{1, 2} {
		own := prometheus.NewGauge(prometheus.GaugeOpts{Name: "clusterd_test_own", Help: "Of this server."})
		own.Set(value)
		registry := prometheus.NewRegistry()
		registry.MustRegister(own)
		s := servertest.Start(t, func(c *server.Config) { c.Metrics = registry })
		call := func(verb, path string) string {
			body, err := s.Client.Discovery().RESTClient().Verb(verb).AbsPath(path).DoRaw(t.Context())
			if err != nil {
				t.Errorf("server %v: %s %s: %v", value, verb, path, err)
			}
			return string(body)
		}
		shown := call("GET", "/metrics")
		for _, want := range []string{fmt.Sprintf("\nclusterd_test_own %v\n", value), "\napiserver_request_total{"} {
			if !strings.Contains(shown, want) {
				t.Errorf("server %v: /metrics lacks %q:\n%.2000s", value, want, shown)
			}
		}
		call("GET", "/metrics/slis")
		if got := call("DELETE", "/metrics"); !strings.Contains(got, "reset") {
			t.Errorf("server %v: a reset answers %q", value, got)
		}
	}
}
