package csi

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/fsnotify/fsnotify"
	"google.golang.org/grpc/backoff"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/klog/v2"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"
)

// reconnect is how soon a connection that broke is tried again.
var reconnect = backoff.Config{BaseDelay: 100 * time.Millisecond, Multiplier: 1.6, Jitter: 0.2, MaxDelay: 5 * time.Second}

const (
	// rescan is how often the folder of sockets is read, whatever inotify says,
	// and sockets that did not answer are asked again.
	rescan = 5 * time.Second
	// registerTimeout bounds the calls of one registration.
	registerTimeout = 15 * time.Second
	// maxDriverName is how long a CSI driver's name may be, by the specification.
	maxDriverName = 63
)

// drivers are those that have registered.
type drivers struct {
	node *nodeObject

	mu      sync.Mutex // guards all below
	byName  map[string]*driver
	sockets map[string]*socket // by path
}

// socket is one in the folder.
type socket struct {
	id       string // of its inode: a driver that comes back makes another
	driver   string // which it registered, "": none yet
	busy     bool
	fault    string // why it did not register, as last reported
	ignored  bool   // it is none of a CSI driver
	answered bool   // it has said what it is
}

// get is the driver of the name, nil: there is none.
func (d *drivers) get(name string) *driver {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.byName[name]
}

func (d *drivers) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, one := range d.byName {
		_ = one.conn.Close()
	}
	d.byName = nil
}

// watch registers drivers whose sockets are in the folder until ctx ends, and
// drops those whose sockets have gone.
func (d *drivers) watch(ctx context.Context, dir string) error {
	watcher, err := fsnotify.NewWatcher()
	if err != nil {
		return fmt.Errorf("watch %s: %w", dir, err)
	}
	defer watcher.Close()
	if err := watcher.Add(dir); err != nil {
		return fmt.Errorf("watch %s: %w", dir, err)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	tick := time.NewTicker(rescan)
	defer tick.Stop()
	for {
		d.scan(ctx, dir, &wg)
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		case <-watcher.Events:
		case err := <-watcher.Errors:
			klog.FromContext(ctx).Info("Folder of CSI drivers is read by time alone", "err", err)
		}
	}
}

// scan compares the folder with what is known.
func (d *drivers) scan(ctx context.Context, dir string, wg *sync.WaitGroup) {
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
	if err != nil {
		klog.FromContext(ctx).Info("Folder of CSI drivers cannot be read", "err", err)
		return
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.sockets == nil {
		d.sockets, d.byName = map[string]*socket{}, map[string]*driver{}
	}
	for path, s := range d.sockets {
		if id, ok := found[path]; (!ok || id != s.id) && !s.busy {
			delete(d.sockets, path)
			d.drop(ctx, s.driver)
		}
	}
	settled := true
	for path, id := range found {
		s := d.sockets[path]
		if s == nil {
			s = &socket{id: id}
			d.sockets[path] = s
		}
		settled = settled && (s.answered || s.ignored)
		if s.driver != "" || s.busy || s.ignored {
			continue
		}
		s.busy = true
		wg.Go(func() { d.register(ctx, path, s) })
	}
	if settled {
		d.node.settle()
	}
}

// drop forgets a driver whose socket is gone. The caller holds mu.
func (d *drivers) drop(ctx context.Context, name string) {
	one := d.byName[name]
	if one == nil {
		return
	}
	delete(d.byName, name)
	_ = one.conn.Close()
	d.node.remove(name)
	klog.FromContext(ctx).Info("CSI driver has gone", "driver", name)
}

// register calls the server of a socket and registers a CSI driver.
func (d *drivers) register(ctx context.Context, path string, s *socket) {
	callCtx, cancel := context.WithTimeout(ctx, registerTimeout)
	defer cancel()
	one, ours, err := d.meet(callCtx, path)
	d.mu.Lock()
	defer d.mu.Unlock()
	s.busy = false
	switch {
	case ctx.Err() != nil:
		if one != nil {
			_ = one.conn.Close()
		}
	case err != nil:
		if s.fault != err.Error() {
			s.fault = err.Error()
			klog.FromContext(ctx).Info("CSI driver is not registered yet, will ask again", "socket", path, "err", err)
		}
	case !ours:
		s.ignored = true
	default:
		if before := d.byName[one.name]; before != nil {
			_ = before.conn.Close()
			for _, other := range d.sockets {
				if other.driver == one.name {
					other.driver, other.ignored = "", true // the newest counts
				}
			}
		}
		d.byName[one.name], s.driver, s.fault, s.answered = one, one.name, "", true
		klog.FromContext(ctx).Info("CSI driver has registered", "driver", one.name, "nodeID", one.nodeID)
	}
}

// meet speaks to the server of the socket. ours is false for plugins of other
// kinds; the driver gets the outcome.
func (d *drivers) meet(ctx context.Context, path string) (one *driver, ours bool, err error) {
	conn, err := dial(path)
	if err != nil {
		return nil, true, err
	}
	defer conn.Close()
	plugin := registration.NewRegistrationClient(conn)
	info, err := plugin.GetInfo(ctx, &registration.InfoRequest{})
	if err != nil {
		return nil, true, fmt.Errorf("ask for its name: %w", err)
	}
	if info.Type != registration.CSIPlugin {
		klog.FromContext(ctx).Info("Plugin is of a kind that this node has no use for", "socket", path, "name", info.Name, "type", info.Type)
		return nil, false, nil
	}
	one, err = d.take(ctx, info, path)
	result := &registration.RegistrationStatus{PluginRegistered: err == nil}
	if err != nil {
		result.Error = err.Error()
	}
	if _, tellErr := plugin.NotifyRegistrationStatus(ctx, result); tellErr != nil && err == nil {
		_ = one.conn.Close()
		return nil, true, fmt.Errorf("tell it that it is registered: %w", tellErr)
	}
	return one, true, err
}

// take checks what a driver says of itself and writes it into the node's
// objects.
func (d *drivers) take(ctx context.Context, info *registration.PluginInfo, path string) (*driver, error) {
	if errs := validation.IsDNS1123Subdomain(strings.ToLower(info.Name)); len(errs) > 0 || len(info.Name) > maxDriverName {
		return nil, fmt.Errorf("name %q: not the name of a CSI driver: at most %d letters, digits, dots and hyphens", info.Name, maxDriverName)
	}
	if len(info.SupportedVersions) > 0 && !slices.ContainsFunc(info.SupportedVersions, func(v string) bool {
		return strings.HasPrefix(strings.TrimPrefix(v, "v"), "1.")
	}) {
		return nil, fmt.Errorf("driver %s speaks versions %q of CSI, this node 1", info.Name, info.SupportedVersions)
	}
	endpoint := strings.TrimPrefix(info.Endpoint, "unix://")
	if endpoint == "" {
		endpoint = path
	}
	if !filepath.IsAbs(endpoint) {
		return nil, fmt.Errorf("driver %s: endpoint %q: an absolute path is required", info.Name, info.Endpoint)
	}
	conn, err := dial(endpoint)
	if err != nil {
		return nil, err
	}
	one := &driver{name: info.Name, conn: conn, node: spec.NewNodeClient(conn)}
	who, err := one.node.NodeGetInfo(ctx, &spec.NodeGetInfoRequest{})
	if err == nil && who.GetNodeId() == "" {
		err = errors.New("it names no node id")
	}
	if err != nil {
		_ = conn.Close()
		return nil, one.fault("NodeGetInfo", err)
	}
	one.nodeID = who.GetNodeId()
	if err := d.node.add(ctx, info.Name, who); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return one, nil
}
