package image

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// ErrDamaged is returned when an unpacked layer is not what it was: the image
// has been dropped then, and is pulled again when it is wanted.
var ErrDamaged = errors.New("image is damaged on this node's disk")

// sum is a fingerprint of an unpacked layer: every name with its kind, mode,
// owner, and a file's size and time or a link's target. It does not read the
// files, so that checking costs a walk and not the disk; what changes a file
// without its size and time (a bad disk) it does not see.
func sum(dir string) (string, error) {
	h := sha256.New()
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		if err := unix.Lstat(p, &st); err != nil {
			return &fs.PathError{Op: "lstat", Path: p, Err: err}
		}
		rel, err := filepath.Rel(dir, p)
		if err != nil {
			return err
		}
		fmt.Fprintf(h, "%q %o %d %d", rel, st.Mode, st.Uid, st.Gid)
		switch st.Mode & unix.S_IFMT {
		case unix.S_IFREG:
			fmt.Fprintf(h, " %d %d.%d", st.Size, st.Mtim.Sec, st.Mtim.Nsec)
		case unix.S_IFLNK:
			target, err := os.Readlink(p)
			if err != nil {
				return err
			}
			fmt.Fprintf(h, " %q", target)
		case unix.S_IFCHR, unix.S_IFBLK:
			fmt.Fprintf(h, " %d", st.Rdev)
		}
		fmt.Fprintln(h)
		return nil
	})
	return hex.EncodeToString(h.Sum(nil)), err
}

// Verify looks whether an image's unpacked layers are as they were. When one is
// not, every image that stands on it is dropped, also a pinned one, and the
// error is ErrDamaged; containers that run keep what they have. An image that
// is not here is whole.
func (s *Store) Verify(ctx context.Context, id string) error {
	s.mu.Lock()
	chains := slices.Clone(s.index.Images[id].Chains)
	s.mu.Unlock()
	release := s.hold(chains...) // not collected meanwhile
	defer release()
	for _, chain := range chains {
		if err := ctx.Err(); err != nil {
			return err
		}
		s.mu.Lock()
		l, ok := s.layers[chain]
		s.mu.Unlock()
		if !ok || l.Sum == "" { // unpacked by a version that took no fingerprints
			continue
		}
		got, err := sum(s.layerPath(l.Dir))
		if err == nil && got == l.Sum {
			continue
		}
		if err == nil {
			err = errors.New("something in it was changed")
		}
		release()
		err = fmt.Errorf("%w: layer %s: %w", ErrDamaged, l.Dir, err)
		if derr := s.dropLayer(chain, l); derr != nil {
			return errors.Join(err, derr)
		}
		s.log.Warn("damaged image dropped", "image", id, "err", err)
		return err
	}
	return nil
}

// VerifyAll verifies every image.
func (s *Store) VerifyAll(ctx context.Context) error {
	list, err := s.List(ctx)
	if err != nil {
		return err
	}
	for _, img := range list {
		if err := s.Verify(ctx, img.ID); err != nil && !errors.Is(err, ErrDamaged) {
			return err
		}
	}
	return nil
}

// dropLayer forgets a layer and all images on it. Its directory stays until the
// store is opened again: containers may still stand on it.
func (s *Store) dropLayer(chain string, l layer) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.layers[chain] != l {
		return nil // another caller was quicker
	}
	if s.held[chain] > 0 {
		return errors.New("a pull is using it: it will be dropped later")
	}
	ix := s.index.clone()
	for id, rec := range ix.Images {
		if slices.Contains(rec.Chains, chain) {
			delete(ix.Images, id)
		}
	}
	delete(ix.Layers, chain)
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
	delete(s.layers, chain)
	return nil
}
