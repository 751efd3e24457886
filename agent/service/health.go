package service

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// healthServers answer load balancers that ask whether this node has an
// endpoint of a Service (healthCheckNodePort), each on its own port.
type healthServers struct {
	log *slog.Logger

	mu      sync.Mutex
	servers map[types.NamespacedName]*healthServer
}

type healthServer struct {
	port int32
	key  types.NamespacedName
	srv  *http.Server

	mu        sync.Mutex
	endpoints int
}

func newHealthServers(log *slog.Logger) *healthServers {
	return &healthServers{log: log, servers: map[types.NamespacedName]*healthServer{}}
}

// set serves the Service's health on port; 0: not any more.
func (h *healthServers) set(key types.NamespacedName, port int32, endpoints int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.servers[key]
	if s != nil && s.port != port {
		_ = s.srv.Close()
		delete(h.servers, key)
		s = nil
	}
	if port == 0 {
		return
	}
	if s == nil {
		l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", net.JoinHostPort("", strconv.Itoa(int(port))))
		if err != nil {
			// Tried again with the next change of the Service.
			h.log.Error("the health of a Service cannot be served", "service", key, "port", port, "err", err)
			return
		}
		s = &healthServer{port: port, key: key}
		s.srv = &http.Server{Handler: s, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 30 * time.Second, ErrorLog: slog.NewLogLogger(h.log.Handler(), slog.LevelDebug)}
		h.servers[key] = s
		go func() { // ends with Close
			if err := s.srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
				h.log.Error("the health of a Service is no longer served", "service", key, "port", port, "err", err)
			}
		}()
	}
	s.mu.Lock()
	s.endpoints = endpoints
	s.mu.Unlock()
}

func (h *healthServers) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, s := range h.servers {
		_ = s.srv.Close()
	}
	clear(h.servers)
}

// ServeHTTP answers 200 while the node has an endpoint, else 503.
func (s *healthServer) ServeHTTP(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	n := s.endpoints
	s.mu.Unlock()
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	w.Header().Set("X-Load-Balancing-Endpoint-Weight", strconv.Itoa(n))
	if n == 0 {
		w.WriteHeader(http.StatusServiceUnavailable)
	}
	_ = json.NewEncoder(w).Encode(map[string]any{
		"service":             map[string]string{"namespace": s.key.Namespace, "name": s.key.Name},
		"localEndpoints":      n,
		"serviceProxyHealthy": true,
	})
}
