package image

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// Annotations that say under which name an image was saved.
const (
	annotationRef  = "org.opencontainers.image.ref.name"
	annotationName = "io.containerd.image.name"
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
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	plain, err := decompress(ctxReader{ctx, r})
	if err != nil {
		return nil, err
	}
	defer func() { _ = plain.Close() }()
	file := filepath.Join(tmp, "archive.tar")
	if err := spool(file, plain); err != nil {
		return nil, err
	}
	found, err := contents(file, s.cfg.Limits)
	if err != nil {
		return nil, err
	}
	var all []content
	switch {
	case found.oci:
		all, err = s.loadLayout(file, filepath.Join(tmp, "layout"))
	case found.docker:
		all, err = s.loadDocker(file)
	default:
		err = ErrNotAnArchive
	}
	if err != nil {
		return nil, err
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

// kinds is what an archive's table of contents gives away.
type kinds struct{ oci, docker bool }

func contents(file string, limits Limits) (kinds, error) {
	var k kinds
	index, mark := false, false
	err := eachEntry(file, func(h *tar.Header, _ io.Reader) error {
		// Manifests and configs are read as a whole.
		if path.Ext(h.Name) == ".json" && h.Size > limits.Config {
			return tooLarge(fmt.Sprintf("%q has %d bytes", h.Name, h.Size), size(limits.Config))
		}
		switch path.Clean(h.Name) {
		case "index.json":
			index = true
		case "oci-layout":
			mark = true
		case "manifest.json":
			k.docker = true
		}
		return nil
	})
	k.oci = index && mark
	return k, err
}

// eachEntry reads through an archive; one that is none gives ErrNotAnArchive.
func eachEntry(file string, fn func(*tar.Header, io.Reader) error) error {
	f, err := os.Open(file)
	if err != nil {
		return err
	}
	defer func() { _ = f.Close() }()
	tr := tar.NewReader(bufio.NewReaderSize(f, 64<<10))
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if errors.Is(err, tar.ErrHeader) || errors.Is(err, io.ErrUnexpectedEOF) {
			return fmt.Errorf("%w (%w)", ErrNotAnArchive, err)
		}
		if err != nil {
			return err
		}
		if err := fn(h, tr); err != nil {
			return err
		}
	}
}

// layoutEntry are the only names taken from an archive of a layout.
var layoutEntry = regexp.MustCompile(`^(?:index\.json|oci-layout|blobs/sha256/[0-9a-f]{64})$`)

func (s *Store) loadLayout(file, dir string) ([]content, error) {
	if err := os.MkdirAll(filepath.Join(dir, "blobs", "sha256"), 0o700); err != nil {
		return nil, err
	}
	err := eachEntry(file, func(h *tar.Header, r io.Reader) error {
		clean := path.Clean(h.Name)
		if h.Typeflag != tar.TypeReg || !layoutEntry.MatchString(clean) {
			return nil
		}
		return spool(filepath.Join(dir, clean), r)
	})
	if err != nil {
		return nil, err
	}
	ix, err := layout.ImageIndexFromPath(dir)
	if err != nil {
		return nil, fmt.Errorf("read the layout: %w", err)
	}
	m, err := ix.IndexManifest()
	if err != nil {
		return nil, fmt.Errorf("read the layout: %w", err)
	}
	if len(m.Manifests) == 0 {
		return nil, errors.New("the archive holds no image")
	}
	var out []content
	var wrong error
	for _, group := range groupByName(m.Manifests) {
		c, err := s.layoutImage(ix, dir, group)
		if errors.Is(err, ErrPlatform) {
			wrong = err // others may fit
			continue
		}
		if err != nil {
			return nil, err
		}
		out = append(out, c)
	}
	if len(out) == 0 {
		return nil, wrong
	}
	return out, nil
}

// named is one image of a layout: the manifests saved under one name, which
// differ in their platform.
type named struct {
	ref       string
	manifests []v1.Descriptor
}

func groupByName(all []v1.Descriptor) []named {
	var out []named
	for _, d := range all {
		if !d.MediaType.IsImage() && !d.MediaType.IsIndex() {
			continue
		}
		ref := d.Annotations[annotationName]
		if ref == "" {
			ref = d.Annotations[annotationRef]
		}
		i := slices.IndexFunc(out, func(n named) bool { return ref != "" && n.ref == ref })
		if i < 0 {
			i = len(out)
			out = append(out, named{ref: ref})
		}
		out[i].manifests = append(out[i].manifests, d)
	}
	return out
}

// layoutImage prepares the image of a group that fits this platform.
func (s *Store) layoutImage(ix v1.ImageIndex, dir string, group named) (content, error) {
	fitting := fit(group.manifests, s.cfg.Platform)
	if len(fitting) == 0 {
		return content{}, fmt.Errorf("%s: %w: this node is %s, the image is for %s", group.ref, ErrPlatform, s.cfg.Platform, offered(group.manifests))
	}
	best := fitting[0]
	var img v1.Image
	if best.MediaType.IsIndex() {
		child, err := ix.ImageIndex(best.Digest)
		if err != nil {
			return content{}, fmt.Errorf("%s: %w", group.ref, err)
		}
		if img, err = choose(child, s.cfg.Platform, 0); err != nil {
			return content{}, fmt.Errorf("%s: %w", group.ref, err)
		}
	} else {
		var err error
		if img, err = ix.Image(best.Digest); err != nil {
			return content{}, fmt.Errorf("%s: %w", group.ref, err)
		}
	}
	manifest, err := img.Manifest()
	if err != nil {
		return content{}, fmt.Errorf("%s: manifest: %w", group.ref, err)
	}
	if err := s.cfg.Limits.manifest(img); err != nil {
		return content{}, fmt.Errorf("%s: %w", group.ref, err)
	}
	// The file is read as a whole, whatever the manifest says of it.
	if st, err := os.Stat(filepath.Join(dir, "blobs", "sha256", manifest.Config.Digest.Hex)); err == nil && st.Size() > s.cfg.Limits.Config {
		return content{}, fmt.Errorf("%s: %w", group.ref, tooLarge(fmt.Sprintf("the config has %d bytes", st.Size()), size(s.cfg.Limits.Config)))
	}
	c, err := s.content(img)
	if err != nil {
		return content{}, fmt.Errorf("%s: %w", group.ref, err)
	}
	if got := digestOf(c.config); got != manifest.Config.Digest.String() {
		return content{}, fmt.Errorf("%s: config: %w", group.ref, ErrDigest)
	}
	if c.manifest, err = img.RawManifest(); err != nil {
		return content{}, fmt.Errorf("%s: manifest: %w", group.ref, err)
	}
	if len(manifest.Layers) != len(c.diffIDs) {
		return content{}, &badLayerError{fmt.Errorf("%s: the manifest has %d layers, the config %d", group.ref, len(manifest.Layers), len(c.diffIDs))}
	}
	for i, l := range manifest.Layers {
		blob := filepath.Join(dir, "blobs", "sha256", l.Digest.Hex)
		// The archive's digest is checked after unpacking, against the config.
		c.sources = append(c.sources, source{diffID: c.diffIDs[i], open: func(context.Context) (io.ReadCloser, error) {
			return openCompressed(blob)
		}})
	}
	if c.refs, err = savedName(group.ref); err != nil {
		return content{}, err
	}
	if len(c.refs) > 0 {
		repo, err := parse(c.refs[0])
		if err != nil {
			return content{}, err
		}
		c.repoDigests = []string{fullRepository(repo.Context()) + "@" + best.Digest.String()}
	}
	return c, nil
}

// savedName completes the name found in an archive. A bare tag ("latest"),
// as some tools write it, names nothing.
func savedName(ref string) ([]string, error) {
	if ref == "" || !strings.ContainsAny(ref, "/:") {
		return nil, nil
	}
	full, err := Normalize(ref)
	if err != nil {
		return nil, err
	}
	return []string{full}, nil
}

func (s *Store) loadDocker(file string) ([]content, error) {
	opener := func() (io.ReadCloser, error) { return os.Open(file) }
	manifest, err := tarball.LoadManifest(opener)
	if err != nil {
		return nil, fmt.Errorf("manifest.json: %w", err)
	}
	if len(manifest) == 0 {
		return nil, errors.New("the archive holds no image")
	}
	var out []content
	for _, d := range manifest {
		c, err := s.dockerImage(opener, d, len(manifest) == 1)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", strings.Join(d.RepoTags, ", "), err)
		}
		out = append(out, c)
	}
	return out, nil
}

func (s *Store) dockerImage(opener tarball.Opener, d tarball.Descriptor, only bool) (content, error) {
	var tag *name.Tag
	if len(d.RepoTags) > 0 {
		t, err := name.NewTag(d.RepoTags[0], name.WeakValidation)
		if err != nil {
			return content{}, fmt.Errorf("%w: %q: %w", ErrInvalidName, d.RepoTags[0], err)
		}
		tag = &t
	} else if !only {
		return content{}, errors.New("the archive holds several images, and one has no name")
	}
	img, err := tarball.Image(opener, tag)
	if err != nil {
		return content{}, err
	}
	c, err := s.content(img)
	if err != nil {
		return content{}, err
	}
	layers, err := img.Layers()
	if err != nil {
		return content{}, err
	}
	if len(layers) != len(c.diffIDs) {
		return content{}, &badLayerError{fmt.Errorf("manifest.json has %d layers, the config %d", len(layers), len(c.diffIDs))}
	}
	for i, l := range layers {
		c.sources = append(c.sources, source{diffID: c.diffIDs[i], open: func(context.Context) (io.ReadCloser, error) {
			return l.Uncompressed()
		}})
	}
	for _, r := range d.RepoTags {
		full, err := Normalize(r)
		if err != nil {
			return content{}, err
		}
		c.refs = append(c.refs, full)
	}
	return c, nil
}
