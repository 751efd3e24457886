package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"github.com/clusterd/clusterd/bench/internal/proc"
)

// child is a server's process.
type child struct {
	greeting
	kind string
	cmd  *exec.Cmd
	in   io.WriteCloser
	log  string

	admin, user kubernetes.Interface
	// rest is the processor time that it takes in a second without requests.
	rest time.Duration
	// live is its heap after the last collection, collection what that took.
	live       uint64
	collection time.Duration
	allocated  uint64
}

// spawn starts a server of a kind and returns when it is ready.
func spawn(kind, dir string) (*child, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := &child{kind: kind, log: filepath.Join(dir, kind+".log"), cmd: exec.Command(self, "-serve", kind, "-dir", dir)}
	log, err := os.Create(c.log)
	if err != nil {
		return nil, err
	}
	defer log.Close()
	c.cmd.Stderr = log
	if c.in, err = c.cmd.StdinPipe(); err != nil {
		return nil, err
	}
	out, err := c.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := c.cmd.Start(); err != nil {
		return nil, err
	}
	if err := json.NewDecoder(out).Decode(&c.greeting); err != nil {
		return nil, c.failed(fmt.Errorf("server %s did not start: %w", kind, err))
	}
	for to, of := range map[*kubernetes.Interface]pair{&c.admin: c.Admin, &c.user: c.User} {
		if *to, err = kubernetes.NewForConfig(c.config(of)); err != nil {
			return nil, c.failed(err)
		}
	}
	return c, nil
}

// config is of a client with a certificate; none: without.
func (c *child) config(p pair) *rest.Config {
	config := &rest.Config{Host: "https://" + c.Address, QPS: -1, TLSClientConfig: rest.TLSClientConfig{CAData: c.CA, CertData: p.Cert, KeyData: p.Key}}
	config.ContentType, config.AcceptContentTypes = "application/vnd.kubernetes.protobuf", "application/vnd.kubernetes.protobuf,application/json"
	return config
}

// failed ends the process and adds the end of its log to an error.
func (c *child) failed(err error) error {
	c.end()
	text, _ := os.ReadFile(c.log)
	return fmt.Errorf("%w\n%s", err, text[max(0, len(text)-2000):])
}

// end ends the process, which ends by itself with its standard input.
func (c *child) end() {
	_ = c.in.Close()
	timer := time.AfterFunc(30*time.Second, func() { _ = c.cmd.Process.Kill() })
	defer timer.Stop()
	_ = c.cmd.Wait()
}

func (c *child) cpu() (time.Duration, error) { return proc.CPU(c.cmd.Process.Pid) }

// collect has the process collect its garbage, and returns how many bytes it has
// allocated since the last time.
func (c *child) collect(ctx context.Context) (uint64, error) {
	before, err := c.cpu()
	if err != nil {
		return 0, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+c.Control+"/collect", nil)
	if err != nil {
		return 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	var m collected
	if err := json.NewDecoder(resp.Body).Decode(&m); err != nil {
		return 0, err
	}
	after, err := c.cpu()
	if err != nil {
		return 0, err
	}
	was := c.allocated
	c.collection, c.live, c.allocated = after-before, m.Live, m.Allocated
	return m.Allocated - was, nil
}

// idle measures what the server takes without requests.
func (c *child) idle(ctx context.Context, span time.Duration) error {
	before, err := c.cpu()
	if err != nil {
		return err
	}
	began := time.Now()
	select {
	case <-time.After(span):
	case <-ctx.Done():
		return ctx.Err()
	}
	after, err := c.cpu()
	c.rest = time.Duration(float64(after-before) / time.Since(began).Seconds())
	return err
}

// profile writes a profile of the processor for a time to a file.
func (c *child) profile(ctx context.Context, span time.Duration, file string) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, fmt.Sprintf("http://%s/debug/pprof/profile?seconds=%.0f", c.Control, span.Seconds()), nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("profile of %s: %s: %s", c.kind, resp.Status, body)
	}
	return os.WriteFile(file, body, 0o600)
}
