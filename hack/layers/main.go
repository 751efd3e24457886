// Command layers packs folders, each as a layer, into an image in an archive that
// "clusterctl image load" takes: what Debian's packages and a program are unpacked to.
// Owners, modes and links are those of the folders.
//
//	go run ./hack/layers -o busybox.tar -ref example.org/busybox:1 -cmd sh DIR...
//
// With -registry FOLDER it writes no archive but the image's files as the registry in
// Kubernetes' agnhost serves them, under the last part of the image's name.
package main

import (
	"archive/tar"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// path is where programs are looked for, as images of distributions have it.
const path = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

func main() {
	out := flag.String("o", "", "where the archive goes")
	ref := flag.String("ref", "", "the image's name")
	registry := flag.String("registry", "", "the folder of a registry, instead of an archive")
	arch := flag.String("arch", runtime.GOARCH, "the machine it is for, as Go names it")
	user := flag.String("user", "", "the user that its containers run as")
	entrypoint := flag.String("entrypoint", "", "its program and arguments, split at blanks")
	command := flag.String("cmd", "", "arguments of it, split at blanks")
	flag.Parse()
	config := v1.Config{User: *user, Entrypoint: strings.Fields(*entrypoint), Cmd: strings.Fields(*command), Env: []string{path}, WorkingDir: "/"}
	if err := run(*out, *registry, *ref, *arch, config, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "layers:", err)
		os.Exit(1)
	}
}

func run(out, registry, ref, arch string, config v1.Config, dirs []string) error {
	if (out == "") == (registry == "") || len(dirs) == 0 {
		return errors.New("usage: layers {-o FILE|-registry FOLDER} -ref NAME [flags] DIR...")
	}
	tag, err := name.NewTag(ref)
	if err != nil {
		return fmt.Errorf("-ref: %w", err)
	}
	img, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{OS: "linux", Architecture: arch, Config: config})
	if err != nil {
		return err
	}
	for _, dir := range dirs {
		info, err := os.Stat(dir)
		if err != nil {
			return err
		}
		if !info.IsDir() {
			return fmt.Errorf("%s: not a folder", dir)
		}
		layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
			r, w := io.Pipe()
			go func() { w.CloseWithError(write(w, dir)) }()
			return r, nil
		})
		if err != nil {
			return fmt.Errorf("pack %s: %w", dir, err)
		}
		if img, err = mutate.Append(img, mutate.Addendum{Layer: layer, History: v1.History{CreatedBy: "hack/layers"}}); err != nil {
			return err
		}
	}
	if registry != "" {
		return serve(filepath.Join(registry, filepath.Base(tag.RepositoryStr())), tag.TagStr(), img)
	}
	// Beside and renamed: a half written archive is never found.
	tmp := out + ".new"
	defer func() { _ = os.Remove(tmp) }()
	if err := tarball.WriteToFile(tmp, tag, img); err != nil {
		return fmt.Errorf("write %s: %w", out, err)
	}
	return os.Rename(tmp, out)
}

// serve writes the image's manifest, its blobs, and the tag as a file with a digest.
func serve(dir, tag string, img v1.Image) error {
	save := func(kind string, digest v1.Hash, body []byte) error {
		path := filepath.Join(dir, kind, digest.Algorithm, digest.Hex[:2], digest.Hex, "data")
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return err
		}
		return os.WriteFile(path, body, 0o644)
	}
	layers, err := img.Layers()
	if err != nil {
		return err
	}
	for _, layer := range layers {
		digest, err := layer.Digest()
		if err != nil {
			return err
		}
		r, err := layer.Compressed()
		if err != nil {
			return err
		}
		body, err := io.ReadAll(r)
		if err := errors.Join(err, r.Close()); err != nil {
			return err
		}
		if err := save("blobs", digest, body); err != nil {
			return err
		}
	}
	config, err := img.RawConfigFile()
	if err != nil {
		return err
	}
	name, err := img.ConfigName()
	if err != nil {
		return err
	}
	manifest, err := img.RawManifest()
	if err != nil {
		return err
	}
	digest, err := img.Digest()
	if err != nil {
		return err
	}
	if err := errors.Join(save("blobs", name, config), save("manifests", digest, manifest)); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(dir, "manifests", tag), []byte(digest.String()+"\n"), 0o644)
}

// write is the folder as an archive, without traces of the time.
func write(to io.Writer, dir string) error {
	w := tar.NewWriter(to)
	if err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, path)
		if err != nil || rel == "." {
			return err
		}
		return add(w, path, rel)
	}); err != nil {
		return err
	}
	return w.Close()
}

func add(w *tar.Writer, path, rel string) error {
	info, err := os.Lstat(path)
	if err != nil {
		return err
	}
	var link string
	if info.Mode()&fs.ModeSymlink != 0 {
		if link, err = os.Readlink(path); err != nil {
			return err
		}
	}
	from, err := tar.FileInfoHeader(info, link)
	if err != nil {
		return err
	}
	h := &tar.Header{Typeflag: from.Typeflag, Name: rel, Linkname: link, Mode: from.Mode, Size: from.Size, ModTime: time.Unix(0, 0), Format: tar.FormatPAX}
	if stat, ok := info.Sys().(*syscall.Stat_t); ok {
		h.Uid, h.Gid = int(stat.Uid), int(stat.Gid)
	}
	if info.IsDir() {
		h.Name += "/"
	}
	if err := w.WriteHeader(h); err != nil || !info.Mode().IsRegular() {
		return err
	}
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = io.Copy(w, f)
	return err
}
