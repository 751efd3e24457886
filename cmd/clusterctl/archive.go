package main

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
)

// archive is a file of images that can be read several times over.
type archive struct {
	name    string // as shown to the user
	path    string
	size    int64
	gzipped bool
	temp    bool // ours to remove
}

// openArchive looks at the file and refuses what cannot be an image archive,
// before anything is sent. "-" is in, which is spooled, because each node needs
// the whole of it.
func openArchive(path string, in io.Reader) (_ *archive, err error) {
	a := &archive{name: filepath.Base(path), path: path}
	if path == "-" {
		a.name, a.temp = "standard input", true
		if a.path, err = spool(in); err != nil {
			return nil, fmt.Errorf("read standard input: %w", err)
		}
		defer func() {
			if err != nil {
				a.close()
			}
		}()
	}
	f, err := os.Open(a.path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.IsDir() {
		return nil, fmt.Errorf("%s is a folder; pack an OCI layout first: tar -C %s -cf image.tar .", path, path)
	}
	a.size = info.Size()
	start := bufio.NewReader(f)
	if a.gzipped, err = isGzip(start); err != nil {
		return nil, fmt.Errorf("read %s: %w", a.name, err)
	}
	var content io.Reader = start
	if a.gzipped {
		if content, err = gzip.NewReader(start); err != nil {
			return nil, fmt.Errorf("read %s: %w", a.name, err)
		}
	}
	if !isTar(content) {
		return nil, fmt.Errorf("%s is not an image archive: it should be a tar as docker save writes it, or of an OCI image layout", a.name)
	}
	return a, nil
}

func (a *archive) close() {
	if a.temp {
		_ = os.Remove(a.path)
	}
}

func spool(in io.Reader) (path string, err error) {
	f, err := os.CreateTemp("", "clusterctl-image-*.tar")
	if err != nil {
		return "", err
	}
	_, err = io.Copy(f, in)
	if err = errors.Join(err, f.Close()); err != nil {
		_ = os.Remove(f.Name())
		return "", err
	}
	return f.Name(), nil
}

func isGzip(r *bufio.Reader) (bool, error) {
	magic, err := r.Peek(2)
	if err != nil && !errors.Is(err, io.EOF) {
		return false, err
	}
	return bytes.Equal(magic, []byte{0x1f, 0x8b}), nil
}

// isTar looks for the magic of a tar header, which every writer of image
// archives sets.
func isTar(r io.Reader) bool {
	var header [512]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return false
	}
	return bytes.HasPrefix(header[257:], []byte("ustar"))
}

// tarReader reads an archive uncompressed.
type tarReader struct {
	io.Reader
	file *os.File
	size int64 // -1: not known beforehand
}

func (t *tarReader) Close() error { return t.file.Close() }

// tar opens the archive; sent is called with how much of the file has been read.
func (a *archive) tar(sent func(n int64)) (*tarReader, error) {
	f, err := os.Open(a.path)
	if err != nil {
		return nil, err
	}
	t := &tarReader{Reader: &counter{r: f, count: sent}, file: f, size: a.size}
	if !a.gzipped {
		return t, nil
	}
	if t.Reader, err = gzip.NewReader(t.Reader); err != nil {
		f.Close()
		return nil, fmt.Errorf("read %s: %w", a.name, err)
	}
	t.size = -1
	return t, nil
}

type counter struct {
	r     io.Reader
	n     int64
	count func(n int64)
}

func (c *counter) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	c.count(c.n)
	return n, err
}
