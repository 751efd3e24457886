package image

import (
	"context"
	"fmt"
	"io"
	"os"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/net/http/httpproxy"

	"github.com/clusterd/clusterd/agent/image/registry"
)

// worker does all that reads bytes of registries and archives: HTTP, JSON of
// manifests, gzip, zstd and tar. The store gives it files to write to and checks what it
// reports. Methods may be called concurrently.
type worker interface {
	// fetch asks a registry for the documents of an image. The caller closes the
	// result.
	fetch(ctx context.Context, req fetchRequest) (fetched, error)
	// inflate gives the archive that from holds, decompressed if need be.
	inflate(ctx context.Context, from io.Reader) (io.ReadCloser, error)
	// unpack writes a layer into an empty directory. It may leave the end of the
	// archive unread.
	unpack(ctx context.Context, archive io.Reader, req unpackRequest) (unpacked, error)
	// list says which images an archive of images has, and puts the layers of an OCI
	// layout as files into dir, an empty directory.
	list(ctx context.Context, archive *os.File, dir string, req listRequest) ([]listed, error)
	// dockerLayer gives one layer of an archive made by docker save.
	dockerLayer(ctx context.Context, archive *os.File, which dockerLayer) (io.ReadCloser, error)
	// close ends what runs and waits for it.
	close()
}

// fetchRequest is a pull from one place with one set of credentials.
type fetchRequest struct {
	Ref      string            `json:"ref"` // the full name, at the endpoint
	At       registry.Endpoint `json:"at"`  // without Auths
	Auth     Auth              `json:"auth"`
	Platform v1.Platform       `json:"platform"`
	Limits   Limits            `json:"limits"`
	Stall    time.Duration     `json:"stall"`
	Hurry    bool              `json:"hurry"` // others are asked if this one does not answer
	// Hosts say how hosts are connected to, by name.
	Hosts map[string]registry.Connection `json:"hosts,omitempty"`
	Proxy *httpproxy.Config              `json:"proxy,omitempty"`
}

// documents are what a registry has of an image.
type documents struct {
	// Chain are what the name stands for and what follows: indexes, if any, then the
	// manifest.
	Chain  [][]byte   `json:"chain"`
	Config []byte     `json:"config"`
	Layers []layerRef `json:"layers"` // of the manifest
}

// layerRef is a compressed layer as a manifest names it.
type layerRef struct {
	Digest v1.Hash `json:"digest"`
	Size   int64   `json:"size"`
}

// fetched is an image whose layers can be downloaded.
type fetched interface {
	documents() documents
	// receive downloads a layer into its part, behind what is there of it, checks the
	// digest, and sets p.came. notes are of interest to whoever reads the log.
	receive(ctx context.Context, layer int, p *part, how *progress) (notes []string, err error)
	close()
}

// unpackRequest is a layer to be unpacked.
type unpackRequest struct {
	dir    string   // where to; empty, root's alone
	lowers lowerDir // the layers below, topmost first
	limits Limits
	below  int64 // bytes of the layers below
	from   int64 // bytes of the archive as it came; 0: not known
}

// unpacked is a layer that was unpacked.
type unpacked struct {
	Size int64  `json:"size"` // bytes of its files
	Sum  string `json:"sum"`  // see sum
}

// listRequest is what of an archive of images is wanted.
type listRequest struct {
	Limits   Limits      `json:"limits"`
	Platform v1.Platform `json:"platform"`
}

// listed is an image of an archive.
type listed struct {
	Config   []byte   `json:"config"`
	Manifest []byte   `json:"manifest,omitempty"` // nil: it has none (docker save)
	Names    []string `json:"names,omitempty"`    // as they are in the archive
	// Digest is of what the name stands for: an index or the manifest; empty: none.
	Digest string        `json:"digest,omitempty"`
	Layers []listedLayer `json:"layers"`
}

// listedLayer is one of the two.
type listedLayer struct {
	File   string       `json:"file,omitempty"` // in the directory for layers
	Docker *dockerLayer `json:"docker,omitempty"`
}

// dockerLayer is a layer of an archive made by docker save.
type dockerLayer struct {
	Name string `json:"name"` // of its file in the archive
}

// localWorker works in this process.
type localWorker struct{}

func (localWorker) close() {}

func (localWorker) fetch(ctx context.Context, req fetchRequest) (fetched, error) {
	return startFetch(ctx, req)
}

func (localWorker) inflate(_ context.Context, from io.Reader) (io.ReadCloser, error) {
	return decompress(from)
}

func (localWorker) unpack(ctx context.Context, archive io.Reader, req unpackRequest) (unpacked, error) {
	return unpackLayer(ctx, archive, req, req.dir)
}

func (localWorker) list(_ context.Context, archive *os.File, dir string, req listRequest) ([]listed, error) {
	return listArchive(archive, dir, req)
}

func (localWorker) dockerLayer(_ context.Context, archive *os.File, which dockerLayer) (io.ReadCloser, error) {
	return openDockerLayer(archive, which)
}

// unpackLayer writes a layer. shown is the directory's name for errors.
func unpackLayer(ctx context.Context, archive io.Reader, req unpackRequest, shown string) (unpacked, error) {
	room := &budget{Limits: req.limits, below: req.below, from: req.from, dir: req.dir, shown: shown}
	if err := room.look(); err != nil {
		return unpacked{}, err
	}
	size, err := extract(ctx, archive, req.dir, req.lowers, room)
	if err != nil {
		return unpacked{}, err
	}
	fingerprint, err := sum(req.dir)
	if err != nil {
		return unpacked{}, fmt.Errorf("fingerprint: %w", err)
	}
	return unpacked{Size: size, Sum: fingerprint}, nil
}
