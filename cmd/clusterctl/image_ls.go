package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	"k8s.io/kubectl/pkg/util/templates"
)

// imageList is a node's answer to GET images.
type imageList struct {
	Images  []image   `json:"images"`
	Pulling []pulling `json:"pulling,omitempty"`
}

// pulling is an image that the node pulls now, and how far that is.
type pulling struct {
	Ref   string `json:"ref"`
	Done  int64  `json:"done"` // compressed bytes
	Total int64  `json:"total"`
}

type image struct {
	Refs []string `json:"refs"`
	ID   string   `json:"id"`
	Size int64    `json:"size"`
	// Pinned: the node keeps it when it makes room.
	Pinned bool `json:"pinned,omitempty"`
}

// nodeImageList is what -o json prints for one node.
type nodeImageList struct {
	Node    string    `json:"node"`
	Images  []image   `json:"images"`
	Pulling []pulling `json:"pulling,omitempty"`
}

func newImageListCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var choice nodeChoice
	var out output
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List the images on nodes",
		Example: templates.Examples(`
			# List the images of every node that is Ready, and where they are
			clusterctl image ls

			# List those of one node
			clusterctl image ls --node n1`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			return listImages(cmd.Context(), f, streams, &choice, out)
		},
	}
	choice.addFlags(cmd, f)
	cmd.Flags().StringVarP((*string)(&out), "output", "o", "", "One of: json, yaml")
	return cmd
}

func listImages(ctx context.Context, f cmdutil.Factory, streams genericiooptions.IOStreams, choice *nodeChoice, out output) error {
	a, nodes, err := choice.open(ctx, f, streams)
	if err != nil {
		return err
	}
	var mu sync.Mutex
	lists := []nodeImageList{}
	failed := onNodes(nodes, func(node string) error {
		var list imageList
		if err := a.do(ctx, http.MethodGet, nodeImages(node), nil, &list); err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		lists = append(lists, nodeImageList{Node: node, Images: list.Images, Pulling: list.Pulling})
		return nil
	})
	slices.SortFunc(lists, func(a, b nodeImageList) int { return cmp.Compare(a.Node, b.Node) })
	if len(lists) > 0 {
		show := map[string]any{"nodes": lists}
		if err := out.print(streams.Out, show, func(w io.Writer) error { return imageTable(w, lists) }); err != nil {
			return err
		}
	}
	for _, l := range lists {
		for _, p := range l.Pulling {
			fmt.Fprintf(streams.ErrOut, "%s: pulling %s, %s of %s\n", l.Node, p.Ref, size(p.Done), size(p.Total))
		}
	}
	return failed.err("list images")
}

// imageTable shows each image once, with the nodes that have it.
func imageTable(w io.Writer, lists []nodeImageList) error {
	type key struct{ ref, id string }
	type row struct {
		key
		size   int64
		nodes  []string
		pinned int // nodes on which it is
	}
	rows := map[key]*row{}
	for _, l := range lists {
		for _, img := range l.Images {
			refs := img.Refs
			if len(refs) == 0 {
				refs = []string{""}
			}
			for _, ref := range refs {
				k := key{ref, img.ID}
				if rows[k] == nil {
					rows[k] = &row{key: k, size: img.Size}
				}
				rows[k].nodes = append(rows[k].nodes, l.Node)
				if img.Pinned {
					rows[k].pinned++
				}
			}
		}
	}
	sorted := make([]*row, 0, len(rows))
	for _, r := range rows {
		sorted = append(sorted, r)
	}
	slices.SortFunc(sorted, func(a, b *row) int {
		return cmp.Or(cmp.Compare(a.ref, b.ref), cmp.Compare(a.id, b.id))
	})
	var cells [][]string
	for _, r := range sorted {
		where := strings.Join(r.nodes, ",")
		if len(lists) > 1 && len(r.nodes) == len(lists) {
			where = fmt.Sprintf("all %d", len(lists))
		}
		pinned := "-"
		switch r.pinned {
		case 0:
		case len(r.nodes):
			pinned = "yes"
		default:
			pinned = fmt.Sprintf("on %d", r.pinned)
		}
		cells = append(cells, []string{orNone(r.ref), shortID(r.id), size(r.size), pinned, where})
	}
	return printTable(w, []string{"IMAGE", "ID", "SIZE", "PINNED", "NODES"}, cells)
}
