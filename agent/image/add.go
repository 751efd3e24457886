package image

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
)

// content is an image on its way into the store.
type content struct {
	config      []byte // as it is, its digest is the image's ID
	manifest    []byte // nil when there is none (docker save)
	diffIDs     []v1.Hash
	chains      []string
	sources     []layerSource
	refs        []string
	repoDigests []string
	pinned      bool
	preloaded   bool
	access      *access // nil: it was not pulled
	ref         string  // what is pulled
}

// newContent checks an image's config. The manifest is added by who has one.
func newContent(raw []byte, limits Limits, platform v1.Platform) (content, error) {
	if int64(len(raw)) > limits.Config { // also one inside the manifest
		return content{}, tooLarge(fmt.Sprintf("the config has %d bytes", len(raw)), size(limits.Config))
	}
	if err := elements("the config", raw); err != nil {
		return content{}, err
	}
	var cf v1.ConfigFile
	if err := json.Unmarshal(raw, &cf); err != nil {
		return content{}, &badLayerError{fmt.Errorf("config: %w", err)}
	}
	if err := checkPlatform(&cf, platform); err != nil {
		return content{}, err
	}
	c := content{config: raw, diffIDs: cf.RootFS.DiffIDs}
	c.chains = chainIDs(c.diffIDs)
	return c, nil
}

// add unpacks what is missing and commits the image: after add returns it is
// whole and on disk, before that it does not exist.
func (s *Store) add(ctx context.Context, c content) (Image, error) {
	release := s.hold(c.chains...)
	defer release()
	if err := s.unpackAll(ctx, c.chains, c.sources); err != nil {
		return Image{}, err
	}
	id, manifest := digestOf(c.config), ""
	keys := []string{blobKey(id)}
	if c.manifest != nil {
		manifest = digestOf(c.manifest)
		keys = append(keys, blobKey(manifest))
	}
	defer s.hold(keys...)()
	if _, err := s.writeBlob(c.config); err != nil {
		return Image{}, err
	}
	if c.manifest != nil {
		if _, err := s.writeBlob(c.manifest); err != nil {
			return Image{}, err
		}
	}
	// The index must not name a layer whose files a power cut could still take.
	if err := s.sync(); err != nil {
		return Image{}, err
	}
	return s.commit(id, manifest, c)
}

// sync brings all files of the store to the disk.
func (s *Store) sync() error {
	d, err := os.Open(s.cfg.Dir)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	if err := unix.Syncfs(int(d.Fd())); err != nil {
		return fmt.Errorf("sync: %w", err)
	}
	return nil
}

// commit writes the image into the index. Names move here from the images that
// had them.
func (s *Store) commit(id, manifest string, c content) (Image, error) {
	var cf v1.ConfigFile
	if err := json.Unmarshal(c.config, &cf); err != nil {
		return Image{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return Image{}, ErrClosed
	}
	ix := s.index.clone()
	for other, rec := range ix.Images {
		if other == id {
			continue
		}
		rec.Refs = slices.DeleteFunc(slices.Clone(rec.Refs), func(r string) bool { return slices.Contains(c.refs, r) })
		ix.Images[other] = rec
	}
	rec := ix.Images[id]
	rec.Chains = c.chains
	rec.Pinned = rec.Pinned || c.pinned
	rec.Preloaded = rec.Preloaded || c.preloaded
	if c.access != nil { // with the image, so that no crash leaves one that was pulled and looks preloaded
		ix.record(&rec, *c.access)
	}
	if manifest != "" {
		rec.Manifest = manifest
	}
	rec.Refs = union(rec.Refs, c.refs)
	rec.RepoDigests = union(rec.RepoDigests, c.repoDigests)
	ix.Images[id] = rec
	for _, chain := range c.chains {
		ix.Layers[chain] = s.layers[chain]
	}
	if err := s.saveIndex(ix); err != nil {
		return Image{}, err
	}
	s.index = ix
	s.configs[id] = cf.Config
	s.lastUsed[id] = time.Now()
	return s.image(id), nil
}

// union merges two lists into a sorted one without repetition.
func union(a, b []string) []string {
	out := slices.Concat(a, b)
	slices.Sort(out)
	return slices.Compact(out)
}
