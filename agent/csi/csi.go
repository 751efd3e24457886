// Package csi has CSI drivers of this node mount volumes for its pods. Drivers
// register as plugins do (package plugin); what they were asked to mount is on
// record, on disk, before they are asked, so that every mount is taken away
// again after any crash in between.
//
// On disk, below Config.Root, which is what drivers know as /var/lib/kubelet:
//
//	plugins/kubernetes.io/csi/DRIVER/HASH/globalmount     a volume, staged
//	plugins/kubernetes.io/csi/volumeDevices/staging/NAME  … a raw block volume
//	plugins/kubernetes.io/csi/volumeDevices/publish/NAME/UID
//	pods/UID/volumes/kubernetes.io~csi/NAME/mount         a volume, published
//	pods/UID/volumes/kubernetes.io~csi/NAME/record.json   see record
package csi

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	storagelisters "k8s.io/client-go/listers/storage/v1"
	"k8s.io/client-go/tools/cache"
	events "k8s.io/client-go/tools/record"
	registration "k8s.io/kubelet/pkg/apis/pluginregistration/v1"

	"github.com/clusterd/clusterd/agent/plugin"
)

// Node is this node's object. The leader tells in it what is attached, and
// detaches nothing that it says is in use.
type Node interface {
	// Object is never nil.
	Object() *v1.Node
	// StatusWritten returns when a status that was made after the call is the API's.
	StatusWritten(ctx context.Context) error
	// Until waits for an object that cond holds for.
	Until(ctx context.Context, cond func(*v1.Node) bool) error
	// SetLabels has the node carry labels beside its others.
	SetLabels(ctx context.Context, labels map[string]string) error
	// Poke has the status written soon, if it changed.
	Poke()
}

// Tokens makes service account tokens bound to a pod.
type Tokens interface {
	Token(ctx context.Context, pod *v1.Pod, audience string, expirationSeconds int64) (string, error)
}

// Config of a Manager. All fields are required.
type Config struct {
	Client   kubernetes.Interface
	NodeName string
	Node     Node
	// Root is where drivers look for a kubelet: an absolute path.
	Root string
	// Plugins is the registry of Root. Its creator runs it.
	Plugins  *plugin.Registry
	Tokens   Tokens
	Recorder events.EventRecorder
	// Mounted says whether a path, which exists, is a mount point.
	Mounted func(path string) (bool, error)
	// Republish is how often drivers that ask for it are called again for what they
	// have published; default 1 min.
	Republish time.Duration
}

// Manager knows the node's drivers and what they have mounted. Its methods may
// be called concurrently.
type Manager struct {
	cfg       Config
	factory   informers.SharedInformerFactory
	described cache.SharedIndexInformer // CSIDriver objects
	lister    storagelisters.CSIDriverLister
	drivers   drivers
	paths     paths
	busy      plugin.Locks // by volume

	mu      sync.Mutex // guards all below
	records map[recordKey]*entry
	loaded  bool
	claims  map[claimKey]*claimWatch
	ctx     context.Context // of Run; nil: it does not run
	wg      sync.WaitGroup  // watches of claims
}

// New returns a Manager; it starts nothing.
func New(cfg Config) *Manager {
	if cfg.Republish == 0 {
		cfg.Republish = time.Minute
	}
	m := &Manager{
		cfg: cfg, factory: informers.NewSharedInformerFactory(cfg.Client, 0), paths: paths(cfg.Root),
		records: map[recordKey]*entry{}, claims: map[claimKey]*claimWatch{},
	}
	objects := m.factory.Storage().V1().CSIDrivers()
	m.described, m.lister = objects.Informer(), objects.Lister()
	m.drivers.node = newNodeObject(cfg.Client, cfg.NodeName, cfg.Node)
	cfg.Plugins.Handle(registration.CSIPlugin, &m.drivers)
	return m
}

// Run keeps the node's CSINode object and what drivers have published until ctx
// ends; drivers are forgotten then.
func (m *Manager) Run(ctx context.Context) error {
	if err := os.MkdirAll(m.paths.pods(), 0o750); err != nil {
		return fmt.Errorf("folder of CSI drivers: %w", err)
	}
	if err := m.load(); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	m.mu.Lock()
	m.ctx = ctx
	m.mu.Unlock()
	m.factory.StartWithContext(ctx)
	var wg sync.WaitGroup
	defer func() {
		cancel()
		wg.Wait()
		m.wg.Wait()
		m.factory.Shutdown()
		m.drivers.close()
	}()
	m.watchClaims()
	wg.Go(func() { m.drivers.node.run(ctx) })
	wg.Go(func() { m.republish(ctx) })
	<-ctx.Done()
	return nil
}

// objectTimeout is how long a call waits for objects that the API has not sent yet.
const objectTimeout = 10 * time.Second

// object is the driver's CSIDriver object, or what holds for drivers without
// one: they attach, know no pods and mount no volumes of pods' own.
func (m *Manager) object(ctx context.Context, driver string) (*storagev1.CSIDriver, error) {
	ctx, cancel := context.WithTimeout(ctx, objectTimeout)
	defer cancel()
	if !cache.WaitForCacheSync(ctx.Done(), m.described.HasSynced) {
		return nil, errors.New("the CSIDriver objects could not be read yet")
	}
	d, err := m.lister.Get(driver)
	if apierrors.IsNotFound(err) {
		policy := storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy
		d = &storagev1.CSIDriver{Spec: storagev1.CSIDriverSpec{FSGroupPolicy: &policy, VolumeLifecycleModes: []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent}}}
		d.Name, err = driver, nil
	}
	return d, err
}

// attaches reports whether volumes of the driver are attached to nodes.
func attaches(d *storagev1.CSIDriver) bool {
	return d.Spec.AttachRequired == nil || *d.Spec.AttachRequired
}

func isTrue(b *bool) bool { return b != nil && *b }

// lock waits for the lock of a volume; unlock must be called once if err is nil.
func (m *Manager) lock(ctx context.Context, volume string) (unlock func(), err error) {
	if unlock, err = m.busy.Lock(ctx, volume); err != nil {
		return nil, fmt.Errorf("another call for volume %s is under way: %w", volume, err)
	}
	return unlock, nil
}

// removeEmpty removes a directory or file that a driver was to leave empty. What is
// in it, or mounted on it, is no pod's to lose.
func (m *Manager) removeEmpty(path string) error {
	if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if mounted, err := m.cfg.Mounted(path); err != nil {
		return err
	} else if mounted {
		return fmt.Errorf("%s is still mounted after its driver has unmounted it", path)
	}
	if st, err := os.Lstat(path); err == nil && st.Mode().IsRegular() && st.Size() > 0 {
		return fmt.Errorf("%s holds data and is not removed", path)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

// removeUpTo removes dir and the directories above it that are empty then, below top.
func removeUpTo(dir, top string) {
	for dir != top && len(dir) > len(top) {
		if os.Remove(dir) != nil {
			return
		}
		dir = filepath.Dir(dir)
	}
}
