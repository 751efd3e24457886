package image

import (
	"context"
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
// download until they are unpacked. A manifest's or config's file is named by its digest
// and is whole: it got its name after it was checked. A layer's is named by its digest
// and where it came from (partKey): who downloaded it says that it was checked.

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
func (s *Store) download(ctx context.Context, found fetched, layer int, source string, how *progress) (err error) {
	l := found.documents().Layers[layer]
	if l.Digest.Algorithm != "sha256" {
		return fmt.Errorf("%w: unknown kind of digest %s", ErrDigest, l.Digest)
	}
	key := partKey(l.Digest.Hex, source)
	path := s.blobPath(key)
	if _, err := os.Stat(path); err == nil {
		how.done.Add(l.Size)
		return nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	p, err := s.openPart(key, l.Size)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			s.closePart(p, err)
		}
	}()
	notes, err := found.receive(ctx, layer, p, how)
	for _, n := range notes {
		s.log.Info("a layer's download", "note", n, "image", how.ref, "layer", l.Digest)
	}
	if err != nil {
		return err
	}
	if err := p.Truncate(p.came); err != nil { // what was here may have been longer
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
		s.leavePart(p.key)
	}
	return nil
}

// dropSpoilt removes a compressed layer that is not what its digest says: the next pull
// would fail by it, too.
func (s *Store) dropSpoilt(file string, want v1.Hash) error {
	f, err := os.Open(s.blobPath(file))
	if err != nil {
		if errors.Is(err, fs.ErrNotExist) {
			return nil
		}
		return err
	}
	defer f.Close()
	hash := sha256.New()
	if _, err := io.Copy(hash, f); err != nil {
		return err
	}
	if hex.EncodeToString(hash.Sum(nil)) == want.Hex {
		return nil
	}
	s.log.Warn("a downloaded layer was not what its digest says: it is downloaded again", "layer", want)
	if err := os.Remove(f.Name()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// receive gets a layer into its file, behind the part that is here if the registry goes
// on there, and checks the digest of all of it.
func receive(ctx context.Context, l v1.Layer, p *part, ref layerRef, limits Limits, how *progress) (notes []string, err error) {
	p.came, p.rest = 0, nil
	hash := sha256.New()
	// Before the registry is asked: it may take minutes, and none waits so long for
	// its answer to be read.
	here, err := p.read(ctx, hash, &how.done)
	if err != nil {
		if ctx.Err() != nil {
			return nil, err
		}
		notes = append(notes, fmt.Sprintf("a part of a layer cannot be read: %v", err))
		p.have = 0
	}
	if how.look != nil {
		how.look()
	}
	body, err := l.Compressed() // no more than the manifest announces: Limits.manifest saw to a size
	if err != nil {
		return notes, err
	}
	defer func() { _ = body.Close() }()
	from := io.Reader(body)
	if p.rest != nil {
		p.came, from = p.have, io.LimitReader(p.rest, ref.Size-p.have)
	} else {
		hash.Reset()
		how.done.Add(-here)
	}
	out := &freeWriter{w: &partWriter{p, &how.done}, l: limits, f: p.File, since: freeEvery} // looks at the disk before the first byte
	if _, err = io.Copy(io.MultiWriter(out, hash), from); err != nil {
		return notes, badDigest(err, hash, ref.Digest, p.came, ref.Size)
	}
	if p.came < ref.Size { // the library says it of what it reads
		return notes, fmt.Errorf("%w: the registry sent %d bytes of a layer of %d", io.ErrUnexpectedEOF, p.came, ref.Size)
	}
	if got := hex.EncodeToString(hash.Sum(nil)); got != ref.Digest.Hex {
		return notes, fmt.Errorf("%w: got sha256:%s, announced was %s", ErrDigest, got, ref.Digest)
	}
	return notes, nil
}

// badDigest adds ErrDigest to the library's error if all bytes are here and are others:
// it compares too, and has no name for that.
func badDigest(err error, hash hash.Hash, want v1.Hash, came, size int64) error {
	if came == size && hex.EncodeToString(hash.Sum(nil)) != want.Hex {
		return fmt.Errorf("%w: %w", ErrDigest, err)
	}
	return err
}
