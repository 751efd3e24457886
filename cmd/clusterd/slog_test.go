package main

import (
	"bytes"
	"errors"
	"log/slog"
	"strings"
	"testing"
)

func TestQuieter(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(libraryLogFilter{slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelInfo})})
	log.Info("news of a library")
	log.Error("Error on socket receive")
	log.Error("something broke")
	log.Warn("look at this")
	log.Error("Unhandled Error", "err", "apiserver was unable to write a JSON response: io: read/write on closed pipe")
	log.Error("Unhandled Error", "err", errors.New("apiserver received an error that is not an metav1.Status: x: context canceled"))
	log.Error("Unhandled Error", "err", "failed to fetch openapi paths: context canceled")
	log.Error("Unhandled Error", "err", "apiserver received an error that is not an metav1.Status: disk on fire")
	got := out.String()
	if strings.Contains(got, "news") || strings.Contains(got, "socket") || strings.Contains(got, "pipe") || strings.Contains(got, "canceled") {
		t.Errorf("chatter comes through:\n%s", got)
	}
	if !strings.Contains(got, `level=WARN msg="something broke"`) || !strings.Contains(got, `level=WARN msg="look at this"`) || !strings.Contains(got, "disk on fire") {
		t.Errorf("an error or a warning was lost:\n%s", got)
	}
}
