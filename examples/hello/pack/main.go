// Command pack builds a Go program and packs it as an image, in an archive that
// "clusterctl image load" takes. It needs the Go tool and nothing else. The same
// source gives the same bytes.
//
//	go run ./examples/hello/pack -o bin/hello.tar
//	go run ./examples/hello/pack -src ./examples/operator -ref clusterd.local/operator:1 -o bin/operator.tar
package main

import (
	"archive/tar"
	"bytes"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

func main() {
	out := flag.String("o", "bin/hello.tar", "where the archive goes")
	ref := flag.String("ref", "clusterd.local/hello:1", "the image's name")
	dir := flag.String("src", "./examples/hello", "the program's package")
	arch := flag.String("arch", runtime.GOARCH, "the machine it is for, as Go names it")
	set := flag.String("set", "", "a variable of the program and its value: main.version=v1")
	flag.Parse()
	if err := run(*out, *ref, *dir, *arch, *set); err != nil {
		fmt.Fprintln(os.Stderr, "pack:", err)
		os.Exit(1)
	}
}

func run(out, ref, src, arch, set string) error {
	tag, err := name.NewTag(ref)
	if err != nil {
		return err
	}
	bin, err := compile(src, arch, set)
	if err != nil {
		return err
	}
	img, err := image(filepath.Base(src), bin, arch)
	if err != nil {
		return fmt.Errorf("make the image: %w", err)
	}
	if err := os.MkdirAll(filepath.Dir(out), 0o755); err != nil {
		return err
	}
	// Beside and renamed: a half written archive is never found.
	tmp := out + ".new"
	defer func() { _ = os.Remove(tmp) }()
	if err := tarball.WriteToFile(tmp, tag, img); err != nil {
		return fmt.Errorf("write %s: %w", out, err)
	}
	if err := os.Rename(tmp, out); err != nil {
		return err
	}
	id, err := img.ConfigName()
	if err != nil {
		return err
	}
	fmt.Printf("%s: %s, %.1f MB, %s\n", out, ref, float64(len(bin))/1e6, id)
	return nil
}

// compile builds a static program without traces of time and place.
func compile(src, arch, set string) ([]byte, error) {
	tmp, err := os.MkdirTemp("", "pack-")
	if err != nil {
		return nil, err
	}
	defer func() { _ = os.RemoveAll(tmp) }()
	bin := filepath.Join(tmp, "program")
	flags := "-s -w -buildid="
	if set != "" {
		flags += " -X " + set
	}
	cmd := exec.Command("go", "build", "-trimpath", "-buildvcs=false", "-ldflags="+flags, "-o", bin, src)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch)
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("build %s: %w", src, err)
	}
	return os.ReadFile(bin)
}

// image holds the program and the few files that make a root file system.
func image(program string, bin []byte, arch string) (v1.Image, error) {
	archive, err := rootfs(program, bin)
	if err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(archive)), nil })
	if err != nil {
		return nil, err
	}
	img, err := mutate.ConfigFile(empty.Image, &v1.ConfigFile{
		OS: "linux", Architecture: arch,
		Config: v1.Config{
			Entrypoint:   []string{"/" + program},
			Env:          []string{"PATH=/"},
			User:         "65532:65532",
			WorkingDir:   "/",
			ExposedPorts: map[string]struct{}{"8080/tcp": {}},
			Labels:       map[string]string{"org.opencontainers.image.title": program, "org.opencontainers.image.description": "an example of clusterd's"},
		},
	})
	if err != nil {
		return nil, err
	}
	return mutate.Append(img, mutate.Addendum{Layer: layer, History: v1.History{CreatedBy: "examples/hello/pack"}})
}

func rootfs(program string, bin []byte) ([]byte, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range []struct {
		name string
		mode int64
		body string
	}{
		{"etc/", 0o755, ""},
		{"etc/passwd", 0o644, fmt.Sprintf("root:x:0:0:root:/:/%[1]s\n%[1]s:x:65532:65532:%[1]s:/:/%[1]s\n", program)},
		{"etc/group", 0o644, fmt.Sprintf("root:x:0:\n%s:x:65532:\n", program)},
		{"tmp/", 0o1777, ""},
		{program, 0o755, string(bin)},
	} {
		h := &tar.Header{Name: e.name, Mode: e.mode, Size: int64(len(e.body)), Typeflag: tar.TypeReg, ModTime: time.Unix(0, 0), Format: tar.FormatPAX}
		if e.name[len(e.name)-1] == '/' {
			h.Typeflag = tar.TypeDir
		}
		if err := w.WriteHeader(h); err != nil {
			return nil, err
		}
		if _, err := io.WriteString(w, e.body); err != nil {
			return nil, err
		}
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return b.Bytes(), nil
}
