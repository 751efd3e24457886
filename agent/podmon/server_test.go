package podmon

import (
	"context"
	"log/slog"
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podmon/api/frame"
)

// TestRequestsAtOnce: the bug of issue 9 was that the requests of one connection that
// are worked on had no bound. Those beyond it are refused, and the connection is still
// read: its end is seen.
func TestRequestsAtOnce(t *testing.T) {
	life, stop := context.WithCancel(t.Context())
	defer stop()
	s := &Supervisor{log: slog.New(slog.DiscardHandler), life: life}
	server, client := connected(t)
	ended := make(chan struct{})
	go func() { defer close(ended); s.serveConn(server) }()
	ask := func(id uint64, op string) api.Response {
		t.Helper()
		if err := client.Write(api.Request{ID: id, Op: op, Version: api.Version}); err != nil {
			t.Fatal(err)
		}
		var resp api.Response
		if _, err := client.Read(&resp); err != nil || resp.ID != id {
			t.Fatalf("request %d: answer to %d, %v", id, resp.ID, err)
		}
		return resp
	}
	for id := range uint64(requestsAtOnce) { // each lasts as long as the connection
		if resp := ask(id+1, api.OpEvents); resp.Error != nil {
			t.Fatalf("request %d: %v", id+1, resp.Error)
		}
	}
	for id := uint64(1000); id < 1003; id++ {
		if resp := ask(id, api.OpHello); resp.Error == nil || resp.Error.Code != api.CodeBusy {
			t.Errorf("a request beyond the bound: %v", resp.Error)
		}
	}
	client.Close()
	<-ended
}

// connected gives both ends of a connection.
func connected(t *testing.T) (a, b *frame.Conn) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	var ends [2]*frame.Conn
	for i, fd := range fds {
		f := os.NewFile(uintptr(fd), "pair")
		c, err := net.FileConn(f)
		f.Close()
		if err != nil {
			t.Fatal(err)
		}
		ends[i] = frame.NewConn(c.(*net.UnixConn))
		t.Cleanup(func() { ends[i].Close() })
	}
	return ends[0], ends[1]
}
