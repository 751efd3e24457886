// Package plugin discovers kubelet plugins via registration sockets
// (k8s.io/kubelet/pkg/apis/pluginregistration/v1). It asks each for its type and passes it
// to the handler of that type; it makes no other calls to plugins.
//
// On disk, below Config.Root, which is what plugins know as /var/lib/kubelet:
//
//	plugins_registry/NAME.sock   where plugins register
//	plugins/NAME/                plugins' own sockets
package plugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/fsnotify/fsnotify"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/clusterd/clusterd/slack"
)

const (
	// rescan is how often the directory of sockets is read, whatever inotify says,
	// and sockets that did not answer are asked again.
	rescan = 5 * time.Second
	// registerTimeout bounds the calls of one registration.
	registerTimeout = 15 * time.Second
)

// Info is what a plugin says of itself.
type Info struct {
	Name string
	// Endpoint is the path of the socket where it serves, Socket of the one by
	// which it registered. Both may be the same.
	Endpoint, Socket string
	Versions         []string // whatever they mean for its type
}

// Handler serves the plugins of one type. Its methods are called concurrently
// for different sockets, and one after another for one.
type Handler interface {
	// Register takes a plugin, whose own server answers or not. An error is reported
	// to the plugin, and it is asked again.
	Register(ctx context.Context, p Info) error
	// Deregister takes it away: its socket has gone, or is another's by now.
	Deregister(p Info)
	// Settled is called whenever each socket that there is has been asked what it
	// is, and has answered. It must not block.
	Settled()
}

// Registry is the directory of sockets of one node.
type Registry struct {
	root     string
	handlers map[string]Handler // by type; not changed once Run was called
	watch    func(dir string) (*fsnotify.Watcher, error)

	mu      sync.Mutex         // guards all below
	sockets map[string]*socket // by path
}

// socket is one in the directory.
type socket struct {
	id      string // of its inode: a plugin that comes back makes another
	busy    bool
	fault   string // why it did not register, as last reported
	ignored bool   // it is of a type that has no handler
	handler Handler
	info    *Info // what has registered by it; nil: nothing yet
}

// New returns the registry of the directory that plugins look for. It starts
// nothing.
func New(root string) *Registry {
	return &Registry{root: root, handlers: map[string]Handler{}, watch: watchDir, sockets: map[string]*socket{}}
}

// Handle has h serve the plugins of a type. It must be called before Run.
func (r *Registry) Handle(kind string, h Handler) { r.handlers[kind] = h }

// lockFile marks a directory as a node's of ours.
const lockFile = ".clusterd"

// Owned reports whether the directory was ever a node's of ours.
func Owned(root string) bool {
	_, err := os.Lstat(filepath.Join(root, lockFile))
	return err == nil
}

// InUse reports whether a node that runs has the directory.
func InUse(root string) bool {
	f, err := os.Open(filepath.Join(root, lockFile))
	if err != nil {
		return false
	}
	defer f.Close()
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}

// lock makes the directory this node's alone until the file is closed.
func (r *Registry) lock() (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(r.root, lockFile), os.O_CREATE|os.O_RDWR|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		f.Close()
		return nil, fmt.Errorf("%s is another node's: give each node of a machine its own --kubelet-root: %w", r.root, err)
	}
	return f, nil
}

// Run registers plugins whose sockets are in the directory until ctx ends, and
// takes away those whose sockets have gone. The directory is this node's alone
// meanwhile. What has registered stays so when it returns.
func (r *Registry) Run(ctx context.Context) error {
	dir := filepath.Join(r.root, "plugins_registry")
	for _, d := range []string{dir, filepath.Join(r.root, "plugins")} {
		if err := os.MkdirAll(d, 0o750); err != nil {
			return fmt.Errorf("folder of plugins: %w", err)
		}
	}
	lock, err := r.lock()
	if err != nil {
		return err
	}
	defer lock.Close()
	watcher, err := r.watch(dir)
	if err != nil {
		// A pod may have taken all of this user's inotify instances: see inotify(7).
		klog.FromContext(ctx).Info("Plugin directory cannot be watched and is polled", "directory", dir, "every", rescan, "err", err)
		watcher = &fsnotify.Watcher{}
	} else {
		defer watcher.Close()
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	tick := slack.NewTicker(rescan)
	defer tick.Stop()
	for {
		r.scan(ctx, dir, &wg)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-watcher.Events:
		case err := <-watcher.Errors:
			klog.FromContext(ctx).Info("Plugin directory cannot be watched and is polled", "err", err)
		}
	}
}

// watchDir tells of changes in a directory.
func watchDir(dir string) (*fsnotify.Watcher, error) {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return nil, err
	}
	if err := watcher.Add(dir); err != nil {
		return nil, errors.Join(err, watcher.Close())
	}
	return watcher, nil
}

// scan compares the directory with what is known.
func (r *Registry) scan(ctx context.Context, dir string, wg *sync.WaitGroup) {
	found, err := socketsIn(dir)
	if err != nil {
		klog.FromContext(ctx).Info("Folder of plugins cannot be read", "err", err)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for path, s := range r.sockets {
		if id, ok := found[path]; (!ok || id != s.id) && !s.busy {
			delete(r.sockets, path)
			if s.info != nil {
				s.handler.Deregister(*s.info)
			}
		}
	}
	settled := true
	for path, id := range found {
		s := r.sockets[path]
		if s == nil {
			s = &socket{id: id}
			r.sockets[path] = s
		}
		settled = settled && (s.info != nil || s.ignored)
		if s.info != nil || s.busy || s.ignored {
			continue
		}
		s.busy = true
		wg.Go(func() { r.register(ctx, path, s) })
	}
	if settled {
		for _, h := range r.handlers {
			h.Settled()
		}
	}
}

// socketsIn are the sockets below a directory, and what tells each from another of
// its path.
func socketsIn(dir string) (map[string]string, error) {
	found := map[string]string{}
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return nil // it went meanwhile
		}
		if strings.HasPrefix(e.Name(), ".") && path != dir {
			if e.IsDir() {
				return filepath.SkipDir
			}
			return nil
		}
		if e.Type()&os.ModeSocket == 0 {
			return nil
		}
		if info, err := e.Info(); err == nil {
			found[path] = fmt.Sprintf("%v %v", inode(info), info.ModTime().UnixNano())
		}
		return nil
	})
	return found, err
}

// inode tells files of one name apart.
func inode(info fs.FileInfo) uint64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return st.Ino
	}
	return 0
}

// register calls the server of a socket and hands the plugin to its handler.
func (r *Registry) register(ctx context.Context, path string, s *socket) {
	callCtx, cancel := context.WithTimeout(ctx, registerTimeout)
	defer cancel()
	info, handler, err := r.meet(callCtx, path)
	r.mu.Lock()
	defer r.mu.Unlock()
	s.busy = false
	switch {
	case err == nil && handler == nil:
		s.ignored = true
	case err == nil:
		s.info, s.handler, s.fault = info, handler, ""
	case ctx.Err() == nil && s.fault != err.Error():
		s.fault = err.Error()
		klog.FromContext(ctx).Info("Plugin is not registered yet, will ask again", "socket", path, "err", err)
	}
}

// meet speaks to the server of the socket. The handler is nil for plugins of
// types that have none; the plugin gets the outcome.
func (r *Registry) meet(ctx context.Context, path string) (*Info, Handler, error) {
	conn, err := Dial(path, registerTimeout)
	if err != nil {
		return nil, nil, err
	}
	defer conn.Close()
	client := registration.NewRegistrationClient(conn)
	said, err := client.GetInfo(ctx, &registration.InfoRequest{})
	if err != nil {
		return nil, nil, fmt.Errorf("ask for its name: %w", err)
	}
	handler := r.handlers[said.Type]
	if handler == nil {
		klog.FromContext(ctx).Info("Plugin is of a type that this node has no use for", "socket", path, "name", said.Name, "type", said.Type)
		return nil, nil, nil
	}
	info, err := infoOf(said, path)
	if err == nil {
		err = handler.Register(ctx, *info)
	}
	result := &registration.RegistrationStatus{PluginRegistered: err == nil}
	if err != nil {
		result.Error = err.Error()
	}
	if _, tellErr := client.NotifyRegistrationStatus(ctx, result); tellErr != nil && err == nil {
		handler.Deregister(*info)
		return nil, nil, fmt.Errorf("tell %s that it is registered: %w", info.Name, tellErr)
	}
	return info, handler, err
}

// infoOf reads what a plugin says of itself.
func infoOf(said *registration.PluginInfo, socket string) (*Info, error) {
	info := &Info{Name: said.Name, Socket: socket, Endpoint: strings.TrimPrefix(said.Endpoint, "unix://"), Versions: said.SupportedVersions}
	if info.Name == "" {
		return nil, errors.New("the plugin has no name")
	}
	if info.Endpoint == "" {
		info.Endpoint = socket
	}
	if !filepath.IsAbs(info.Endpoint) {
		return nil, fmt.Errorf("plugin %s: endpoint %q: an absolute path is required", info.Name, said.Endpoint)
	}
	return info, nil
}
