package image

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"

	"github.com/clusterd/clusterd/durable"
)

const (
	indexFile = "images.json"
	// indexVersion is the file's format number; a reader refuses any other.
	indexVersion = 1
)

// index is what images.json holds: the only source of truth about which
// images and layers exist. A layer's directory that is not in it is rubbish.
type index struct {
	Version int                    `json:"version"`
	Images  map[string]imageRecord `json:"images"` // by ID
	Layers  map[string]layer       `json:"layers"` // by chain
	// Salt keys the hashes of credentials in the images' records.
	Salt string `json:"salt,omitempty"`
}

type imageRecord struct {
	Refs        []string `json:"refs,omitempty"`
	RepoDigests []string `json:"repoDigests,omitempty"`
	Manifest    string   `json:"manifest,omitempty"` // digest of the manifest, kept as a blob
	Chains      []string `json:"chains"`             // lowest layer first
	Pinned      bool     `json:"pinned,omitempty"`
	// Preloaded: it was loaded from a file, by who runs the node and for all pods. It
	// stays so when it is pulled too.
	Preloaded bool `json:"preloaded,omitempty"`
	// Pulled says by repository with whose credentials it was pulled. nil: there was no
	// pull, or one by a version that kept no record.
	Pulled map[string]pulled `json:"pulled,omitempty"`
}

// layer is an unpacked layer: the directory holds its own files only, with
// whiteouts in overlayfs's form.
type layer struct {
	Dir  string `json:"dir"`  // a number, so that mount options stay short
	Size int64  `json:"size"` // bytes
	// Sum is its fingerprint as it was unpacked, see sum; "": none was taken.
	Sum string `json:"sum,omitempty"`
}

// errIndexDamaged is returned when images.json is no JSON of ours.
var errIndexDamaged = errors.New("the index is damaged")

func readIndex(path string) (index, error) {
	ix := index{Version: indexVersion, Images: map[string]imageRecord{}, Layers: map[string]layer{}}
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return ix, nil
	}
	if err != nil {
		return index{}, err
	}
	if err := json.Unmarshal(b, &ix); err != nil {
		return index{}, fmt.Errorf("read %s: %w: %w", path, errIndexDamaged, err)
	}
	if ix.Version != indexVersion {
		return index{}, fmt.Errorf("read %s: format version %d, this program knows %d", path, ix.Version, indexVersion)
	}
	for chain, l := range ix.Layers {
		if dirNumber(l.Dir) < 0 {
			return index{}, fmt.Errorf("read %s: layer %s has folder %q, not a number", path, chain, l.Dir)
		}
	}
	return ix, nil
}

// markLoaded notes of images that a version without records loaded from files that they
// are preloaded: pinned is what such a version knew of it. In an index that has records
// already nothing is changed, as images are pinned by hand, too.
func (ix *index) markLoaded() {
	if ix.Salt != "" {
		return
	}
	for _, rec := range ix.Images {
		if rec.Pulled != nil {
			return
		}
	}
	for id, rec := range ix.Images {
		rec.Preloaded = rec.Preloaded || rec.Pinned
		ix.Images[id] = rec
	}
}

// dirNumber is a layer directory's number, or -1.
func dirNumber(dir string) int {
	n, err := strconv.ParseUint(dir, 10, 31)
	if err != nil || strconv.FormatUint(n, 10) != dir {
		return -1
	}
	return int(n)
}

// writeFile replaces a file as a whole: after a crash it has the old or the
// new content. Where it is made, no sweep of blobs finds it.
func (s *Store) writeFile(path string, b []byte) error {
	tmp, err := os.CreateTemp(s.path("tmp"), "file-")
	if err != nil {
		return err
	}
	if _, err := tmp.Write(b); err != nil {
		return errors.Join(err, tmp.Close(), os.Remove(tmp.Name()))
	}
	return durable.Commit(tmp, path)
}

// saveIndex writes images.json; mu is held.
func (s *Store) saveIndex(ix index) error {
	b, err := json.MarshalIndent(ix, "", " ")
	if err != nil {
		return err
	}
	if err := s.writeFile(s.path(indexFile), b); err != nil {
		return fmt.Errorf("write %s: %w", indexFile, err)
	}
	return nil
}

// clone copies what a change may touch, so that a failed save changes nothing.
func (ix index) clone() index {
	out := index{Version: indexVersion, Salt: ix.Salt, Images: make(map[string]imageRecord, len(ix.Images)), Layers: make(map[string]layer, len(ix.Layers))}
	for k, v := range ix.Images {
		out.Images[k] = v
	}
	for k, v := range ix.Layers {
		out.Layers[k] = v
	}
	return out
}
