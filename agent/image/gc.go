package image

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"
)

// Remove takes a name away, and with its last name the image. Removing by ID
// takes all names. An image below a container or volume is ErrInUse.
func (s *Store) Remove(ctx context.Context, ref string) error {
	return s.changeNamed(ctx, "remove", ref, func(ix *index, id, full string) error {
		rec := ix.Images[id]
		rec.Refs = without(rec.Refs, full)
		rec.RepoDigests = without(rec.RepoDigests, full)
		if full != id && len(rec.Refs) > 0 {
			ix.Images[id] = rec
			return nil
		}
		used, err := s.mountedImages()
		if err != nil {
			return err
		}
		if used[id] {
			return ErrInUse
		}
		delete(ix.Images, id)
		return nil
	})
}

// Pin says whether GC leaves an image alone until it is unpinned. ErrNotFound:
// there is no such image.
func (s *Store) Pin(ctx context.Context, ref string, pinned bool) error {
	return s.changeNamed(ctx, "pin", ref, func(ix *index, id, _ string) error {
		rec := ix.Images[id]
		rec.Pinned = pinned
		ix.Images[id] = rec
		return nil
	})
}

// changeNamed changes what is known of the image that ref names: id, and full is ref as
// it is kept. what is the change, for an error.
func (s *Store) changeNamed(ctx context.Context, what, ref string, do func(ix *index, id, full string) error) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	full, err := Normalize(ref)
	if err != nil {
		return err
	}
	err = s.change(func(ix *index) error {
		id, ok := s.find(full)
		if !ok {
			return ErrNotFound
		}
		return do(ix, id, full)
	})
	if err != nil {
		return fmt.Errorf("%s image %s: %w", what, ref, err)
	}
	return nil
}

// GCPolicy says which images may stay.
type GCPolicy struct {
	// Keep are names, digests or IDs that are wanted, mounted or not.
	Keep []string
	// MinAge spares images that were pulled or mounted less than that ago.
	MinAge time.Duration
	// Bytes to free are enough: of those that may go the ones go first that
	// have not been used for longest. 0: all of them go.
	Bytes int64
}

// GC removes images that are not pinned, kept, mounted or young, and returns
// what it removed. Names of Keep that are not here are ignored. Layers that
// several images share are counted with each, so Bytes is an estimate. Parts of layers
// that no download is at go first.
func (s *Store) GC(ctx context.Context, p GCPolicy) ([]Image, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if p.Bytes > 0 || p.MinAge == 0 { // room is wanted
		s.trimParts(0, 0)
	}
	var removed []Image
	err := s.change(func(ix *index) error {
		used, err := s.mountedImages()
		if err != nil {
			return err
		}
		for _, ref := range p.Keep {
			full, err := Normalize(ref)
			if err != nil {
				continue // never was an image's name
			}
			if id, ok := s.find(full); ok {
				used[id] = true
			}
		}
		var free []string
		for id, rec := range s.index.Images {
			if !rec.Pinned && !used[id] && time.Since(s.lastUsed[id]) >= p.MinAge {
				free = append(free, id)
			}
		}
		slices.SortFunc(free, func(a, b string) int {
			return cmp.Or(s.lastUsed[a].Compare(s.lastUsed[b]), cmp.Compare(a, b))
		})
		var bytes int64
		for _, id := range free {
			if p.Bytes > 0 && bytes >= p.Bytes {
				break
			}
			img := s.image(id)
			bytes += img.Size
			removed = append(removed, img)
			delete(ix.Images, id)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("collect images: %w", err)
	}
	return removed, nil
}

// change edits a copy of the index, saves it, and then deletes the layers and
// blobs that it needs no more.
func (s *Store) change(edit func(*index) error) error {
	trash, err := os.MkdirTemp(s.path("tmp"), "trash-")
	if err != nil {
		return err
	}
	err = s.changeLocked(edit, trash)
	return errors.Join(err, removeTree(context.Background(), trash)) // the slow part, without the lock
}

func (s *Store) changeLocked(edit func(*index) error, trash string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	ix := s.index.clone()
	if err := edit(&ix); err != nil {
		return err
	}
	claimed := map[string]bool{}
	for _, rec := range ix.Images {
		for _, chain := range rec.Chains {
			claimed[chain] = true
		}
	}
	for chain := range ix.Layers {
		if !claimed[chain] {
			delete(ix.Layers, chain)
		}
	}
	if err := s.saveIndex(ix); err != nil {
		return err
	}
	for id := range s.configs {
		if _, ok := ix.Images[id]; !ok {
			delete(s.configs, id)
			delete(s.lastUsed, id)
		}
	}
	s.index = ix
	return s.trashUnclaimed(claimed, trash)
}

// trashUnclaimed moves what neither an image, a running pull nor a container
// needs; mu is held. It includes what failed pulls left behind.
func (s *Store) trashUnclaimed(claimed map[string]bool, trash string) error {
	mounts, err := s.mounts()
	if err != nil {
		return err
	}
	below := map[string]bool{}
	for _, m := range mounts {
		for _, dir := range m.Dirs {
			below[dir] = true
		}
	}
	for chain, l := range s.layers {
		if claimed[chain] || s.held[chain] > 0 || below[l.Dir] {
			continue
		}
		if err := os.Rename(s.layerPath(l.Dir), filepath.Join(trash, "layer-"+l.Dir)); err != nil { //nolint:forbidigo // it is thrown away
			return err
		}
		delete(s.layers, chain)
	}
	blobs, err := os.ReadDir(s.path("blobs"))
	if err != nil {
		return err
	}
	for _, b := range blobs {
		if s.blobWanted(b.Name()) {
			continue
		}
		if err := os.Rename(s.path("blobs", b.Name()), filepath.Join(trash, "blob-"+b.Name())); err != nil { //nolint:forbidigo // it is thrown away
			return err
		}
	}
	return nil
}

// mountedImages are the images below containers, and those mounted as volumes.
func (s *Store) mountedImages() (map[string]bool, error) {
	mounts, err := s.mounts()
	if err != nil {
		return nil, err
	}
	used := map[string]bool{}
	for _, m := range mounts {
		used[m.Image] = true
	}
	return used, nil
}

func without(list []string, s string) []string {
	return slices.DeleteFunc(slices.Clone(list), func(x string) bool { return x == s })
}
