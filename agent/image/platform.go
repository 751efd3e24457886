package image

import (
	"fmt"
	"slices"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// maxIndexDepth bounds indexes that name indexes.
const maxIndexDepth = 4

// choose finds the image for a platform in an index. indexes are those on the way to it.
func choose(ix v1.ImageIndex, want v1.Platform, depth int) (img v1.Image, indexes [][]byte, err error) {
	if depth >= maxIndexDepth {
		return nil, nil, &badLayerError{fmt.Errorf("index within index, %d deep", depth)}
	}
	m, err := ix.IndexManifest()
	if err != nil {
		return nil, nil, err
	}
	raw, err := ix.RawManifest()
	if err != nil {
		return nil, nil, err
	}
	fitting := fit(m.Manifests, want)
	if len(fitting) == 0 {
		return nil, nil, fmt.Errorf("%w: this node is %s, the image is for %s", ErrPlatform, want, offered(m.Manifests))
	}
	best := fitting[0]
	if best.MediaType.IsIndex() {
		child, err := ix.ImageIndex(best.Digest)
		if err != nil {
			return nil, nil, err
		}
		img, indexes, err = choose(child, want, depth+1)
		return img, append([][]byte{raw}, indexes...), err
	}
	img, err = ix.Image(best.Digest)
	return img, [][]byte{raw}, err
}

// fit returns the manifests for a platform, the best first.
func fit(all []v1.Descriptor, want v1.Platform) []v1.Descriptor {
	var out []v1.Descriptor
	for _, d := range all {
		switch {
		case !d.MediaType.IsIndex() && !d.MediaType.IsImage():
			continue
		case d.Platform == nil: // says nothing: it may be an index, or the only image
			out = append(out, d)
		case d.Platform.OS == want.OS && d.Platform.Architecture == want.Architecture:
			out = append(out, d)
		}
	}
	slices.SortStableFunc(out, func(a, b v1.Descriptor) int { return rank(a, want) - rank(b, want) })
	return out
}

// rank orders variants: the wanted one; then the one that runs on the most
// machines, which for arm is the highest up to v7.
func rank(d v1.Descriptor, want v1.Platform) int {
	if d.Platform == nil {
		return 100
	}
	variant := d.Platform.Variant
	if variant == want.Variant {
		return 0
	}
	order := []string{"", "v1", "v2", "v3", "v4", "v5", "v6", "v7", "v8"}
	if want.Architecture == "arm" {
		order = []string{"v7", "", "v6", "v5", "v8"}
	}
	if want.Architecture == "arm64" {
		order = []string{"v8", ""}
	}
	if i := slices.Index(order, variant); i >= 0 {
		return 1 + i
	}
	return 50
}

// offered lists the platforms of an index for people.
func offered(all []v1.Descriptor) string {
	var names []string
	for _, d := range all {
		if d.Platform != nil && d.Platform.OS != "unknown" {
			names = append(names, d.Platform.String())
		}
	}
	slices.Sort(names)
	if len(names) == 0 {
		return "no platform at all"
	}
	return strings.Join(slices.Compact(names), ", ")
}

// checkPlatform refuses an image whose own config names another platform. An
// image that names none is taken.
func checkPlatform(cf *v1.ConfigFile, want v1.Platform) error {
	if cf.OS != "" && cf.OS != want.OS || cf.Architecture != "" && cf.Architecture != want.Architecture {
		return fmt.Errorf("%w: this node is %s, the image is for %s/%s", ErrPlatform, want, cf.OS, cf.Architecture)
	}
	return nil
}
