package loglimit

import (
	"bytes"
	"fmt"
	"log/slog"
	"strings"
	"testing"
	"time"
)

func newTest() (l *Logger, out *bytes.Buffer, now *time.Time) {
	out, now = &bytes.Buffer{}, new(time.Time)
	*now = time.Unix(1000, 0)
	l = New(slog.New(slog.NewTextHandler(out, &slog.HandlerOptions{Level: slog.LevelDebug})), time.Minute)
	l.now = func() time.Time { return *now }
	return l, out, now
}

// TestOneLineACause: each cause has its line, the next one an interval later, with how
// many were left out. Those are there for who looks closely.
func TestOneLineACause(t *testing.T) {
	l, out, now := newTest()
	for range 100 {
		l.Log(t.Context(), slog.LevelWarn, "a", "refused", "of", "a")
		l.Log(t.Context(), slog.LevelWarn, "b", "refused", "of", "b")
	}
	if n, all := strings.Count(out.String(), "level=WARN"), strings.Count(out.String(), "level=DEBUG"); n != 2 || all != 198 || strings.Contains(out.String(), "omitted") {
		t.Errorf("%d warnings, %d left out", n, all)
	}
	out.Reset()
	*now = now.Add(time.Minute)
	for range 2 {
		l.Log(t.Context(), slog.LevelWarn, "a", "refused", "of", "a")
	}
	if got := out.String(); !strings.Contains(got, "level=WARN msg=refused of=a omitted=99\n") || strings.Count(got, "level=WARN") != 1 {
		t.Errorf("an interval later: %s", got)
	}
	out.Reset()
	*now = now.Add(time.Minute)
	l.Log(t.Context(), slog.LevelWarn, "a", "refused")
	if got := out.String(); !strings.Contains(got, "omitted=1\n") {
		t.Errorf("two intervals later: %s", got)
	}
}

// TestManyCauses: a cause made up for each line is bounded as well, and those
// of before are forgotten when they are over.
func TestManyCauses(t *testing.T) {
	l, out, now := newTest()
	for round := range 3 {
		out.Reset()
		for i := range 10_000 {
			l.Log(t.Context(), slog.LevelWarn, fmt.Sprint(round, "/", i), "refused")
		}
		if n := strings.Count(out.String(), "level=WARN"); n < 2 || n > maxCauses+1 || len(l.causes) > maxCauses+1 {
			t.Errorf("round %d: %d lines of 10000 causes, %d are known", round, n, len(l.causes))
		}
		*now = now.Add(time.Minute)
	}
}
