package image

import (
	"archive/tar"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"sync"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// Own is an image that the node makes itself, from one program of its own, so
// that no registry is needed for it. Its name is never asked of a registry.
type Own struct {
	// Ref is the image's full name, with a tag.
	Ref string
	// Program is the file on this machine, read again for each unpacking; it may
	// be /proc/self/exe. It has to need nothing but itself.
	Program string
	// Path is where the program is in the image, and the image's entrypoint:
	// "/clusterd".
	Path string
}

// ownUser is the user such an image's program runs as: "nobody" on Debian.
const ownUser = "65532:65532"

// own makes Config.Own when it is asked for. Its identity is that of the
// program's bytes, so that another version of the program is another image.
type own struct {
	Own
	content func() (content, error) // made once
}

func newOwn(o Own, platform v1.Platform) *own {
	if o.Ref == "" {
		return nil
	}
	out := &own{Own: o}
	out.content = sync.OnceValues(func() (content, error) { return out.describe(platform) })
	return out
}

// describe reads the program once for its digest.
func (o *own) describe(platform v1.Platform) (content, error) {
	hash := sha256.New()
	if err := o.archive(hash); err != nil {
		return content{}, err
	}
	diffID := v1.Hash{Algorithm: "sha256", Hex: hex.EncodeToString(hash.Sum(nil))}
	config, err := json.Marshal(v1.ConfigFile{
		OS: platform.OS, Architecture: platform.Architecture,
		Config: v1.Config{Entrypoint: []string{o.Path}, User: ownUser, WorkingDir: "/", Env: []string{"PATH=/"}},
		RootFS: v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{diffID}},
	})
	if err != nil {
		return content{}, err
	}
	open := func(ctx context.Context) (io.ReadCloser, error) {
		r, w := io.Pipe()
		go func() { w.CloseWithError(o.archive(ctxWriter{ctx, w})) }() // ends when r is closed
		return r, nil
	}
	diffIDs := []v1.Hash{diffID}
	return content{
		config: config, diffIDs: diffIDs, chains: chainIDs(diffIDs), refs: []string{o.Ref},
		sources: []layerSource{{diffID: diffID, open: open}}, preloaded: true,
	}, nil
}

// archive writes the layer: the same program gives the same bytes.
func (o *own) archive(w io.Writer) (err error) {
	f, err := os.Open(o.Program)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	fi, err := f.Stat()
	if err != nil {
		return err
	}
	t := tar.NewWriter(w)
	header := func(name string, kind byte, mode, size int64) error {
		return t.WriteHeader(&tar.Header{Name: name, Typeflag: kind, Mode: mode, Size: size, ModTime: time.Unix(0, 0), Format: tar.FormatPAX})
	}
	if err := header("tmp/", tar.TypeDir, 0o1777, 0); err != nil {
		return err
	}
	if err := header(path.Clean(o.Path)[1:], tar.TypeReg, 0o755, fi.Size()); err != nil {
		return err
	}
	if _, err := io.Copy(t, f); err != nil {
		return fmt.Errorf("read %s: %w", o.Program, err)
	}
	return t.Close()
}

type ctxWriter struct {
	ctx context.Context
	w   io.Writer
}

func (c ctxWriter) Write(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.w.Write(p)
}

// current reports whether the image of that ID, found under the own name, is of
// the program that runs now. The caller must not hold mu: the program may have
// to be read.
func (o *own) current(id string) bool {
	c, err := o.content()
	return err == nil && digestOf(c.config) == id
}

// makeOwn puts the image into the store.
func (s *Store) makeOwn(ctx context.Context) (Image, error) {
	c, err := s.own.content()
	if err != nil {
		return Image{}, err
	}
	return s.add(ctx, c)
}
