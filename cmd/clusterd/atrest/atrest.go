// Package atrest decides how the objects of each resource are sealed at rest: by the
// providers of an EncryptionConfiguration, Kubernetes' own form of it, where that
// names the resource, and otherwise by the cluster's own keys or not at all. What the
// cluster's own keys have sealed, and what lies in clear, is read in any case.
package atrest

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/server/healthz"
	"k8s.io/apiserver/pkg/server/options/encryptionconfig/metrics"
	"k8s.io/apiserver/pkg/storage/value"

	"github.com/clusterd/clusterd/slack"
)

// lookEvery is how often the file and the keys of KMS plugins are looked at.
const lookEvery = 10 * time.Second

// Config is what a Sealing is made from.
type Config struct {
	// File is that of the EncryptionConfiguration; "": there is none.
	File string
	// ID is of this server, for metrics.
	ID string
	// Own seals with the cluster's own keys, and reads what lies in clear.
	Own value.Transformer
	// Sealed are the resources that Own seals unless File names them.
	Sealed map[schema.GroupResource]bool
	// Private tells resources outside of the API, which File does not concern.
	Private func(schema.GroupResource) bool
	// Changed is called when values may have to be sealed again.
	Changed func()
	Log     *slog.Logger
}

// Sealing gives each resource its transformer. It is safe for concurrent use.
type Sealing struct {
	cfg     Config
	current atomic.Pointer[providers]
	// valid: the file, as it is now, is in force.
	valid atomic.Bool

	mu       sync.Mutex // of Look
	reported string     // why the file is not in force, as it was logged
	keys     string     // that were in use at the last look
}

// New reads the file, if there is one. Close ends what it begins. A KMS plugin
// that does not answer yet is no error.
func New(cfg Config) (*Sealing, error) {
	s := &Sealing{cfg: cfg}
	s.current.Store(&providers{})
	s.valid.Store(true)
	if cfg.File == "" {
		return s, nil
	}
	p, err := load(cfg.File, cfg.ID)
	if err != nil {
		return nil, err
	}
	s.use(p)
	s.keys = keysText(p.keys())
	return s, nil
}

// Close ends connections to KMS plugins.
func (s *Sealing) Close() { s.current.Load().close(0) }

func (s *Sealing) use(p *providers) {
	if p.readable {
		s.cfg.Log.Warn("others can read the file of the EncryptionConfiguration, which may hold keys: chmod 600", "file", s.cfg.File)
	}
	before := s.current.Swap(p)
	before.close(before.grace)
	metrics.RecordEncryptionConfigLastConfigInfo(s.cfg.ID, p.hash)
}

// Hash names the content of the file that is in force; "": there is none.
func (s *Sealing) Hash() string { return s.current.Load().hash }

// Valid reports whether the file, as it was when it was last looked at, is in force.
func (s *Sealing) Valid() bool { return s.valid.Load() }

// Keys are those that the file's resources are written with.
func (s *Sealing) Keys() []Key { return s.current.Load().keys() }

// Named reports whether the file names resources: others than Config.Sealed may have
// to be sealed.
func (s *Sealing) Named() bool { return s.Hash() != "" }

// Run looks at the file, and at the keys of KMS plugins, until ctx ends.
func (s *Sealing) Run(ctx context.Context) error {
	if s.cfg.File == "" {
		<-ctx.Done()
		return nil
	}
	for {
		select {
		case <-slack.After(lookEvery):
		case <-ctx.Done():
			return nil
		}
		s.Look(ctx)
	}
}

// Look takes up the file if it has changed. One that is wrong, or whose KMS plugins do
// not answer, leaves the one before in force, and is tried again at the next look.
func (s *Sealing) Look(ctx context.Context) {
	s.mu.Lock()
	defer s.mu.Unlock()
	err := s.look(ctx)
	s.valid.Store(err == nil)
	switch {
	case err == nil:
		s.reported = ""
	case ctx.Err() == nil && err.Error() != s.reported:
		s.reported = err.Error()
		metrics.RecordEncryptionConfigAutomaticReloadFailure(s.cfg.ID)
		s.cfg.Log.Error("the EncryptionConfiguration stays as it was before its file was changed", "file", s.cfg.File, "err", err)
	}
	if keys := keysText(s.Keys()); keys != s.keys {
		s.keys = keys
		s.cfg.Log.Info("new keys of the EncryptionConfiguration seal what is written", "keys", keys)
		s.cfg.Changed()
	}
}

func (s *Sealing) look(ctx context.Context) error {
	hash, err := fileHash(s.cfg.File)
	if err != nil || hash == s.Hash() {
		return err
	}
	p, err := load(s.cfg.File, s.cfg.ID)
	if err != nil {
		return err
	}
	if err := p.answer(ctx); err != nil {
		p.close(0)
		return err
	}
	s.use(p)
	metrics.RecordEncryptionConfigAutomaticReloadSuccess(s.cfg.ID, p.hash)
	s.cfg.Log.Info("the EncryptionConfiguration was read anew", "file", s.cfg.File, "hash", p.hash)
	s.cfg.Changed() // resources may have come or gone
	return nil
}

var errNoProviders = errors.New("no EncryptionConfiguration is in force")

// Health is the check of all KMS plugins, by Kubernetes' name for it.
func (s *Sealing) Health() healthz.HealthChecker {
	return healthz.NamedCheck("kms-providers", func(r *http.Request) error {
		check := s.current.Load().check
		if check == nil {
			return errNoProviders
		}
		return check.Check(r)
	})
}
