package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"sync"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	"k8s.io/kubectl/pkg/util/templates"
)

// imageChange is a command that does something with one image on nodes.
type imageChange struct {
	use, short, long, example string
	method, path              string
	what, done                string // "remove image" and "removed"
}

var imageChanges = []imageChange{
	{
		use: "rm IMAGE", short: "Remove an image from nodes",
		long: `
			Remove an image's name from nodes, and with its last name the image. A node
			whose pods name the image, or have it below a container, keeps it and says which.`,
		example: `
			# Remove an image from every node that is Ready
			clusterctl image rm hello:1

			# Remove it from one node, by its ID
			clusterctl image rm sha256:5f0c… --node n1`,
		method: http.MethodDelete, path: "", what: "remove image", done: "removed",
	},
	{
		use: "preload IMAGE", short: "Have nodes pull an image before a pod asks for it",
		long: `
			Have nodes pull an image from its registry, with the credentials of their own that
			they have for it, so that pods which name it start at once. All pods of the node may
			have it then. What is under way is in image ls; a pull ends with the command that
			asked for it. A node that makes room removes the image as any other that no pod
			uses: see image pin.`,
		example: `
			# Have every node that is Ready pull an image
			clusterctl image preload registry.example.com/app:2

			# Have two nodes pull it
			clusterctl image preload registry.example.com/app:2 --node n1,n2`,
		method: http.MethodPost, path: "/preload", what: "preload image", done: "preloaded",
	},
	{
		use: "pin IMAGE", short: "Keep an image on nodes when they make room",
		long: `
			Keep an image on nodes: neither the collection of images that nothing uses nor
			image prune removes it. Images that were loaded from a file are pinned from the start.`,
		example: `
			# Keep an image on every node that is Ready
			clusterctl image pin registry.example.com/base:12`,
		method: http.MethodPut, path: "/pin", what: "pin image", done: "pinned",
	},
	{
		use: "unpin IMAGE", short: "Let an image go when nodes make room",
		long: `
			Let nodes remove an image when they make room and no pod needs it. One that was
			loaded from a file is gone for good then, unless a registry has it too.`,
		example: `
			# Do no longer keep an image
			clusterctl image unpin registry.example.com/base:12`,
		method: http.MethodDelete, path: "/pin", what: "unpin image", done: "unpinned",
	},
}

func (c imageChange) command(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var choice nodeChoice
	cmd := &cobra.Command{
		Use: c.use, Short: c.short, Long: templates.LongDesc(c.long), Example: templates.Examples(c.example),
		Args: oneArg("the name of an image", "clusterctl image ls"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return eachNode(cmd.Context(), f, streams, &choice, c.what+" "+args[0], func(ctx context.Context, a *api, node string) (string, error) {
				path := nodeImages(node) + c.path + "?name=" + url.QueryEscape(args[0])
				return fmt.Sprintf("image %q %s", args[0], c.done), a.do(ctx, c.method, path, nil, nil)
			})
		},
	}
	choice.addFlags(cmd, f)
	return cmd
}

func newImagePruneCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var choice nodeChoice
	cmd := &cobra.Command{
		Use:   "prune",
		Short: "Remove unused images from nodes",
		Long: templates.LongDesc(`
			Remove from nodes the images that none of their pods needs. Pinned images stay,
			and so do those that were loaded from a file.`),
		Example: templates.Examples(`
			# Make room on every node that is Ready
			clusterctl image prune

			# On one node
			clusterctl image prune --node n1`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return eachNode(cmd.Context(), f, streams, &choice, "prune images", func(ctx context.Context, a *api, node string) (string, error) {
				var gone imageList
				if err := a.do(ctx, http.MethodPost, nodeImages(node)+"/prune", nil, &gone); err != nil {
					return "", err
				}
				var bytes int64
				for _, i := range gone.Images {
					bytes += i.Size
				}
				if len(gone.Images) == 0 {
					return "nothing to remove", nil
				}
				return fmt.Sprintf("%d %s removed, %s freed", len(gone.Images), plural(len(gone.Images), "image", "images"), size(bytes)), nil
			})
		},
	}
	choice.addFlags(cmd, f)
	return cmd
}

// eachNode does something on the chosen nodes, and says of each what was done.
func eachNode(ctx context.Context, f cmdutil.Factory, streams genericiooptions.IOStreams, choice *nodeChoice, what string, do func(ctx context.Context, a *api, node string) (string, error)) error {
	a, nodes, err := choice.open(ctx, f, streams)
	if err != nil {
		return err
	}
	var mu sync.Mutex
	var said []string
	failed := onNodes(nodes, func(node string) error {
		text, err := do(ctx, a, node)
		if err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		said = append(said, fmt.Sprintf("%s: %s\n", node, text))
		return nil
	})
	slices.Sort(said)
	for _, line := range said {
		if _, err := io.WriteString(streams.Out, line); err != nil {
			return err
		}
	}
	return failed.err(what)
}
