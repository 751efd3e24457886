package s3test

import (
	"bytes"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// Program is the variable that names the program of a real server.
const Program = "CLUSTERD_S3"

// Real starts such a server, which ends with the test, on the loopback: one that checks
// signatures and keeps objects as files of dir. Without a certificate it has no TLS.
func Real(t testing.TB, program, id, secret, cert, key string) (addr, dir string) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr, dir = l.Addr().String(), t.TempDir()
	l.Close()
	if err := os.Mkdir(filepath.Join(dir, Bucket), 0o700); err != nil {
		t.Fatal(err)
	}
	args := []string{"--access", id, "--secret", secret, "--port", addr}
	if cert != "" {
		args = append(args, "--cert", cert, "--key", key)
	}
	cmd := exec.Command(program, append(args, "posix", dir)...)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Log(out.String())
		}
	})
	for end := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		c, err := net.Dial("tcp", addr)
		if err == nil {
			c.Close()
			return addr, dir
		}
		if time.Now().After(end) {
			t.Fatalf("%s does not listen: %v", program, err)
		}
	}
}
