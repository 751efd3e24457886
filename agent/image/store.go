// Package image keeps container images on a node's disk: it pulls them from
// registries, loads them from files, unpacks each layer once and mounts them
// for containers.
//
// It refuses to know pods, pull policies and back-off: the agent decides when
// to pull, this package does it once and says exactly what went wrong.
package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/clusterd/clusterd/agent/image/registry"
	"github.com/clusterd/clusterd/durable"
)

// Config of a Store.
type Config struct {
	// Dir is the directory for everything; made if need be. Required. Its file
	// system must be able to carry overlayfs (ext4, xfs, btrfs …).
	Dir string
	// Platform to choose from images for several; default linux/GOARCH.
	Platform v1.Platform
	// Registries says how registries are spoken to, asked again for each pull; nil: all
	// with TLS, the system's authorities and no credentials of this node's.
	Registries func() *registry.Settings
	// StallTimeout ends a download from which no byte came for so long; default
	// one minute.
	StallTimeout time.Duration
	// Limits bound what one image may cost; see there for the defaults.
	Limits Limits
	// Isolation has what registries and archives send read by processes of their own;
	// nil: by this one, which is for tests and benchmarks. It needs root.
	Isolation *Isolation
	// Own is an image that this node makes itself; the zero value: there is none.
	Own Own
	// Logger; default: slog.Default().
	Logger *slog.Logger
}

// Image is one image that is whole and unpacked on this node.
type Image struct {
	ID string // digest of its config: "sha256:…"
	// Refs are the full names under which it is known here:
	// "docker.io/library/nginx:1.27", sorted.
	Refs []string
	// RepoDigests are "repository@sha256:…" as the registries gave them, sorted.
	// An image that was loaded from a file may have none.
	RepoDigests []string
	Size        int64 // bytes on disk, unpacked; layers shared with other images count in full
	Config      v1.Config
	Pinned      bool // GC leaves it: it was loaded from a file and so cannot be pulled again, or Pin says so
}

// Store is safe for concurrent use. One process may have one Store for a
// folder.
type Store struct {
	cfg       Config
	log       *slog.Logger
	own       *own // nil: there is none
	work      worker
	pulls     flights[pullKey, Image]
	unpacks   flights[string, struct{}]
	unpacking chan struct{} // full: unpacksAtOnce are at it

	endRemoval func() // ends removeOld and waits for it

	roots sync.Mutex // guards the making and removing of directories for mapped roots

	mu    sync.Mutex // guards all below, and the renaming of layers
	index index      // what is on disk, committed
	// configs are the parsed configs of all images, by ID.
	configs map[string]v1.Config
	// layers are all unpacked layers by chain: the committed ones and those of
	// pulls that are still running.
	layers map[string]layer
	// held counts the running operations that rely on a layer, by chain.
	held map[string]int
	// parts are the layers of parts/ that a download is at, by digest.
	parts map[string]bool
	// pulling are the pulls that fetch layers.
	pulling  map[*progress]struct{}
	nextDir  int
	lastUsed map[string]time.Time // when an image was last added or mounted, by ID
	closed   bool
}

// Open reads the directory and removes what a crash left half done: temporary
// files and every layer that no image has claimed. Mounts of containers and of
// volumes are left alone: see Mounts and VolumeOwners.
func Open(cfg Config) (*Store, error) {
	if cfg.Dir == "" {
		return nil, fmt.Errorf("open image store: no folder given")
	}
	dir, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("open image store: %w", err)
	}
	cfg.Dir = dir
	if cfg.Platform.OS == "" {
		cfg.Platform = v1.Platform{OS: "linux", Architecture: runtime.GOARCH}
	}
	if cfg.StallTimeout == 0 {
		cfg.StallTimeout = time.Minute
	}
	cfg.Limits = cfg.Limits.withDefaults()
	if cfg.Logger == nil {
		cfg.Logger = slog.Default()
	}
	s := &Store{
		cfg:       cfg,
		log:       cfg.Logger,
		configs:   map[string]v1.Config{},
		layers:    map[string]layer{},
		held:      map[string]int{},
		lastUsed:  map[string]time.Time{},
		own:       newOwn(cfg.Own, cfg.Platform),
		work:      localWorker{},
		unpacking: make(chan struct{}, unpacksAtOnce),
	}
	// The layers hold set-uid programs and secrets of images: root's alone.
	for _, d := range []string{"", "blobs", "parts", "layers", "mounts", "volumes"} {
		if err := os.MkdirAll(s.path(d), 0o700); err != nil {
			return nil, fmt.Errorf("open image store: %w", err)
		}
	}
	if err := s.recover(); err != nil {
		return nil, fmt.Errorf("open image store: %w", err)
	}
	if cfg.Isolation != nil {
		if s.work, err = newChildWorker(*cfg.Isolation, cfg.Dir, s.log); err != nil {
			return nil, fmt.Errorf("open image store: %w", err)
		}
	}
	s.trimParts(partAge, partsKept)
	s.removeOld()
	return s, nil
}

// Close ends running pulls and waits for them. Mounts stay.
func (s *Store) Close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.pulls.close()
	s.unpacks.close()
	s.work.close()
	s.endRemoval()
	return nil
}

// recover brings memory and disk together.
func (s *Store) recover() error {
	if err := unmountBelow(s.path("tmp")); err != nil {
		return err
	}
	if err := s.putAside("tmp"); err != nil {
		return err
	}
	if err := os.Mkdir(s.path("tmp"), 0o700); err != nil {
		return err
	}
	ix, err := readIndex(s.path(indexFile))
	if errors.Is(err, errIndexDamaged) {
		// All images can be pulled again; only those loaded from files are
		// lost. Layers below containers stay, by their mount records.
		s.log.Warn("no image is known any more: the damaged index is set aside", "as", indexFile+".damaged", "err", err)
		if err := durable.Rename(s.path(indexFile), s.path(indexFile+".damaged")); err != nil {
			return err
		}
		ix, err = readIndex(s.path(indexFile))
	}
	if err != nil {
		return err
	}
	ix.markLoaded()
	s.index = ix
	now := time.Now()
	for id, rec := range ix.Images {
		cfg, err := s.loadConfig(id, rec)
		if err != nil {
			s.log.Warn("dropping a damaged image", "image", id, "refs", rec.Refs, "err", err)
			delete(ix.Images, id)
			continue
		}
		s.configs[id] = cfg
		s.lastUsed[id] = now
		for _, chain := range rec.Chains {
			s.layers[chain] = ix.Layers[chain]
		}
	}
	for chain := range ix.Layers {
		if _, used := s.layers[chain]; !used {
			delete(ix.Layers, chain)
		}
	}
	return s.removeStrays()
}

// putAside takes a directory of an earlier start out of the way, to be removed once the
// store serves: what is in it may take its time, or not be removable.
func (s *Store) putAside(dir string) error {
	if err := os.MkdirAll(s.path(oldDir), 0o700); err != nil {
		return err
	}
	into, err := os.MkdirTemp(s.path(oldDir), "")
	if err != nil {
		return err
	}
	err = os.Rename(s.path(dir), filepath.Join(into, "it")) //nolint:forbidigo // it is thrown away
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// oldDir is where putAside puts things.
const oldDir = "old"

// removeOld removes what putAside has put aside; Close ends it, and the next start goes on.
func (s *Store) removeOld() {
	ctx, cancel := context.WithCancelCause(context.Background())
	done := make(chan struct{})
	s.endRemoval = func() { cancel(ErrClosed); <-done }
	go func() {
		defer close(done)
		if err := removeTree(ctx, s.path(oldDir)); err != nil && ctx.Err() == nil {
			s.log.Warn("what an earlier start has left stays on the disk: remove it by hand", "dir", s.path(oldDir), "err", err)
		}
	}()
}

// loadConfig checks that an image is whole and parses its config.
func (s *Store) loadConfig(id string, rec imageRecord) (v1.Config, error) {
	for _, chain := range rec.Chains {
		l, ok := s.index.Layers[chain]
		if !ok {
			return v1.Config{}, fmt.Errorf("layer %s is not known", chain)
		}
		if _, err := os.Stat(s.layerPath(l.Dir)); err != nil {
			return v1.Config{}, err
		}
	}
	raw, err := s.readBlob(id)
	if err != nil {
		return v1.Config{}, err
	}
	var cf v1.ConfigFile
	if err := json.Unmarshal(raw, &cf); err != nil {
		return v1.Config{}, fmt.Errorf("config: %w", err)
	}
	return cf.Config, nil
}

// removeStrays deletes layers and blobs that no image has claimed, except
// layers below a container that still runs.
func (s *Store) removeStrays() error {
	wanted := map[string]bool{}
	for _, l := range s.layers {
		wanted[l.Dir] = true
	}
	mounts, err := s.mounts()
	if err != nil {
		return err
	}
	for _, m := range mounts {
		for _, dir := range m.Dirs {
			wanted[dir] = true
		}
	}
	dirs, err := os.ReadDir(s.path("layers"))
	if err != nil {
		return err
	}
	for _, d := range dirs {
		s.nextDir = max(s.nextDir, dirNumber(d.Name())+1)
		if wanted[d.Name()] {
			continue
		}
		if err := s.putAside(filepath.Join("layers", d.Name())); err != nil {
			return err
		}
	}
	blobs, err := os.ReadDir(s.path("blobs"))
	if err != nil {
		return err
	}
	for _, b := range blobs {
		if s.blobWanted(b.Name()) {
			continue
		}
		if err := os.Remove(s.path("blobs", b.Name())); err != nil {
			return err
		}
	}
	return nil
}

// Get finds an image by name ("nginx", "nginx:1.27"), by digest
// ("nginx@sha256:…") or by ID ("sha256:…"). The name is not looked up at any
// registry. An image of the own name is found only if it is of the program that
// runs now.
func (s *Store) Get(ref string) (Image, bool, error) {
	ref, err := Normalize(ref)
	if err != nil {
		return Image{}, false, err
	}
	img, ok := s.get(ref)
	if ok && s.own != nil && ref == s.own.Ref && !s.own.current(img.ID) {
		return Image{}, false, nil
	}
	return img, ok, nil
}

func (s *Store) get(ref string) (Image, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	id, ok := s.find(ref)
	if !ok {
		return Image{}, false
	}
	return s.image(id), true
}

// List returns all images, sorted by their first name and then by ID.
func (s *Store) List(ctx context.Context) ([]Image, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Image, 0, len(s.index.Images))
	for id := range s.index.Images {
		out = append(out, s.image(id))
	}
	slices.SortFunc(out, func(a, b Image) int {
		if c := slices.Compare(a.Refs[:min(1, len(a.Refs))], b.Refs[:min(1, len(b.Refs))]); c != 0 {
			return c
		}
		return slices.Compare([]string{a.ID}, []string{b.ID})
	})
	return out, nil
}

// find looks up a normalized name; mu is held.
func (s *Store) find(ref string) (id string, ok bool) {
	if _, ok := s.index.Images[ref]; ok {
		return ref, true
	}
	for id, rec := range s.index.Images {
		if slices.Contains(rec.Refs, ref) || slices.Contains(rec.RepoDigests, ref) {
			return id, true
		}
	}
	return "", false
}

// image makes the caller's copy; mu is held.
func (s *Store) image(id string) Image {
	rec := s.index.Images[id]
	var size int64
	for _, chain := range rec.Chains {
		size += s.layers[chain].Size
	}
	cfg := s.configs[id]
	return Image{
		ID:          id,
		Refs:        append([]string(nil), rec.Refs...),
		RepoDigests: append([]string(nil), rec.RepoDigests...),
		Size:        size,
		Config:      *cfg.DeepCopy(),
		Pinned:      rec.Pinned,
	}
}

func (s *Store) path(elem ...string) string {
	return filepath.Join(append([]string{s.cfg.Dir}, elem...)...)
}

func (s *Store) layerPath(dir string) string { return s.path("layers", dir) }
