package image

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
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
func (s *Store) download(l v1.Layer) error {
	digest, err := l.Digest()
	if err != nil {
		return err
	}
	if digest.Algorithm != "sha256" {
		return fmt.Errorf("%w: unknown kind of digest %s", ErrDigest, digest)
	}
	path := s.blobPath(digest.Hex)
	if _, err := os.Stat(path); err == nil {
		return nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	body, err := l.Compressed() // no more than the manifest announces: Limits.manifest saw to a size
	if err != nil {
		return err
	}
	defer func() { _ = body.Close() }()
	tmp, err := os.CreateTemp(s.path("tmp"), "blob-")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(tmp.Name()) }() // after the rename: a name that is gone
	hash := sha256.New()
	out := &freeWriter{tmp, s.cfg.Limits, tmp.Name(), freeEvery} // looks at the disk before the first byte
	_, err = io.Copy(io.MultiWriter(out, hash), body)
	if cerr := tmp.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	if got := hex.EncodeToString(hash.Sum(nil)); got != digest.Hex {
		return fmt.Errorf("%w: got sha256:%s, announced was %s", ErrDigest, got, digest)
	}
	// No sync: no blob of a layer outlives the start after a power cut.
	return os.Rename(tmp.Name(), path) //nolint:forbidigo // see above
}
