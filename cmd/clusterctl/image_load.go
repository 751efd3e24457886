package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	"k8s.io/kubectl/pkg/util/templates"
)

// loadedImages is a node's answer to POST images/load.
type loadedImages struct {
	Images []loadedImage `json:"images"`
}

type loadedImage struct {
	Ref    string `json:"ref"`
	Digest string `json:"digest"`
	Size   int64  `json:"size"`
}

func newImageLoadCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var choice nodeChoice
	cmd := &cobra.Command{
		Use:   "load FILE",
		Short: "Load the images of an archive onto nodes",
		Long: templates.LongDesc(`
			Load the images of an archive onto nodes. FILE is what docker save or
			podman save wrote, or an OCI image layout as a tar, compressed with gzip or
			not; - reads standard input.`),
		Example: templates.Examples(`
			# Load an image onto every Ready node
			docker save hello:1 -o hello.tar
			clusterctl image load hello.tar

			# Load it onto two nodes only
			clusterctl image load hello.tar --node n1,n2

			# Load from a pipe
			docker save hello:1 | clusterctl image load -`),
		Args: oneArg("the file of an image archive, as docker save writes it", ""),
		RunE: func(cmd *cobra.Command, args []string) error {
			archive, err := openArchive(args[0], streams.In)
			if err != nil {
				return err
			}
			defer archive.close()
			return loadImages(cmd.Context(), f, streams, archive, &choice)
		},
	}
	choice.addFlags(cmd, f)
	return cmd
}

func loadImages(ctx context.Context, f cmdutil.Factory, streams genericiooptions.IOStreams, archive *archive, choice *nodeChoice) error {
	a, nodes, err := choice.open(ctx, f, streams)
	if err != nil {
		return err
	}
	show := newProgress(streams.ErrOut, archive.name, archive.size, nodes)
	defer show.stop()
	report := loadReport{w: streams.Out}
	failed := onNodes(nodes, func(node string) error {
		start := time.Now()
		defer show.done(node)
		answer, err := loadImage(ctx, a, node, archive, show)
		if err != nil {
			return err
		}
		show.clear()
		return report.add(node, answer, time.Since(start))
	})
	show.stop()
	return failed.err("load " + archive.name)
}

// loadImage sends the archive to one node.
func loadImage(ctx context.Context, a *api, node string, archive *archive, show *progress) (*loadedImages, error) {
	tar, err := archive.tar(func(n int64) { show.sent(node, n) })
	if err != nil {
		return nil, err
	}
	defer tar.Close()
	var answer loadedImages
	in := &body{Reader: tar, contentType: "application/x-tar", size: tar.size}
	if err := a.do(ctx, http.MethodPost, nodeImages(node)+"/load", in, &answer); err != nil {
		if isCode(err, http.StatusNotFound) {
			err = fmt.Errorf("%w (is it a node of the cluster? see: clusterctl get nodes)", err)
		}
		return nil, err
	}
	if len(answer.Images) == 0 {
		return nil, fmt.Errorf("the node found no image in %s", archive.name)
	}
	return &answer, nil
}

// loadReport prints what each node has loaded, as soon as it has.
type loadReport struct {
	mu sync.Mutex
	w  io.Writer
}

func (r *loadReport) add(node string, answer *loadedImages, took time.Duration) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, image := range answer.Images {
		name := image.Ref
		if name == "" {
			name = image.Digest
		}
		if _, err := fmt.Fprintf(r.w, "%s: loaded %s (%s, %s) in %.1fs\n", node, name, shortID(image.Digest), size(image.Size), took.Seconds()); err != nil {
			return err
		}
	}
	return nil
}

// shortID is the beginning of a digest, enough to tell images apart.
func shortID(digest string) string {
	hex := strings.TrimPrefix(digest, "sha256:")
	return hex[:min(12, len(hex))]
}
