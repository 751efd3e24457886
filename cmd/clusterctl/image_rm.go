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
			Remove a name of an image from nodes, and with its last name the image. A node whose
			pods or containers use the image keeps it and reports them.`,
		example: `
			# Remove an image from every Ready node
			clusterctl image rm hello:1

			# Remove it from one node, by its ID
			clusterctl image rm sha256:5f0c… --node n1`,
		method: http.MethodDelete, path: "", what: "remove image", done: "removed",
	},
	{
		use: "preload IMAGE", short: "Pull an image to nodes before a pod needs it",
		long: `
			Let nodes pull an image from its registry, with the credentials that the nodes have
			for it, so that pods with this image start at once. All pods of the node may use it
			then. image ls shows the progress; the pull ends with this command. Garbage
			collection removes the image like any other unused one: see image pin.`,
		example: `
			# Pull an image to every Ready node
			clusterctl image preload registry.example.com/app:2

			# Pull it to two nodes
			clusterctl image preload registry.example.com/app:2 --node n1,n2`,
		method: http.MethodPost, path: "/preload", what: "preload image", done: "preloaded",
	},
	{
		use: "pin IMAGE", short: "Protect an image on nodes from garbage collection",
		long: `
			Protect an image on nodes: neither garbage collection nor image prune removes it.
			Images that were loaded from a file are pinned from the start.`,
		example: `
			# Pin an image on every Ready node
			clusterctl image pin registry.example.com/base:12`,
		method: http.MethodPut, path: "/pin", what: "pin image", done: "pinned",
	},
	{
		use: "unpin IMAGE", short: "Allow garbage collection of an image again",
		long: `
			Allow nodes to remove an image when the disk fills and no pod needs it. An image that
			was loaded from a file is then lost, unless a registry has it too.`,
		example: `
			# Unpin an image
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
			Remove the images from nodes that none of their pods needs. Pinned images and those
			that were loaded from a file stay.`),
		Example: templates.Examples(`
			# On every Ready node
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
