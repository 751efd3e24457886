package main

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
)

func TestQuieter(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(quieter{slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelInfo})})
	log.Info("news of a library")
	log.Error("Error on socket receive")
	log.Error("something broke")
	log.Warn("look at this")
	got := out.String()
	if strings.Contains(got, "news") || strings.Contains(got, "socket") {
		t.Errorf("chatter comes through:\n%s", got)
	}
	if !strings.Contains(got, `level=WARN msg="something broke"`) || !strings.Contains(got, `level=WARN msg="look at this"`) {
		t.Errorf("an error or a warning was lost:\n%s", got)
	}
}
