package service

import (
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// TestHealthPortIsTakenAtFirst: the health of a Service is served as soon as its port
// can be had, without a change of the Service.
func TestHealthPortIsTakenAtFirst(t *testing.T) {
	taken, err := net.Listen("tcp", ":0")
	if err != nil {
		t.Fatal(err)
	}
	port := taken.Addr().(*net.TCPAddr).Port
	h := newHealthServers(slog.New(slog.DiscardHandler))
	h.again = 10 * time.Millisecond
	defer h.close()
	key := types.NamespacedName{Namespace: "ns", Name: "web"}
	h.set(key, int32(port), 1)
	h.set(key, int32(port), 2) // what is said meanwhile counts
	if err := taken.Close(); err != nil {
		t.Fatal(err)
	}
	client := &http.Client{Timeout: time.Minute, Transport: &http.Transport{DisableKeepAlives: true}}
	for until := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		resp, err := client.Get(fmt.Sprintf("http://127.0.0.1:%d/", port))
		if err == nil {
			resp.Body.Close()
			if got := resp.Header.Get("X-Load-Balancing-Endpoint-Weight"); resp.StatusCode != http.StatusOK || got != "2" {
				t.Errorf("%s, %s endpoints", resp.Status, got)
			}
			break
		}
		if time.Now().After(until) {
			t.Fatal(err)
		}
	}
	h.set(key, 0, 0)
	if len(h.servers) > 0 {
		t.Errorf("left: %v", h.servers)
	}
}
