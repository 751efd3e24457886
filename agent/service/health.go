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

// listenAgain is how long after a port could not be had it is tried again: who has it
// may be another Service of before.
const listenAgain = 5 * time.Second

// healthServers answer load balancers that ask whether this node has an
// endpoint of a Service (healthCheckNodePort), each on its own port.
type healthServers struct {
	log   *slog.Logger
	again time.Duration

	mu      sync.Mutex // guards servers, and of each srv, retry and failed
	servers map[types.NamespacedName]*healthServer
}

type healthServer struct {
	port int32
	key  types.NamespacedName
	// srv serves; nil: the port could not be had, and retry tries it again.
	srv    *http.Server
	retry  *time.Timer
	failed bool // that was said

	mu        sync.Mutex
	endpoints int
}

func newHealthServers(log *slog.Logger) *healthServers {
	return &healthServers{log: log, again: listenAgain, servers: map[types.NamespacedName]*healthServer{}}
}

// set serves the Service's health on port; 0: not any more.
func (h *healthServers) set(key types.NamespacedName, port int32, endpoints int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s := h.servers[key]
	if s != nil && s.port != port {
		h.end(s)
		s = nil
	}
	if port == 0 {
		return
	}
	if s == nil {
		s = &healthServer{port: port, key: key}
		h.servers[key] = s
		h.listen(s)
	}
	s.mu.Lock()
	s.endpoints = endpoints
	s.mu.Unlock()
}

// listen begins to serve s, now or when its port can be had. h.mu is held.
func (h *healthServers) listen(s *healthServer) {
	l, err := (&net.ListenConfig{}).Listen(context.Background(), "tcp", net.JoinHostPort("", strconv.Itoa(int(s.port))))
	if err != nil {
		if !s.failed {
			h.log.Error("the health of a Service cannot be served; it is tried again", "service", s.key, "port", s.port, "every", h.again, "err", err)
		}
		h.later(s)
		return
	}
	if s.failed {
		h.log.Info("the health of a Service is served now", "service", s.key, "port", s.port)
	}
	s.failed, s.retry = false, nil
	srv := &http.Server{Handler: s, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 30 * time.Second, ErrorLog: slog.NewLogLogger(h.log.Handler(), slog.LevelDebug)}
	s.srv = srv
	go func() { // ends with Close
		err := srv.Serve(l)
		if errors.Is(err, http.ErrServerClosed) {
			return
		}
		h.log.Error("the health of a Service is no longer served; it is tried again", "service", s.key, "port", s.port, "every", h.again, "err", err)
		_ = srv.Close()
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.servers[s.key] == s {
			h.later(s)
		}
	}()
}

// later tries to serve s again. h.mu is held.
func (h *healthServers) later(s *healthServer) {
	s.srv, s.failed = nil, true
	s.retry = time.AfterFunc(h.again, func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.servers[s.key] == s {
			h.listen(s)
		}
	})
}

// end serves s no more. h.mu is held.
func (h *healthServers) end(s *healthServer) {
	delete(h.servers, s.key)
	if s.retry != nil {
		s.retry.Stop()
	}
	if s.srv != nil {
		_ = s.srv.Close()
	}
}

func (h *healthServers) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, s := range h.servers {
		h.end(s)
	}
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
