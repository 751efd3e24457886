package image

import (
	"archive/tar"
	"bufio"
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

// listArchive says which images for a platform an archive has. Layers of an OCI layout
// come as files into dir, which is empty.
func listArchive(file *os.File, dir string, req listRequest) ([]listed, error) {
	found, err := contents(file, req.Limits)
	switch {
	case err != nil:
		return nil, err
	case found.oci:
		return listLayout(file, dir, req)
	case found.docker:
		return listDocker(file, req)
	}
	return nil, ErrNotAnArchive
}

// kinds is what an archive's table of contents gives away.
type kinds struct{ oci, docker bool }

func contents(file *os.File, limits Limits) (kinds, error) {
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

// fromStart reads a file that others read, too.
func fromStart(file *os.File) (io.Reader, error) {
	st, err := file.Stat()
	if err != nil {
		return nil, err
	}
	return io.NewSectionReader(file, 0, st.Size()), nil
}

// eachEntry reads through an archive; one that is none gives ErrNotAnArchive.
func eachEntry(file *os.File, fn func(*tar.Header, io.Reader) error) error {
	from, err := fromStart(file)
	if err != nil {
		return err
	}
	tr := tar.NewReader(bufio.NewReaderSize(from, 64<<10))
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

func listLayout(file *os.File, dir string, req listRequest) ([]listed, error) {
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
	var out []listed
	var wrong error
	for _, group := range groupByName(m.Manifests) {
		c, err := layoutImage(ix, dir, group, req)
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
func layoutImage(ix v1.ImageIndex, dir string, group named, req listRequest) (listed, error) {
	fitting := fit(group.manifests, req.Platform)
	if len(fitting) == 0 {
		return listed{}, fmt.Errorf("%s: %w: this node is %s, the image is for %s", group.ref, ErrPlatform, req.Platform, offered(group.manifests))
	}
	best := fitting[0]
	var img v1.Image
	if best.MediaType.IsIndex() {
		child, err := ix.ImageIndex(best.Digest)
		if err != nil {
			return listed{}, fmt.Errorf("%s: %w", group.ref, err)
		}
		if img, _, err = choose(child, req.Platform, 0); err != nil {
			return listed{}, fmt.Errorf("%s: %w", group.ref, err)
		}
	} else {
		var err error
		if img, err = ix.Image(best.Digest); err != nil {
			return listed{}, fmt.Errorf("%s: %w", group.ref, err)
		}
	}
	manifest, err := img.Manifest()
	if err != nil {
		return listed{}, fmt.Errorf("%s: manifest: %w", group.ref, err)
	}
	if err := req.Limits.manifest(img); err != nil {
		return listed{}, fmt.Errorf("%s: %w", group.ref, err)
	}
	// The file is read as a whole, whatever the manifest says of it.
	if st, err := os.Stat(filepath.Join(dir, "blobs", "sha256", manifest.Config.Digest.Hex)); err == nil && st.Size() > req.Limits.Config {
		return listed{}, fmt.Errorf("%s: %w", group.ref, tooLarge(fmt.Sprintf("the config has %d bytes", st.Size()), size(req.Limits.Config)))
	}
	raw, err := img.RawConfigFile()
	if err != nil {
		return listed{}, fmt.Errorf("%s: config: %w", group.ref, err)
	}
	c, err := newContent(raw, req.Limits, req.Platform)
	if err != nil {
		return listed{}, fmt.Errorf("%s: %w", group.ref, err)
	}
	if got := digestOf(raw); got != manifest.Config.Digest.String() {
		return listed{}, fmt.Errorf("%s: config: %w", group.ref, ErrDigest)
	}
	out := listed{Config: raw, Digest: best.Digest.String()}
	if out.Manifest, err = img.RawManifest(); err != nil {
		return listed{}, fmt.Errorf("%s: manifest: %w", group.ref, err)
	}
	if len(manifest.Layers) != len(c.diffIDs) {
		return listed{}, &badLayerError{fmt.Errorf("%s: the manifest has %d layers, the config %d", group.ref, len(manifest.Layers), len(c.diffIDs))}
	}
	for _, l := range manifest.Layers {
		out.Layers = append(out.Layers, listedLayer{File: filepath.Join("blobs", "sha256", l.Digest.Hex)})
	}
	out.Names, err = savedName(group.ref)
	return out, err
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

func listDocker(file *os.File, req listRequest) ([]listed, error) {
	opener := openerOf(file)
	manifest, err := tarball.LoadManifest(opener)
	if err != nil {
		return nil, fmt.Errorf("manifest.json: %w", err)
	}
	if len(manifest) == 0 {
		return nil, errors.New("the archive holds no image")
	}
	var out []listed
	for _, d := range manifest {
		l, err := dockerImage(opener, d, len(manifest) == 1, req)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", strings.Join(d.RepoTags, ", "), err)
		}
		out = append(out, l)
	}
	return out, nil
}

func openerOf(file *os.File) tarball.Opener {
	return func() (io.ReadCloser, error) {
		r, err := fromStart(file)
		if err != nil {
			return nil, err
		}
		return io.NopCloser(r), nil
	}
}

func dockerImage(opener tarball.Opener, d tarball.Descriptor, only bool, req listRequest) (listed, error) {
	tagged := ""
	if len(d.RepoTags) > 0 {
		tagged = d.RepoTags[0]
	} else if !only {
		return listed{}, errors.New("the archive holds several images, and one has no name")
	}
	img, err := taggedImage(opener, tagged)
	if err != nil {
		return listed{}, err
	}
	out := listed{}
	if out.Config, err = img.RawConfigFile(); err != nil {
		return listed{}, fmt.Errorf("config: %w", err)
	}
	c, err := newContent(out.Config, req.Limits, req.Platform)
	if err != nil {
		return listed{}, err
	}
	if len(d.Layers) != len(c.diffIDs) {
		return listed{}, &badLayerError{fmt.Errorf("manifest.json has %d layers, the config %d", len(d.Layers), len(c.diffIDs))}
	}
	for _, l := range d.Layers {
		out.Layers = append(out.Layers, listedLayer{Docker: &dockerLayer{l}})
	}
	for _, r := range d.RepoTags {
		full, err := Normalize(r)
		if err != nil {
			return listed{}, err
		}
		out.Names = append(out.Names, full)
	}
	return out, nil
}

// taggedImage is the image of an archive that has the tag, or its only one.
func taggedImage(opener tarball.Opener, tagged string) (v1.Image, error) {
	if tagged == "" {
		return tarball.Image(opener, nil)
	}
	tag, err := name.NewTag(tagged, name.WeakValidation)
	if err != nil {
		return nil, fmt.Errorf("%w: %q: %w", ErrInvalidName, tagged, err)
	}
	return tarball.Image(opener, &tag)
}

// openDockerLayer gives one layer of an archive made by docker save, decompressed if need
// be. Layers that several images have may be links to each other.
func openDockerLayer(file *os.File, which dockerLayer) (io.ReadCloser, error) {
	name := which.Name
	for range maxFollows {
		found, r, err := findEntry(file, name)
		switch {
		case err != nil:
			return nil, fmt.Errorf("layer %q: %w", which.Name, err)
		case found.Typeflag == tar.TypeReg:
			return decompress(r)
		case found.Typeflag == tar.TypeSymlink, found.Typeflag == tar.TypeLink:
			name = path.Join(path.Dir(name), path.Clean(found.Linkname))
		default:
			return nil, &badLayerError{fmt.Errorf("layer %q is no file", which.Name)}
		}
	}
	return nil, &badLayerError{fmt.Errorf("layer %q is a link to a link, %d times", which.Name, maxFollows)}
}

// findEntry looks for a name in an archive, without reading what is before.
func findEntry(file *os.File, name string) (*tar.Header, io.Reader, error) {
	from, err := fromStart(file)
	if err != nil {
		return nil, nil, err
	}
	tr := tar.NewReader(from) // it seeks
	for {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return nil, nil, &badLayerError{errors.New("it is not in the archive")}
		}
		if err != nil {
			return nil, nil, &badLayerError{fmt.Errorf("read the archive: %w", err)}
		}
		if h.Name == name {
			return h, tr, nil
		}
	}
}
