package image

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"os"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// Blobs are manifests and configs of images, and compressed layers from their
// download until they are unpacked. A blob's file is named by its digest and
// is whole: it got its name after it was checked.

func (s *Store) blobPath(digest string) string {
	return s.path("blobs", strings.TrimPrefix(digest, "sha256:"))
}

// blobKey is a blob's name among the held.
func blobKey(digest string) string { return "blob " + strings.TrimPrefix(digest, "sha256:") }

// blobWanted says whether an image needs the blob of that file name.
func (s *Store) blobWanted(file string) bool {
	digest := "sha256:" + file
	if _, ok := s.index.Images[digest]; ok {
		return true
	}
	for _, rec := range s.index.Images {
		if rec.Manifest == digest {
			return true
		}
	}
	return s.held[blobKey(digest)] > 0
}

// readBlob reads a small blob and checks that it is what its name says.
func (s *Store) readBlob(digest string) ([]byte, error) {
	b, err := os.ReadFile(s.blobPath(digest))
	if err != nil {
		return nil, err
	}
	if got := digestOf(b); got != digest {
		return nil, fmt.Errorf("blob %s: %w", digest, ErrDigest)
	}
	return b, nil
}

// writeBlob keeps a small blob under its digest.
func (s *Store) writeBlob(b []byte) (string, error) {
	digest := digestOf(b)
	if err := s.writeFile(s.blobPath(digest), b); err != nil {
		return "", fmt.Errorf("write blob: %w", err)
	}
	return digest, nil
}

func digestOf(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}

// download fetches a compressed layer unless it is here already.
func (s *Store) download(l v1.Layer, d *downloads, how *progress) (err error) {
	digest, err := l.Digest()
	if err != nil {
		return err
	}
	if digest.Algorithm != "sha256" {
		return fmt.Errorf("%w: unknown kind of digest %s", ErrDigest, digest)
	}
	size, err := l.Size()
	if err != nil {
		return err
	}
	path := s.blobPath(digest.Hex)
	if _, err := os.Stat(path); err == nil {
		how.done.Add(size)
		return nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	p, err := s.openPart(digest.Hex, size)
	if err != nil {
		return err
	}
	d.set(digest.Hex, p)
	to := &partWriter{p: p, done: &how.done}
	defer func() {
		if err != nil {
			s.closePart(p, digest.Hex, to.came, err)
		}
	}()
	body, err := l.Compressed() // no more than the manifest announces: Limits.manifest saw to a size
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }()
	hash := sha256.New()
	out := &freeWriter{to, s.cfg.Limits, p.Name(), freeEvery} // looks at the disk before the first byte
	if _, err = io.Copy(io.MultiWriter(out, hash), body); err != nil {
		return badDigest(err, hash, digest, to.came, size)
	}
	if got := hex.EncodeToString(hash.Sum(nil)); got != digest.Hex {
		return fmt.Errorf("%w: got sha256:%s, announced was %s", ErrDigest, got, digest)
	}
	if err := p.Truncate(to.came); err != nil { // what was here may have been longer
		return err
	}
	if err := p.Close(); err != nil {
		return err
	}
	// No sync: no blob of a layer outlives the start after a power cut.
	if err := os.Rename(p.Name(), path); err != nil { //nolint:forbidigo // see above
		return err
	}
	if p.kept {
		s.leavePart(digest.Hex)
	}
	return nil
}

// badDigest adds ErrDigest to the library's error if all bytes are here and are others:
// it compares too, and has no name for that.
func badDigest(err error, hash hash.Hash, want v1.Hash, came, size int64) error {
	if came == size && hex.EncodeToString(hash.Sum(nil)) != want.Hex {
		return fmt.Errorf("%w: %w", ErrDigest, err)
	}
	return err
}
