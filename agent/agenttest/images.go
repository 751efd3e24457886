package agenttest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"

	ocispec "github.com/google/go-containerregistry/pkg/v1"

	"github.com/clusterd/clusterd/agent/image"
)

// Images is an image store in memory.
type Images struct {
	Dir string // root file systems are made here; required

	mu     sync.Mutex // guards all below
	images map[string]image.Image
	mounts map[string]bool
	// pulling is what Pulling says.
	pulling []image.Progress
	// volumes are mounted images, by owner and name.
	volumes map[string]map[string]image.Image
	// PullErr decides over pulls of images that are not here; nil: they
	// appear.
	PullErr func(ctx context.Context, ref string) error
	// Unproven says which images that are here were pulled with other credentials
	// than those that are shown; nil: all are preloaded.
	Unproven func(ref string, shown []image.Credential) bool
	// Damaged says which images are found to be damaged; they go then.
	Damaged func(id string) bool
}

// Add puts an image there.
func (s *Images) Add(ref string, cfg ocispec.Config) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.images == nil {
		s.images = map[string]image.Image{}
	}
	s.images[ref] = image.Image{ID: "sha256:" + fmt.Sprintf("%064x", len(s.images)+1), Refs: []string{ref}, Size: 1000, Config: cfg}
}

// Get implements pod.Images.
func (s *Images) Get(ref string) (image.Image, bool, error) {
	if ref == "Bad Name" {
		return image.Image{}, false, fmt.Errorf("%w: %q", image.ErrInvalidName, ref)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	i, ok := s.images[ref]
	return i, ok, nil
}

// PullAs implements pod.Images.
func (s *Images) PullAs(ctx context.Context, ref string, _ image.Credential) (image.Image, error) {
	if s.PullErr != nil {
		if err := s.PullErr(ctx, ref); err != nil {
			return image.Image{}, err
		}
	}
	s.Add(ref, ocispec.Config{Entrypoint: []string{"/app"}})
	i, _, err := s.Get(ref)
	return i, err
}

// Pulling implements pod.Images.
func (s *Images) Pulling() []image.Progress {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pulling
}

// Tell sets what Pulling says.
func (s *Images) Tell(p ...image.Progress) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pulling = p
}

// Access implements pod.Images: all may have what is here, but for Unproven.
func (s *Images) Access(id, ref string, shown []image.Credential) (image.Access, error) {
	if i, ok, err := s.Get(ref); !ok || err != nil || i.ID != id {
		return image.Access{}, errors.Join(err, image.ErrNotFound)
	}
	if s.Unproven == nil {
		return image.Access{Preloaded: true}, nil
	}
	return image.Access{Proven: !s.Unproven(ref, shown)}, nil
}

// Verify implements pod.Images.
func (s *Images) Verify(_ context.Context, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.Damaged == nil || !s.Damaged(id) {
		return nil
	}
	for ref, img := range s.images {
		if img.ID == id {
			delete(s.images, ref)
		}
	}
	return fmt.Errorf("%w: layer 3", image.ErrDamaged)
}

// Mount implements pod.Images.
func (s *Images) Mount(_ context.Context, _ image.Image, id string) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.mounts == nil {
		s.mounts = map[string]bool{}
	}
	s.mounts[id] = true
	p := filepath.Join(s.Dir, id)
	return p, os.MkdirAll(p, 0o755)
}

// MountMapped implements pod.Images.
func (s *Images) MountMapped(ctx context.Context, img image.Image, id string, _ *os.File) (string, error) {
	return s.Mount(ctx, img, id)
}

// TryMapped implements agent.Images: it can.
func (s *Images) TryMapped(*os.File) error { return nil }

// Unmount implements pod.Images.
func (s *Images) Unmount(_ context.Context, id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.mounts, id)
	return os.RemoveAll(filepath.Join(s.Dir, id))
}

// VolumePath is where an image would be mounted as a volume.
func (s *Images) VolumePath(owner, name string) string {
	return filepath.Join(s.Dir, "volumes", owner, name)
}

// MountVolumeMapped implements pod.Images.
func (s *Images) MountVolumeMapped(ctx context.Context, img image.Image, owner, name string, _ *os.File) (string, error) {
	return s.MountVolume(ctx, img, owner, name)
}

// MountVolume implements pod.Images.
func (s *Images) MountVolume(_ context.Context, img image.Image, owner, name string) (string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.volumes == nil {
		s.volumes = map[string]map[string]image.Image{}
	}
	if s.volumes[owner] == nil {
		s.volumes[owner] = map[string]image.Image{}
	}
	s.volumes[owner][name] = img
	p := s.VolumePath(owner, name)
	return p, os.MkdirAll(p, 0o755)
}

// Volume implements pod.Images.
func (s *Images) Volume(owner, name string) (image.Image, bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	img, ok := s.volumes[owner][name]
	return img, ok, nil
}

// UnmountVolumes implements pod.Images.
func (s *Images) UnmountVolumes(_ context.Context, owner string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.volumes, owner)
	return os.RemoveAll(filepath.Join(s.Dir, "volumes", owner))
}

// VolumeOwners implements pod.Images.
func (s *Images) VolumeOwners() ([]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Sorted(maps.Keys(s.volumes)), nil
}

// Mounts lists the ids that are mounted.
func (s *Images) Mounts() ([]string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []string
	for id := range s.mounts {
		out = append(out, id)
	}
	slices.Sort(out)
	return out, nil
}
