package image

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"sync"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/clusterd/clusterd/durable"
)

// layerSource is a layer to be unpacked.
type layerSource struct {
	diffID v1.Hash // digest of the archive as it is, not compressed
	size   int64   // bytes of the archive as it came; 0: not known
	open   func(context.Context) (io.ReadCloser, error)
	spoilt func() error // looks at it when it could not be unpacked; nil: there is no need
}

// chainIDs names each layer together with all below it: the same archive on
// other ground unpacks to something else.
func chainIDs(diffIDs []v1.Hash) []string {
	var out []string
	for i, d := range diffIDs {
		if i == 0 {
			out = append(out, d.String())
			continue
		}
		sum := sha256.Sum256([]byte(out[i-1] + " " + d.String()))
		out = append(out, "sha256:"+hex.EncodeToString(sum[:]))
	}
	return out
}

// unpackAll makes sure that all layers of a chain are there. The caller holds
// the chains.
func (s *Store) unpackAll(ctx context.Context, chains []string, sources []layerSource) error {
	for i, chain := range chains {
		if s.hasLayer(chain) {
			continue
		}
		_, err := s.unpacks.do(ctx, chain, func(ctx context.Context) (struct{}, error) {
			if s.hasLayer(chain) {
				return struct{}{}, nil
			}
			err := s.unpack(ctx, chain, chains[:i], sources[i])
			if err != nil && ctx.Err() == nil && sources[i].spoilt != nil && (errors.Is(err, ErrDigest) || errors.Is(err, ErrWorker) || isBadLayer(err)) {
				err = errors.Join(err, sources[i].spoilt())
			}
			return struct{}{}, err
		})
		if err != nil {
			return fmt.Errorf("unpack layer %d of %d: %w", i+1, len(chains), err)
		}
	}
	return nil
}

func (s *Store) hasLayer(chain string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.layers[chain]
	return ok
}

// unpacksAtOnce is how many layers are unpacked at the same time, by two processes each
// that may take --image-pull-memory.
const unpacksAtOnce = 4

// unpack writes one layer to a temporary directory, checks its digest, and gives
// it its place.
func (s *Store) unpack(ctx context.Context, chain string, below []string, src layerSource) (err error) {
	select {
	case s.unpacking <- struct{}{}:
		defer func() { <-s.unpacking }()
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	tmp, err := os.MkdirTemp(s.path("tmp"), "layer-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, removeTree(context.WithoutCancel(ctx), tmp)) }()
	lowers, err := s.lowerDirs(below)
	if err != nil {
		return err
	}
	archive, err := src.open(ctx)
	if err != nil {
		return err
	}
	defer func() { _ = archive.Close() }()
	hash := sha256.New()
	tee := io.TeeReader(archive, hash)
	done, err := s.work.unpack(ctx, tee, unpackRequest{dir: tmp, lowers: lowers, limits: s.cfg.Limits, below: s.unpackedSize(below), from: src.size})
	if err != nil {
		return err
	}
	// Padding behind the archive's end counts for the digest.
	if _, err := io.Copy(io.Discard, io.LimitReader(tee, maxPadding)); err != nil {
		return &badLayerError{fmt.Errorf("read the archive: %w", err)}
	}
	if got := hex.EncodeToString(hash.Sum(nil)); src.diffID.Algorithm != "sha256" || got != src.diffID.Hex {
		return fmt.Errorf("%w: unpacked archive is sha256:%s, announced was %s", ErrDigest, got, src.diffID)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if _, ok := s.layers[chain]; ok {
		return nil
	}
	dir := strconv.Itoa(s.nextDir)
	if err := durable.Rename(tmp, s.layerPath(dir)); err != nil {
		return err
	}
	s.nextDir++
	s.layers[chain] = layer{Dir: dir, Size: done.Size, Sum: done.Sum}
	return nil
}

// maxPadding is how much may follow an archive's end; what is beyond counts for
// no digest, which then does not match.
const maxPadding = 64 << 20

// unpackedSize is what layers take together.
func (s *Store) unpackedSize(chains []string) (n int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, chain := range chains {
		n += s.layers[chain].Size
	}
	return n
}

// lowerDirs returns the directories of a chain, topmost first.
func (s *Store) lowerDirs(chains []string) (lowerDir, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out lowerDir
	for i := len(chains) - 1; i >= 0; i-- {
		l, ok := s.layers[chains[i]]
		if !ok {
			return nil, fmt.Errorf("layer %s: %w", chains[i], ErrNotFound)
		}
		out = append(out, s.layerPath(l.Dir))
	}
	return out, nil
}

// hold keeps layers and blobs from being collected until release is called,
// once or more often.
func (s *Store) hold(keys ...string) (release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, k := range keys {
		s.held[k]++
	}
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, k := range keys {
			if s.held[k]--; s.held[k] == 0 {
				delete(s.held, k)
			}
		}
	})
}

// maxWindow is how much memory an archive compressed with zstd may ask for:
// what zstd --long takes.
const maxWindow = 128 << 20

// decompress finds out by the first bytes how an archive is compressed.
func decompress(r io.Reader) (io.ReadCloser, error) {
	br := bufio.NewReaderSize(r, 64<<10)
	magic, err := br.Peek(4)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	switch {
	case bytes.HasPrefix(magic, []byte{0x1f, 0x8b}):
		z, err := gzip.NewReader(br)
		if err != nil {
			return nil, &badLayerError{fmt.Errorf("gzip: %w", err)}
		}
		return z, nil
	case bytes.HasPrefix(magic, []byte{0x28, 0xb5, 0x2f, 0xfd}):
		z, err := zstd.NewReader(br, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(maxWindow))
		if err != nil {
			return nil, &badLayerError{fmt.Errorf("zstd: %w", err)}
		}
		return z.IOReadCloser(), nil
	default:
		return io.NopCloser(br), nil
	}
}
