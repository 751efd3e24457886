package e2e

import (
	"encoding/json"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/agent/podmon/api"
	"github.com/clusterd/clusterd/agent/podmon/api/frame"
	"github.com/clusterd/clusterd/e2e/cluster"
)

// between stands between a node's clusterd and its podmon, and keeps back what
// podmon tells of one container.
type between struct {
	dir  string // podmon's
	ln   *net.UnixListener
	wg   sync.WaitGroup
	id   atomic.Pointer[string] // of the container
	kept atomic.Int32           // events that were kept back

	mu   sync.Mutex // guards open
	open map[*frame.Conn]bool
}

const (
	podmonSocket = "podmon.sock"
	realSocket   = "podmon.real.sock"
)

// standBetween puts itself at the place of podmon's socket, and restarts clusterd.
func (e *env) standBetween(n cluster.Node) *between {
	e.t.Helper()
	if err := e.Stop(e.t.Context(), n.Name); err != nil {
		e.t.Fatal(err)
	}
	b := &between{dir: filepath.Join(n.Data, "podmon"), open: map[*frame.Conn]bool{}}
	if err := os.Rename(filepath.Join(b.dir, podmonSocket), filepath.Join(b.dir, realSocket)); err != nil {
		e.t.Fatal(err)
	}
	e.t.Cleanup(b.leave)
	if err := b.short(func(dir string) (err error) {
		b.ln, err = net.ListenUnix("unix", &net.UnixAddr{Name: filepath.Join(dir, podmonSocket), Net: "unix"})
		return err
	}); err != nil {
		e.t.Fatal(err)
	}
	b.ln.SetUnlinkOnClose(false) // its name is a short one that is gone by then
	b.wg.Go(func() {
		for {
			c, err := b.ln.AcceptUnix()
			if err != nil {
				return
			}
			b.wg.Go(func() { b.join(frame.NewConn(c)) })
		}
	})
	if err := e.Start(e.t.Context(), n.Name); err != nil {
		e.t.Fatal(err)
	}
	return b
}

// losesEnd kills a pod's container, and what podmon tells of it is lost.
func (e *env) losesEnd(line *between, n cluster.Node, ns, name string) corev1.ContainerStatus {
	e.t.Helper()
	p := pod(name, "sleep")
	p.Spec.NodeName = n.Name
	e.create(ns, p)
	lost := e.podReady(ns, name).Status.ContainerStatuses[0]
	line.loses(lost.ContainerID)
	e.killContainer(n, lost.ContainerID)
	return lost
}

// showResync waits until the pod's container was started again: podmon's list is
// compared with the agent's state once a minute.
func (e *env) showResync(t *testing.T, line *between, ns, name string, lost corev1.ContainerStatus) {
	again := e.podIs(ns, name, "started again", func(p *corev1.Pod) error {
		if s := p.Status.ContainerStatuses; len(s) != 1 || s[0].RestartCount == 0 || !podReady(p) {
			return errors.New("not yet")
		}
		return nil
	}).Status.ContainerStatuses[0]
	if line.kept.Load() == 0 {
		t.Error("no event was kept back")
	}
	if end := again.LastTerminationState.Terminated; again.RestartCount != 1 || end == nil || end.ExitCode != 137 || end.ContainerID != lost.ContainerID {
		t.Errorf("%+v", again)
	}
	line.leave()
}

// short calls fn with a short name of podmon's directory: those of sockets are
// bounded.
func (b *between) short(fn func(dir string) error) error {
	dir, err := os.MkdirTemp("", "pm")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	link := filepath.Join(dir, "d")
	if err := os.Symlink(b.dir, link); err != nil {
		return err
	}
	return fn(link)
}

// join carries frames between clusterd and podmon until one of them hangs up.
func (b *between) join(agent *frame.Conn) {
	defer agent.Close()
	var podmon *frame.Conn
	if err := b.short(func(dir string) error {
		c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: filepath.Join(dir, realSocket), Net: "unix"})
		if err == nil {
			podmon = frame.NewConn(c)
		}
		return err
	}); err != nil {
		return
	}
	defer podmon.Close()
	for _, c := range []*frame.Conn{agent, podmon} {
		b.mu.Lock()
		b.open[c] = true
		b.mu.Unlock()
		defer func() {
			b.mu.Lock()
			delete(b.open, c)
			b.mu.Unlock()
		}()
	}
	var up sync.WaitGroup
	up.Go(func() {
		defer podmon.Close()
		carry(agent, podmon, func(json.RawMessage) bool { return true })
	})
	carry(podmon, agent, b.passes)
	agent.Close()
	up.Wait()
}

// passes keeps events about the container back.
func (b *between) passes(message json.RawMessage) bool {
	id := b.id.Load()
	var resp api.Response
	if id == nil || json.Unmarshal(message, &resp) != nil || resp.Event == nil || resp.Event.ID != *id {
		return true
	}
	b.kept.Add(1)
	return false
}

func carry(from, to *frame.Conn, passes func(json.RawMessage) bool) {
	for {
		var message json.RawMessage
		files, err := from.Read(&message)
		if err == nil && passes(message) {
			err = to.Write(message, files...)
		}
		for _, f := range files {
			f.Close()
		}
		if err != nil {
			return
		}
	}
}

// loses drops the events of a container from now on.
func (b *between) loses(containerID string) {
	_, id, _ := strings.Cut(containerID, "://")
	b.id.Store(&id)
}

// leave gives podmon its socket back, once.
func (b *between) leave() {
	if err := os.Rename(filepath.Join(b.dir, realSocket), filepath.Join(b.dir, podmonSocket)); errors.Is(err, os.ErrNotExist) {
		return
	}
	if b.ln != nil {
		b.ln.Close()
	}
	b.mu.Lock()
	for c := range b.open {
		c.Close()
	}
	b.mu.Unlock()
	b.wg.Wait()
}
