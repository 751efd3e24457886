package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/clusterd/clusterd/agent/internal/plainfile"
)

// ErrNotAnArchive is returned by Load for a file that is neither an OCI layout
// nor made by docker save.
var ErrNotAnArchive = errors.New("not an image archive: neither an OCI layout nor one made by docker save")

// Load takes images from an archive as docker save makes it, or a tar of an
// OCI layout, both perhaps compressed. Loaded images are pinned. Either all
// images of the archive for this platform are added or, on an error, those
// before it.
func (s *Store) Load(ctx context.Context, r io.Reader) ([]Image, error) {
	imgs, err := s.load(ctx, r)
	if err != nil {
		return imgs, fmt.Errorf("load images: %w", err)
	}
	return imgs, nil
}

func (s *Store) load(ctx context.Context, r io.Reader) (out []Image, err error) {
	tmp, err := os.MkdirTemp(s.path("tmp"), "load-")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, removeTree(context.WithoutCancel(ctx), tmp)) }()
	plain, err := s.work.inflate(ctx, ctxReader{ctx, r})
	if err != nil {
		return nil, err
	}
	defer func() { _ = plain.Close() }()
	name := filepath.Join(tmp, "archive.tar")
	if err := spool(name, plain); err != nil {
		return nil, err
	}
	file, err := os.Open(name)
	if err != nil {
		return nil, err
	}
	defer func() { _ = file.Close() }()
	dir := filepath.Join(tmp, "layout")
	if err := os.Mkdir(dir, 0o700); err != nil {
		return nil, err
	}
	found, err := s.work.list(ctx, file, dir, listRequest{s.cfg.Limits, s.cfg.Platform})
	if err != nil {
		return nil, err
	}
	var all []content
	for _, l := range found {
		c, err := s.loaded(l, file, dir)
		if err != nil {
			return nil, err
		}
		all = append(all, c)
	}
	for _, c := range all {
		c.pinned, c.preloaded = true, true
		img, err := s.add(ctx, c)
		if err != nil {
			return out, fmt.Errorf("%s: %w", describe(c), err)
		}
		s.log.Info("image loaded", "refs", c.refs, "id", img.ID, "bytes", img.Size)
		out = append(out, img)
	}
	return out, nil
}

func describe(c content) string {
	if len(c.refs) > 0 {
		return strings.Join(c.refs, ", ")
	}
	return digestOf(c.config)
}

// loaded is the content of an image of an archive.
func (s *Store) loaded(l listed, archive *os.File, dir string) (content, error) {
	c, err := newContent(l.Config, s.cfg.Limits, s.cfg.Platform)
	if err != nil {
		return content{}, err
	}
	if len(l.Layers) > s.cfg.Limits.Layers {
		return content{}, tooLarge(fmt.Sprintf("the image has %d layers", len(l.Layers)), fmt.Sprint(s.cfg.Limits.Layers))
	}
	if len(l.Layers) != len(c.diffIDs) {
		return content{}, &badLayerError{fmt.Errorf("the archive has %d layers, the config %d", len(l.Layers), len(c.diffIDs))}
	}
	if int64(len(l.Manifest)) > s.cfg.Limits.Manifest {
		return content{}, tooLarge("a manifest has more bytes than allowed", size(s.cfg.Limits.Manifest))
	}
	c.manifest = l.Manifest
	for _, n := range l.Names {
		full, err := Normalize(n)
		if err != nil {
			return content{}, err
		}
		c.refs = append(c.refs, full)
	}
	if len(c.refs) > 0 && l.Digest != "" {
		repo, err := parse(c.refs[0])
		if err != nil {
			return content{}, err
		}
		d, err := v1.NewHash(l.Digest)
		if err != nil {
			return content{}, err
		}
		c.repoDigests = []string{fullRepository(repo.Context()) + "@" + d.String()}
	}
	for i, layer := range l.Layers {
		// The archive's digest is checked after unpacking, against the config.
		c.sources = append(c.sources, layerSource{diffID: c.diffIDs[i], open: func(ctx context.Context) (io.ReadCloser, error) {
			if layer.Docker != nil {
				return s.work.dockerLayer(ctx, archive, *layer.Docker)
			}
			f, err := plainfile.OpenBeneath(dir, layer.File)
			if err != nil {
				return nil, err
			}
			return s.inflate(ctx, f)
		}})
	}
	return c, nil
}

// ctxReader ends a copy when the caller gives up.
type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (c ctxReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}

func spool(file string, r io.Reader) error {
	f, err := os.Create(file) //nolint:forbidigo // it is removed after the load
	if err != nil {
		return err
	}
	_, err = io.Copy(f, r)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}
