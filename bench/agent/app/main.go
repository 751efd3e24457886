// App is what the benchmark's probes ask: HTTP on port 8080 and the gRPC health
// protocol on port 8081, until TERM.
package main

import (
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/signal"
	"syscall"

	"google.golang.org/grpc"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"
)

func main() {
	term := make(chan os.Signal, 1)
	signal.Notify(term, syscall.SIGTERM)
	ended := make(chan error, 2)
	go func() {
		ended <- http.ListenAndServe(":8080", http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") }))
	}()
	go func() { ended <- serveHealth() }()
	select {
	case <-term:
	case err := <-ended:
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func serveHealth() error {
	l, err := net.Listen("tcp", ":8081")
	if err != nil {
		return err
	}
	s := grpc.NewServer()
	grpc_health_v1.RegisterHealthServer(s, health.NewServer())
	return errors.Join(s.Serve(l), l.Close())
}
