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
	"strings"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"golang.org/x/sync/errgroup"
)

// parallelDownloads is how many layers of one image come at the same time.
const parallelDownloads = 3

// Auth are the credentials for one registry; the zero value is none.
type Auth struct {
	Username, Password string
	IdentityToken      string // exchanged for an access token
	RegistryToken      string // sent as a bearer token as it is
}

func (a Auth) authenticator() authn.Authenticator {
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

// Pull asks the registry what the name stands for now and fetches what is
// missing. Callers that pull the same at the same time share the work. Errors
// are ErrInvalidName, *PullError, or the context's.
func (s *Store) Pull(ctx context.Context, ref string, auth Auth) (Image, error) {
	full, err := Normalize(ref)
	if err != nil {
		return Image{}, err
	}
	if idPattern.MatchString(full) {
		return Image{}, &PullError{Ref: full, Reason: ReasonNotFound, Err: fmt.Errorf("%w, and an ID cannot be pulled", ErrNotFound)}
	}
	parsed, err := s.parseRemote(ref)
	if err != nil {
		return Image{}, err
	}
	return s.pulls.do(ctx, pullKey{full, auth}, func(ctx context.Context) (Image, error) {
		start := time.Now()
		var img Image
		var err error
		fetched := true
		if s.own != nil && full == s.own.Ref {
			img, err = s.makeOwn(ctx)
		} else {
			img, fetched, err = s.pull(ctx, parsed, auth)
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

// parseRemote is parse, with the permission to speak plain HTTP put in.
func (s *Store) parseRemote(ref string) (name.Reference, error) {
	parsed, err := parse(ref)
	if err != nil || !slices.Contains(s.cfg.PlainHTTP, parsed.Context().RegistryStr()) {
		return parsed, err
	}
	return name.ParseReference(ref, name.WeakValidation, name.Insecure)
}

// pull takes as long as bytes come from the registry. fetched: it has come to the
// layers, and may have left some.
func (s *Store) pull(ctx context.Context, ref name.Reference, auth Auth) (img Image, fetched bool, err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer func() {
		if err != nil && errors.Is(context.Cause(ctx), ErrStalled) {
			err = fmt.Errorf("%w for %s", ErrStalled, s.cfg.StallTimeout)
		}
	}()
	tr := s.transport()
	defer tr.CloseIdleConnections()
	stalled := func() { cancel(ErrStalled) }
	desc, err := remote.Get(ref,
		remote.WithContext(ctx),
		remote.WithAuth(auth.authenticator()),
		remote.WithTransport(manifestBound{plainHTTPGuard{aliveTransport{tr, s.cfg.StallTimeout, stalled}, s.cfg.PlainHTTP}, s.cfg.Limits.Manifest}),
		remote.WithPlatform(s.cfg.Platform),
		remote.WithUserAgent("clusterd"),
	)
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
	c.repoDigests = []string{fullRepository(ref.Context()) + "@" + desc.Digest.String()}
	img, err = s.addRemote(ctx, found, c)
	return img, true, err
}

// addRemote downloads the missing layers and adds the image.
func (s *Store) addRemote(ctx context.Context, found v1.Image, c content) (Image, error) {
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

	g, gctx := errgroup.WithContext(ctx)
	g.SetLimit(parallelDownloads)
	for i, l := range layers {
		if s.hasLayer(c.chains[i]) {
			continue
		}
		g.Go(func() error {
			if err := gctx.Err(); err != nil {
				return err
			}
			if err := s.download(l); err != nil {
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

// transport is new for each pull: connections to a registry are not worth
// keeping between pulls.
func (s *Store) transport() *http.Transport {
	return &http.Transport{
		Proxy:                 http.ProxyFromEnvironment,
		DialContext:           (&net.Dialer{Timeout: 10 * time.Second, KeepAlive: 30 * time.Second}).DialContext,
		ForceAttemptHTTP2:     true,
		MaxIdleConnsPerHost:   parallelDownloads,
		IdleConnTimeout:       30 * time.Second,
		TLSHandshakeTimeout:   10 * time.Second,
		ResponseHeaderTimeout: s.cfg.StallTimeout,
	}
}

// plainHTTPGuard refuses requests without TLS. The library falls back to them
// for every private address, which would let anybody between take TLS away.
type plainHTTPGuard struct {
	http.RoundTripper
	allowed []string
}

func (g plainHTTPGuard) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.URL.Scheme == "https" || isLoopback(r.URL.Hostname()) || slices.Contains(g.allowed, r.URL.Host) {
		return g.RoundTripper.RoundTrip(r)
	}
	return nil, ErrNoTLS
}

func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || strings.HasSuffix(host, ".localhost") || ip != nil && ip.IsLoopback()
}

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
