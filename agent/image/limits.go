package image

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
)

// ErrTooLarge is returned when an image, or a part of it, is over one of the
// Limits.
var ErrTooLarge = errors.New("too large")

// Limits bound what one image may cost this node, whatever its registry says
// of it. A zero field is the default.
type Limits struct {
	// Manifest and Config bound the bytes of each manifest, index and config:
	// they are held in memory. Default 4 MiB each.
	Manifest, Config int64
	// Layers is how many an image may have. Default 500, as overlayfs has it.
	Layers int
	// Download bounds the compressed bytes of all layers. Default 64 GiB.
	Download int64
	// Unpacked bounds the bytes of the files of all layers. Default 128 GiB.
	Unpacked int64
	// Files is how many entries the archive of a layer may have. Default 2^20.
	Files int64
	// Ratio is how many times larger than its archive as it was downloaded a
	// layer may become; what is below RatioFrom bytes may do as it likes.
	// Defaults 250 and 512 MiB.
	Ratio, RatioFrom int64
	// Free is what downloads and unpacking leave on the disk, which others need
	// too. Default 512 MiB, or 5 % of the disk where this is less. Of the disk's
	// inodes, where it has a number of them, 5 % are left.
	Free int64
}

// withDefaults fills in what is zero.
func (l Limits) withDefaults() Limits {
	set := func(field *int64, n int64) {
		if *field == 0 {
			*field = n
		}
	}
	set(&l.Manifest, 4<<20)
	set(&l.Config, 4<<20)
	set(&l.Download, 64<<30)
	set(&l.Unpacked, 128<<30)
	set(&l.Files, 1<<20)
	set(&l.Ratio, 250)
	set(&l.RatioFrom, 512<<20)
	set(&l.Free, 512<<20)
	if l.Layers == 0 {
		l.Layers = 500
	}
	return l
}

// tooLarge says which part of an image is over which limit.
func tooLarge(what string, limit string) error {
	return fmt.Errorf("%w: %s, the limit is %s", ErrTooLarge, what, limit)
}

// size writes bytes for people.
func size(n int64) string {
	units := []string{"bytes", "KiB", "MiB", "GiB", "TiB"}
	i := 0
	for ; i < len(units)-1 && n >= 1<<10 && n%(1<<10) == 0; i++ {
		n >>= 10
	}
	return fmt.Sprintf("%d %s", n, units[i])
}

// maxElements bounds the commas of a document: two bytes of it, {}, may take a hundred
// bytes in memory.
const maxElements = 1 << 16

// elements is asked before a document is parsed.
func elements(what string, doc []byte) error {
	if bytes.Count(doc, []byte{','}) > maxElements {
		return tooLarge(what+" has more elements than allowed", fmt.Sprintf("%d commas", maxElements))
	}
	return nil
}

// manifest checks what a manifest announces before any of it is fetched.
func (l Limits) manifest(img v1.Image) error {
	m, err := img.Manifest()
	if err != nil {
		return err
	}
	// A size below zero would mean "unknown" to the library, and no bound.
	if m.Config.Size < 0 {
		return &badLayerError{fmt.Errorf("the manifest announces a config of %d bytes", m.Config.Size)}
	}
	if m.Config.Size > l.Config {
		return tooLarge(fmt.Sprintf("the config has %d bytes", m.Config.Size), size(l.Config))
	}
	layers := make([]layerRef, len(m.Layers))
	for i, d := range m.Layers {
		layers[i].Size = d.Size
	}
	return l.layers(layers)
}

// layers checks how many layers there are, and what is to be downloaded of them.
func (l Limits) layers(all []layerRef) error {
	if len(all) > l.Layers {
		return tooLarge(fmt.Sprintf("the image has %d layers", len(all)), fmt.Sprint(l.Layers))
	}
	left := l.Download
	for i, layer := range all {
		if layer.Size < 0 {
			return &badLayerError{fmt.Errorf("the manifest announces layer %d with %d bytes", i+1, layer.Size)}
		}
		if left -= layer.Size; left < 0 {
			return tooLarge(fmt.Sprintf("layers 1 to %d have more than that to download", i+1), size(l.Download)+" for all layers")
		}
	}
	return nil
}

// budget is what one layer may still take.
type budget struct {
	Limits
	below int64 // bytes of the layers below
	from  int64 // bytes of the archive as it came; 0: unknown, no ratio
	dir   string
	shown string // the directory's name for errors; empty: dir

	bytes, files int64 // so far
	names        int64 // bytes of the names that have to be remembered
	checked      int64 // bytes when the disk was last looked at
}

// maxNames bounds the names of directories of one layer: they are held in memory
// until it is unpacked.
const maxNames = 128 << 20

// entry takes one entry of the archive.
func (b *budget) entry(remembered string) error {
	if b.files++; b.files > b.Files {
		return tooLarge("the layer has more entries than allowed", fmt.Sprint(b.Files))
	}
	if b.names += int64(len(remembered)); b.names > maxNames {
		return tooLarge("the names of the layer's folders take more memory than allowed", size(maxNames))
	}
	if b.files%freeFiles == 0 { // a file takes an inode, and need not have a byte
		return b.look()
	}
	return nil
}

// write takes n more bytes of a file, before they are written.
func (b *budget) write(n int) error {
	b.bytes += int64(n)
	if b.below+b.bytes > b.Unpacked {
		return tooLarge("unpacked, the image takes more than allowed", size(b.Unpacked)+" for all layers")
	}
	if b.from > 0 && b.bytes > b.RatioFrom && b.bytes/b.Ratio > b.from {
		return tooLarge(fmt.Sprintf("a layer of %d bytes becomes more than %d bytes", b.from, b.bytes-int64(n)),
			fmt.Sprintf("%d times its size beyond %s", b.Ratio, size(b.RatioFrom)))
	}
	if b.bytes-b.checked >= freeEvery {
		b.checked = b.bytes
		return b.look()
	}
	return nil
}

// look fails when the disk has no more to give.
func (b *budget) look() error {
	var st unix.Statfs_t
	if err := unix.Statfs(b.dir, &st); err != nil {
		return fmt.Errorf("statfs %s: %w", b.dir, err)
	}
	return b.left(&st, cmp.Or(b.shown, b.dir))
}

// freeEvery is after how many bytes the disk is looked at again.
const freeEvery = 32 << 20

// freeFiles is after how many files it is.
const freeFiles = 4096

// left fails when a disk with these figures has no more to give. dir is on it.
func (l Limits) left(st *unix.Statfs_t, dir string) error {
	keep := min(l.Free, int64(st.Blocks)*st.Bsize/20)
	if have := int64(st.Bavail) * st.Bsize; have < keep {
		return fmt.Errorf("%w: %d bytes are left on the disk of %s, and %d are kept for the rest of the node: remove images, or give it a larger disk", unix.ENOSPC, have, dir, keep)
	}
	return freeInodes(dir, int64(st.Files), int64(st.Ffree))
}

func freeInodes(dir string, all, left int64) error {
	if keep := all / 20; left < keep { // 0 of 0: the file system has no such number
		return fmt.Errorf("%w: %d of %d inodes are left on the disk of %s, and %d are kept for the rest of the node: remove images, or make the disk's file system with more inodes", unix.ENOSPC, left, all, dir, keep)
	}
	return nil
}

// budgetWriter asks the budget before it writes.
type budgetWriter struct {
	w io.Writer
	b *budget
}

func (w budgetWriter) Write(p []byte) (int, error) {
	if err := w.b.write(len(p)); err != nil {
		return 0, err
	}
	return w.w.Write(p)
}

// freeWriter looks at the disk of f every freeEvery bytes.
type freeWriter struct {
	w     io.Writer
	l     Limits
	f     *os.File
	since int64
}

func (w *freeWriter) Write(p []byte) (int, error) {
	if w.since += int64(len(p)); w.since >= freeEvery {
		w.since = 0
		var st unix.Statfs_t
		if err := unix.Fstatfs(int(w.f.Fd()), &st); err != nil {
			return 0, fmt.Errorf("statfs %s: %w", w.f.Name(), err)
		}
		if err := w.l.left(&st, w.f.Name()); err != nil {
			return 0, err
		}
	}
	return w.w.Write(p)
}

// bounded reads at most limit bytes; more is an error.
type bounded struct {
	io.ReadCloser
	left int64
	err  error
}

func (b *bounded) Read(p []byte) (int, error) {
	if int64(len(p)) > b.left+1 {
		p = p[:b.left+1]
	}
	n, err := b.ReadCloser.Read(p)
	if b.left -= int64(n); b.left < 0 {
		return 0, b.err
	}
	return n, err
}

// manifestBound bounds answers to requests for manifests, also where the
// registry sends the client on to another address.
type manifestBound struct {
	http.RoundTripper
	limit int64
}

func (m manifestBound) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := m.RoundTripper.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	if strings.Contains(firstRequest(r).URL.Path, "/manifests/") {
		resp.Body = &bounded{resp.Body, m.limit, tooLarge("a manifest has more bytes than allowed", size(m.limit))}
	}
	return resp, nil
}
