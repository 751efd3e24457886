package server

import (
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"k8s.io/apiserver/pkg/server/mux"
	"k8s.io/apiserver/pkg/server/routes"
	"k8s.io/component-base/metrics/legacyregistry"
	"k8s.io/component-base/metrics/prometheus/slis"
)

// serveMetrics does what the library does for metrics, and shows this server's own
// with those of the process.
func serveMetrics(paths *mux.PathRecorderMux, own prometheus.Gatherer) {
	library := mux.NewPathRecorderMux("metrics")
	routes.MetricsWithReset{}.Install(library)
	slis.SLIMetricsWithReset{}.Install(paths)
	all := promhttp.HandlerFor(prometheus.Gatherers{legacyregistry.DefaultGatherer, own}, promhttp.HandlerOpts{})
	paths.Handle("/metrics", http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Method == http.MethodDelete { // resets those of the process
			library.ServeHTTP(w, req)
			return
		}
		all.ServeHTTP(w, req)
	}))
}
