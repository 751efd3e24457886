package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"

	"github.com/clusterd/clusterd/agent/image/registry"
)

func authenticator(a Auth) authn.Authenticator {
	if a == (Auth{}) {
		return authn.Anonymous
	}
	return authn.FromConfig(authn.AuthConfig{
		Username: a.Username, Password: a.Password,
		IdentityToken: a.IdentityToken, RegistryToken: a.RegistryToken,
	})
}

// fetch is a pull under way, in the process that speaks to the registry.
type fetch struct {
	req    fetchRequest
	docs   documents
	layers []v1.Layer
	parts  downloads

	ctx    context.Context // its end ends the requests
	cancel context.CancelCauseFunc
	hosts  *hostTransports
	guard  *schemeGuard
}

// startFetch takes as long as bytes come from the registry.
func startFetch(ctx context.Context, req fetchRequest) (_ *fetch, err error) {
	settings, err := registry.FromConnections(req.Hosts)
	if err != nil {
		return nil, err
	}
	options := []name.Option{name.WeakValidation}
	if req.At.PlainHTTP {
		options = append(options, name.Insecure)
	}
	ref, err := name.ParseReference(req.Ref, options...)
	if err != nil {
		return nil, err
	}
	f := &fetch{req: req}
	f.ctx, f.cancel = context.WithCancelCause(ctx)
	f.hosts = &hostTransports{settings: settings, timeout: req.Stall, proxy: req.Proxy}
	f.guard = &schemeGuard{next: aliveTransport{f.hosts, req.Stall, func() { f.cancel(ErrStalled) }}, settings: settings, at: req.At}
	defer func() {
		if err != nil {
			err = f.explain(err)
			f.close()
		}
	}()
	return f, f.read(ref)
}

// explain says what an error of the library means.
func (f *fetch) explain(err error) error {
	err = f.guard.explain(err)
	if errors.Is(context.Cause(f.ctx), ErrStalled) {
		err = fmt.Errorf("%w for %s", ErrStalled, f.req.Stall)
	}
	return err
}

// read gets the documents.
func (f *fetch) read(ref name.Reference) error {
	options := []remote.Option{
		remote.WithContext(f.ctx),
		remote.WithAuth(authenticator(f.req.Auth)),
		remote.WithTransport(manifestBound{resuming{namespaced{f.guard, f.req.At}, f.parts.part}, f.req.Limits.Manifest}),
		remote.WithPlatform(f.req.Platform),
		remote.WithUserAgent("clusterd"),
	}
	if f.req.Hurry {
		options = append(options, remote.WithRetryBackoff(remote.Backoff{Steps: 1}))
	}
	desc, err := remote.Get(ref, options...)
	if err != nil {
		return err
	}
	var found v1.Image
	if desc.MediaType.IsIndex() {
		ix, err := desc.ImageIndex()
		if err != nil {
			return err
		}
		if found, f.docs.Chain, err = choose(ix, f.req.Platform, 0); err != nil {
			return err
		}
	} else if found, err = desc.Image(); err != nil {
		return err
	}
	if err := f.req.Limits.manifest(found); err != nil {
		return err
	}
	if f.docs.Config, err = found.RawConfigFile(); err != nil {
		return fmt.Errorf("config: %w", err)
	}
	manifest, err := found.RawManifest()
	if err != nil {
		return err
	}
	f.docs.Chain = append(f.docs.Chain, manifest)
	if f.layers, err = found.Layers(); err != nil {
		return err
	}
	for _, l := range f.layers {
		d, err := l.Digest()
		if err != nil {
			return err
		}
		n, err := l.Size()
		if err != nil {
			return err
		}
		f.docs.Layers = append(f.docs.Layers, layerRef{d, n})
	}
	return nil
}

func (f *fetch) documents() documents { return f.docs }

func (f *fetch) close() {
	f.cancel(nil)
	f.hosts.CloseIdleConnections()
}

// receive implements fetched.
func (f *fetch) receive(ctx context.Context, layer int, p *part, how *progress) (notes []string, err error) {
	l := f.docs.Layers[layer]
	f.parts.set(l.Digest.Hex, p)
	again, err := receive(ctx, f.layers[layer], p, l, f.req.Limits, how)
	notes = again
	if p.rest != nil && errors.Is(err, ErrDigest) {
		notes = append(notes, "a layer is fetched from its first byte: with the part that was here it has another digest")
		how.done.Add(-p.came)
		p.have = 0
		if err = p.Truncate(0); err == nil {
			again, err = receive(ctx, f.layers[layer], p, l, f.req.Limits, how)
			notes = append(notes, again...)
		}
	}
	if err != nil {
		err = f.explain(err)
	}
	return notes, err
}

// check looks whether the documents are of one another, from the name to the config and
// the layers, by their digests: each is the one that the document above has for this
// platform. Of a name with a digest nothing else is taken, whatever the worker reports.
func (d documents) check(ref name.Reference, l Limits, platform v1.Platform) error {
	if len(d.Chain) == 0 || len(d.Chain) > maxIndexDepth+1 {
		return &badLayerError{fmt.Errorf("%d documents of an image", len(d.Chain))}
	}
	if want, ok := ref.(name.Digest); ok && digestOf(d.Chain[0]) != want.DigestStr() {
		return fmt.Errorf("%w: the registry sent %s", ErrDigest, digestOf(d.Chain[0]))
	}
	for _, doc := range d.Chain {
		if int64(len(doc)) > l.Manifest {
			return tooLarge("a manifest has more bytes than allowed", size(l.Manifest))
		}
		if err := elements("a manifest", doc); err != nil {
			return err
		}
	}
	last := len(d.Chain) - 1
	for i, doc := range d.Chain[:last] {
		index, err := v1.ParseIndexManifest(bytes.NewReader(doc))
		if err != nil {
			return &badLayerError{fmt.Errorf("index %s: %w", digestOf(doc), err)}
		}
		below := digestOf(d.Chain[i+1])
		if fitting := fit(index.Manifests, platform); len(fitting) == 0 || fitting[0].Digest.String() != below {
			return fmt.Errorf("%w: %s has another image than %s for %s", ErrDigest, digestOf(doc), below, platform)
		}
	}
	doc := d.Chain[last]
	manifest, err := v1.ParseManifest(bytes.NewReader(doc))
	if err != nil {
		return &badLayerError{fmt.Errorf("manifest %s: %w", digestOf(doc), err)}
	}
	if manifest.Config.Digest.String() != digestOf(d.Config) {
		return fmt.Errorf("%w: %s has another config than %s", ErrDigest, digestOf(doc), digestOf(d.Config))
	}
	if !slices.EqualFunc(d.Layers, manifest.Layers, func(a layerRef, b v1.Descriptor) bool { return a.Digest == b.Digest && a.Size == b.Size }) {
		return fmt.Errorf("%w: %s has other layers than those reported", ErrDigest, digestOf(doc))
	}
	return l.layers(d.Layers)
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
