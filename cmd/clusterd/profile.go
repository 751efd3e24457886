//go:build profile

package main

import (
	"log/slog"
	"net/http"
	_ "net/http/pprof" //nolint:gosec // this file is in no release
)

// Programs for measurements (go build -tags profile) give Go's profiles to anyone who
// asks, at port 6060 of all addresses: bench/agents -profiles.
func init() {
	go func() { slog.Warn("no profiles are served", "err", http.ListenAndServe(":6060", nil)) }()
}
