package join

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// TestAskClock: how far a server's clock is ahead is what its answer says, whatever it answers.
func TestAskClock(t *testing.T) {
	for name, c := range map[string]struct {
		ahead time.Duration
		code  int
	}{
		"right":      {0, http.StatusOK},
		"ahead":      {48 * time.Hour, http.StatusNotFound},
		"behind":     {-48 * time.Hour, http.StatusServiceUnavailable},
		"of decades": {30 * 365 * 24 * time.Hour, http.StatusOK},
	} {
		srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Date", time.Now().Add(c.ahead).UTC().Format(http.TimeFormat))
			w.WriteHeader(c.code)
		}))
		dial := func(ctx context.Context) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", srv.Listener.Addr().String())
		}
		got, err := AskClock(t.Context(), dial, "me", time.Now)
		if err != nil || (got-c.ahead).Abs() > time.Minute {
			t.Errorf("%s: %s ahead, %v", name, got, err)
		}
		srv.Close()
	}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { w.Header()["Date"] = nil }))
	defer srv.Close()
	dial := func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", srv.Listener.Addr().String())
	}
	if _, err := AskClock(t.Context(), dial, "me", time.Now); err == nil || !strings.Contains(err.Error(), "the time in its answer") {
		t.Errorf("an answer without time: %v", err)
	}
}
