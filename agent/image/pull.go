package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"golang.org/x/net/http/httpproxy"
	"golang.org/x/sync/errgroup"

	"github.com/clusterd/clusterd/agent/image/registry"
)

// parallelDownloads is how many layers of one image come at the same time.
const parallelDownloads = 3

// Auth are the credentials for one registry; the zero value is none.
type Auth = registry.Auth

// pullKey is what makes two pulls the same. Credentials belong to it, so that
// no caller gets the answer to another one's wrong password.
type pullKey struct {
	ref  string
	auth Auth
}

// Ensure returns the image of that name, pulling it if it is not here. It
// does not ask the registry about an image that is.
func (s *Store) Ensure(ctx context.Context, ref string, auth Auth) (Image, error) {
	img, ok, err := s.Get(ref)
	if err != nil || ok {
		return img, err
	}
	return s.Pull(ctx, ref, auth)
}

// Pull is PullAs with credentials that are of no Secret.
func (s *Store) Pull(ctx context.Context, ref string, auth Auth) (Image, error) {
	return s.PullAs(ctx, ref, Credential{Auth: auth})
}

// PullAs asks the registry what the name stands for now and fetches what is
// missing. Callers that pull the same at the same time share the work. Whose
// credentials opened the image is on record then, see Access. Errors are
// ErrInvalidName, *PullError, or the context's.
func (s *Store) PullAs(ctx context.Context, ref string, as Credential) (Image, error) {
	full, err := Normalize(ref)
	if err != nil {
		return Image{}, err
	}
	if idPattern.MatchString(full) {
		return Image{}, &PullError{Ref: full, Reason: ReasonNotFound, Err: fmt.Errorf("%w, and an ID cannot be pulled", ErrNotFound)}
	}
	parsed, err := parse(ref)
	if err != nil {
		return Image{}, err
	}
	img, err := s.pulls.do(ctx, pullKey{full, as.Auth}, func(ctx context.Context) (Image, error) {
		start := time.Now()
		var img Image
		var err error
		fetched := true
		if s.own != nil && full == s.own.Ref {
			img, err = s.makeOwn(ctx)
		} else {
			img, fetched, err = s.pull(ctx, parsed, as)
		}
		if err != nil {
			if ctx.Err() != nil {
				return Image{}, context.Cause(ctx)
			}
			if fetched {
				s.dropUnclaimed(err)
			}
			return Image{}, pullError(full, err)
		}
		s.log.Info("image pulled", "image", full, "id", img.ID, "bytes", img.Size, "took", time.Since(start).Round(time.Millisecond))
		return img, nil
	})
	if err == nil && as.Auth != (Auth{}) {
		err = s.alsoPulledBy(img.ID, access{repository: fullRepository(parsed.Context()), with: as})
	}
	return img, err
}

// dropUnclaimed removes what a pull has left that failed for lack of room: the next
// try would need the same again, and others need it meanwhile. What other pulls need
// stays.
func (s *Store) dropUnclaimed(why error) {
	if !errors.Is(why, syscall.ENOSPC) && !errors.Is(why, ErrTooLarge) {
		return // the next try goes on with the layers that are here
	}
	if err := s.change(func(*index) error { return nil }); err != nil {
		s.log.Warn("layers of an image that has no room stay", "err", err)
	}
}

// pull asks the places for the image one after the other, with the credentials that are
// for each. fetched: it has come to the layers, and may have left some.
func (s *Store) pull(ctx context.Context, ref name.Reference, as Credential) (img Image, fetched bool, err error) {
	var settings *registry.Settings
	if s.cfg.Registries != nil {
		settings = s.cfg.Registries()
	}
	where := settings.Endpoints(ref.Context().RegistryStr(), ref.Context().RepositoryStr())
	var before []error
	for i, at := range where {
		more := i < len(where)-1
		for _, a := range authsFor(at, as.Auth) {
			var came bool
			// Only the caller's own are on record as somebody's: what the node's open,
			// or no credentials at all, is open to all its pods.
			by := access{repository: fullRepository(ref.Context()), everyone: a == (Auth{}) || a != as.Auth || at.Namespace != "", with: as}
			img, came, err = s.pullFrom(ctx, ref, settings, at, a, by, more)
			fetched = fetched || came
			if err == nil || !refused(err) {
				break
			}
		}
		if err == nil || !more || !elsewhere(ctx, err) {
			break
		}
		s.log.Info("a mirror did not give an image, the next place is asked", "image", fullName(ref), "mirror", at.Host, "err", err)
		before = append(before, err)
	}
	if err != nil && len(before) > 0 {
		err = &afterMirrors{err, before}
	}
	return img, fetched, err
}

// pullFrom takes as long as bytes come from the registry. hurry: others are asked if
// this one does not answer.
func (s *Store) pullFrom(ctx context.Context, ref name.Reference, settings *registry.Settings, at registry.Endpoint, auth Auth, by access, hurry bool) (img Image, fetched bool, err error) {
	there, err := referenceAt(ref, at)
	if err != nil {
		return Image{}, false, err
	}
	defer func() {
		if err != nil && at.Namespace != "" {
			err = &mirrorError{at.Host, err}
		}
	}()
	source := at.Host + "/" + at.Repository
	at.Auths = nil
	found, err := s.work.fetch(ctx, fetchRequest{
		Ref: there, At: at, Auth: auth, Platform: s.cfg.Platform, Limits: s.cfg.Limits, Stall: s.cfg.StallTimeout,
		Hurry: hurry, Hosts: settings.Connections(), Proxy: httpproxy.FromEnvironment(),
	})
	if err != nil {
		return Image{}, false, err
	}
	defer found.close()
	docs := found.documents()
	if err := docs.check(ref, s.cfg.Limits, s.cfg.Platform); err != nil {
		return Image{}, false, err
	}
	c, err := newContent(docs.Config, s.cfg.Limits, s.cfg.Platform)
	if err != nil {
		return Image{}, false, err
	}
	c.manifest = docs.Chain[len(docs.Chain)-1]
	if _, isDigest := ref.(name.Digest); !isDigest {
		c.refs = []string{fullName(ref)}
	}
	c.access, c.ref = &by, fullName(ref)
	c.repoDigests = []string{fullRepository(ref.Context()) + "@" + digestOf(docs.Chain[0])}
	img, err = s.addRemote(ctx, found, c, source)
	return img, true, err
}

// addRemote downloads the missing layers and adds the image.
func (s *Store) addRemote(ctx context.Context, found fetched, c content, source string) (Image, error) {
	layers := found.documents().Layers
	if len(layers) != len(c.diffIDs) {
		return Image{}, &badLayerError{fmt.Errorf("the manifest has %d layers, the config %d", len(layers), len(c.diffIDs))}
	}
	keys := slices.Clone(c.chains)
	files := make([]string, len(layers)) // of the compressed layers, among the blobs
	for i, l := range layers {
		files[i] = partKey(l.Digest.Hex, source)
		keys = append(keys, blobKey(files[i]))
	}
	release := s.hold(keys...)
	defer release()

	how := &progress{ref: c.ref}
	var missing []int
	wanted := map[string]bool{}
	for i, l := range layers {
		if !s.hasLayer(c.chains[i]) && !wanted[l.Digest.Hex] { // one that is there twice comes once
			wanted[l.Digest.Hex] = true
			missing = append(missing, i)
			how.total += l.Size
		}
	}
	defer s.begin(how)()

	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(parallelDownloads)
	for _, i := range missing {
		g.Go(func() error {
			if err := gctx.Err(); err != nil {
				return err
			}
			if err := s.download(ctx, found, i, source, how); err != nil {
				return fmt.Errorf("layer %d of %d: %w", i+1, len(layers), err)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return Image{}, err
	}
	for i, l := range layers {
		c.sources = append(c.sources, layerSource{
			diffID: c.diffIDs[i], size: l.Size,
			open: func(ctx context.Context) (io.ReadCloser, error) {
				f, err := os.Open(s.blobPath(files[i]))
				if err != nil {
					return nil, err
				}
				return s.inflate(ctx, f)
			},
			spoilt: func() error { return s.dropSpoilt(files[i], l.Digest) },
		})
	}
	img, err := s.add(ctx, c)
	if err != nil {
		return Image{}, err
	}
	release()
	s.dropBlobs(files)
	return img, nil
}

// dropBlobs deletes compressed layers that are unpacked, unless another pull
// still needs them.
func (s *Store) dropBlobs(files []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, file := range files {
		if s.blobWanted(file) {
			continue
		}
		if err := os.Remove(s.blobPath(file)); err != nil && !errors.Is(err, os.ErrNotExist) {
			s.log.Warn("cannot remove a downloaded layer", "blob", file, "err", err)
		}
	}
}

// inflate gives the archive in a file that may be compressed, and closes the file with it.
func (s *Store) inflate(ctx context.Context, f *os.File) (io.ReadCloser, error) {
	z, err := s.work.inflate(ctx, f)
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return closeBoth{z, f}, nil
}

type closeBoth struct {
	io.ReadCloser
	under io.Closer
}

func (c closeBoth) Close() error { return errors.Join(c.ReadCloser.Close(), c.under.Close()) }

// isNetError says whether the other side was not reached at all.
func isNetError(err error) bool {
	var (
		ue *url.Error
		ne net.Error
	)
	return errors.As(err, &ue) || errors.As(err, &ne) || errors.Is(err, errNet) || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, io.ErrUnexpectedEOF)
}
