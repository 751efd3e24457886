package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"golang.org/x/sync/errgroup"

	"github.com/clusterd/clusterd/agent/image/registry"
)

// parallelDownloads is how many layers of one image come at the same time.
const parallelDownloads = 3

// Auth are the credentials for one registry; the zero value is none.
type Auth = registry.Auth

func authenticator(a Auth) authn.Authenticator {
	if a == (Auth{}) {
		return authn.Anonymous
	}
	return authn.FromConfig(authn.AuthConfig{
		Username: a.Username, Password: a.Password,
		IdentityToken: a.IdentityToken, RegistryToken: a.RegistryToken,
	})
}

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
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	there, err := referenceAt(ref, at)
	if err != nil {
		return Image{}, false, err
	}
	tr := &hostTransports{settings: settings, timeout: s.cfg.StallTimeout}
	defer tr.CloseIdleConnections()
	guard := &schemeGuard{next: aliveTransport{tr, s.cfg.StallTimeout, func() { cancel(ErrStalled) }}, settings: settings, at: at}
	defer func() {
		if err == nil {
			return
		}
		err = guard.explain(err)
		if errors.Is(context.Cause(ctx), ErrStalled) {
			err = fmt.Errorf("%w for %s", ErrStalled, s.cfg.StallTimeout)
		}
		if at.Namespace != "" {
			err = &mirrorError{at.Host, err}
		}
	}()
	layers := &downloads{source: at.Host + "/" + at.Repository}
	options := []remote.Option{
		remote.WithContext(ctx),
		remote.WithAuth(authenticator(auth)),
		remote.WithTransport(manifestBound{resuming{namespaced{guard, at}, layers.part}, s.cfg.Limits.Manifest}),
		remote.WithPlatform(s.cfg.Platform),
		remote.WithUserAgent("clusterd"),
	}
	if hurry {
		options = append(options, remote.WithRetryBackoff(remote.Backoff{Steps: 1}))
	}
	desc, err := remote.Get(there, options...)
	if err != nil {
		return Image{}, false, err
	}
	var found v1.Image
	if desc.MediaType.IsIndex() {
		ix, err := desc.ImageIndex()
		if err != nil {
			return Image{}, false, err
		}
		if found, err = choose(ix, s.cfg.Platform, 0); err != nil {
			return Image{}, false, err
		}
	} else if found, err = desc.Image(); err != nil {
		return Image{}, false, err
	}
	if err := s.cfg.Limits.manifest(found); err != nil {
		return Image{}, false, err
	}
	c, err := s.content(found)
	if err != nil {
		return Image{}, false, err
	}
	if c.manifest, err = found.RawManifest(); err != nil {
		return Image{}, false, err
	}
	if _, isDigest := ref.(name.Digest); !isDigest {
		c.refs = []string{fullName(ref)}
	}
	c.access, c.ref = &by, fullName(ref)
	c.repoDigests = []string{fullRepository(ref.Context()) + "@" + desc.Digest.String()}
	img, err = s.addRemote(ctx, found, c, layers)
	return img, true, err
}

// addRemote downloads the missing layers and adds the image.
func (s *Store) addRemote(ctx context.Context, found v1.Image, c content, fetched *downloads) (Image, error) {
	layers, err := found.Layers()
	if err != nil {
		return Image{}, err
	}
	if len(layers) != len(c.diffIDs) {
		return Image{}, &badLayerError{fmt.Errorf("the manifest has %d layers, the config %d", len(layers), len(c.diffIDs))}
	}
	keys := slices.Clone(c.chains)
	var digests []v1.Hash
	var sizes []int64
	for _, l := range layers {
		d, err := l.Digest()
		if err != nil {
			return Image{}, err
		}
		n, err := l.Size()
		if err != nil {
			return Image{}, err
		}
		digests, sizes = append(digests, d), append(sizes, n)
		keys = append(keys, blobKey(d.Hex))
	}
	release := s.hold(keys...)
	defer release()

	how := &progress{ref: c.ref}
	var missing []int
	wanted := map[string]bool{}
	for i, d := range digests {
		if !s.hasLayer(c.chains[i]) && !wanted[d.Hex] { // one that is there twice comes once
			wanted[d.Hex] = true
			missing = append(missing, i)
			how.total += sizes[i]
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
			if err := s.download(ctx, layers[i], fetched, how); err != nil {
				return fmt.Errorf("layer %d of %d: %w", i+1, len(layers), err)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return Image{}, err
	}
	for i, d := range digests {
		c.sources = append(c.sources, source{diffID: c.diffIDs[i], size: sizes[i], open: func(context.Context) (io.ReadCloser, error) {
			return openCompressed(s.blobPath(d.Hex))
		}})
	}
	img, err := s.add(ctx, c)
	if err != nil {
		return Image{}, err
	}
	release()
	s.dropBlobs(digests)
	return img, nil
}

// dropBlobs deletes compressed layers that are unpacked, unless another pull
// still needs them.
func (s *Store) dropBlobs(digests []v1.Hash) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range digests {
		if s.blobWanted(d.Hex) {
			continue
		}
		if err := os.Remove(s.blobPath(d.Hex)); err != nil && !errors.Is(err, os.ErrNotExist) {
			s.log.Warn("cannot remove a downloaded layer", "blob", d.String(), "err", err)
		}
	}
}

// openCompressed opens an archive that may be compressed.
func openCompressed(path string) (io.ReadCloser, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	z, err := decompress(f)
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

// aliveTransport calls stalled when no byte of an answer came for the timeout:
// it is to end the requests. (Headers have a timeout of their own.)
type aliveTransport struct {
	http.RoundTripper
	timeout time.Duration
	stalled func()
}

func (a aliveTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := a.RoundTripper.RoundTrip(r)
	if err == nil {
		resp.Body = &aliveBody{resp.Body, time.AfterFunc(a.timeout, a.stalled), a.timeout}
	}
	return resp, err
}

// aliveBody puts off the timer with every byte that comes.
type aliveBody struct {
	io.ReadCloser
	timer   *time.Timer
	timeout time.Duration
}

func (a *aliveBody) Read(p []byte) (int, error) {
	n, err := a.ReadCloser.Read(p)
	switch {
	case err != nil:
		a.timer.Stop()
	case n > 0:
		a.timer.Reset(a.timeout)
	}
	return n, err
}

func (a *aliveBody) Close() error {
	a.timer.Stop()
	return a.ReadCloser.Close()
}

// isNetError says whether the other side was not reached at all.
func isNetError(err error) bool {
	var (
		ue *url.Error
		ne net.Error
	)
	return errors.As(err, &ue) || errors.As(err, &ne) || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, io.ErrUnexpectedEOF)
}
