package main

import (
	"fmt"
	"io"
	"log/slog"
	"runtime/debug"
	"runtime/metrics"

	"github.com/go-logr/logr"
	"k8s.io/klog/v2"

	"github.com/clusterd/clusterd/apis/server"
)

// newLogger makes the process's one log handler, and sets klog, which the
// Kubernetes libraries write to, onto it.
func newLogger(cfg Config, w io.Writer) (*slog.Logger, error) {
	level, err := cfg.level()
	if err != nil {
		return nil, err
	}
	opts := &slog.HandlerOptions{Level: level}
	var h slog.Handler = slog.NewTextHandler(w, opts)
	if cfg.LogFormat == "json" {
		h = slog.NewJSONHandler(w, opts)
	}
	log := slog.New(h).With("node", cfg.Name)
	// The libraries are verbose at their info level: what they report is
	// seldom of use to an operator. One level down, then.
	klog.SetLoggerWithOptions(logr.FromSlogHandler(libraryLogFilter{log.Handler()}), klog.ContextualLogger(true))
	slog.SetDefault(log)
	return log, nil
}

// room is the logger of one room, whose name each line has as its component.
func room(log *slog.Logger, name string) *slog.Logger { return log.With("component", name) }

// release is set by the linker.
var release = ""

// version is this build's version in words.
func version() string {
	if release != "" {
		return release
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.revision" && len(s.Value) >= 12 {
				return fmt.Sprintf("v0.1.0-dev+%s", s.Value[:12])
			}
		}
	}
	return "v0.1.0-dev"
}

// kubeVersion is the Kubernetes version whose API we speak, as nodes show it.
func kubeVersion() string { return server.Version() }

// gogc is the growth of the heap, in percent, that starts a garbage collection.
func gogc() uint64 {
	sample := []metrics.Sample{{Name: "/gc/gogc:percent"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}
