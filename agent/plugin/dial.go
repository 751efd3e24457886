package plugin

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/backoff"
	"google.golang.org/grpc/credentials/insecure"
)

// reconnect is how soon a connection that broke is tried again.
var reconnect = backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second}

// Dial prepares calls to the socket of a plugin, each of which takes no longer
// than timeout; it connects with the first one. Calls to a socket without a
// server fail at once.
func Dial(socket string, timeout time.Duration) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///"+filepath.Base(socket),
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithAuthority("localhost"),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) { return dialUnix(ctx, socket) }),
		grpc.WithConnectParams(grpc.ConnectParams{MinConnectTimeout: 5 * time.Second, Backoff: reconnect}),
		grpc.WithUnaryInterceptor(func(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
			ctx, cancel := context.WithTimeout(ctx, timeout)
			defer cancel()
			return invoke(ctx, method, req, reply, cc, opts...)
		}))
}

// maxSocketPath is what the kernel takes, unix(7).
const maxSocketPath = 107

// dialUnix connects to a socket, however long its path is.
func dialUnix(ctx context.Context, socket string) (net.Conn, error) {
	var dialer net.Dialer
	if len(socket) <= maxSocketPath {
		return dialer.DialContext(ctx, "unix", socket)
	}
	dir, err := os.Open(filepath.Dir(socket))
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	return dialer.DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d/%s", dir.Fd(), filepath.Base(socket)))
}
