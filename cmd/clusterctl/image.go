package main

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	"k8s.io/kubectl/pkg/util/templates"
)

func newImageCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	cmd := &cobra.Command{
		Use:     "image",
		Aliases: []string{"images"},
		Short:   "Load, preload, list, pin and remove images on nodes",
		Long: templates.LongDesc(`
			Load images onto nodes, list, pin and remove them. A loaded image needs no registry:
			pods use it unless their imagePullPolicy is Always.`),
		Run: cmdutil.DefaultSubCommandRun(streams.ErrOut),
	}
	cmd.AddCommand(newImageLoadCommand(f, streams), newImageListCommand(f, streams), newImagePruneCommand(f, streams))
	for _, c := range imageChanges {
		cmd.AddCommand(c.command(f, streams))
	}
	return cmd
}

// nodeChoice is which nodes a command speaks to.
type nodeChoice struct {
	names []string
	all   bool
}

func (c *nodeChoice) addFlags(cmd *cobra.Command, f cmdutil.Factory) {
	cmd.Flags().StringSliceVar(&c.names, "node", nil, "Node to contact; may be repeated (default: every Ready node)")
	cmd.Flags().BoolVar(&c.all, "all", false, "Contact every node, Ready or not")
	cmd.MarkFlagsMutuallyExclusive("node", "all")
	cmdutil.CheckErr(cmd.RegisterFlagCompletionFunc("node", func(cmd *cobra.Command, _ []string, toComplete string) ([]string, cobra.ShellCompDirective) {
		return completeFrom(f, nodeNames)(cmd, nil, toComplete)
	}))
}

// pick returns the nodes' names, sorted, and of those that were left out.
func (c *nodeChoice) pick(ctx context.Context, a *api) (picked, notReady []string, err error) {
	if len(c.names) > 0 {
		names := slices.Clone(c.names)
		slices.Sort(names)
		return slices.Compact(names), nil, nil
	}
	nodes, err := listNodes(ctx, a)
	if err != nil {
		return nil, nil, err
	}
	for i := range nodes {
		if c.all || nodeIsReady(&nodes[i]) {
			picked = append(picked, nodes[i].Name)
		} else {
			notReady = append(notReady, nodes[i].Name)
		}
	}
	if len(picked) == 0 {
		return nil, nil, fmt.Errorf("no node is Ready (%d are known); see: clusterctl get nodes", len(nodes))
	}
	return picked, notReady, nil
}

// open returns a client and the names of the nodes to speak to; it says which were
// left out.
func (c *nodeChoice) open(ctx context.Context, f cmdutil.Factory, streams genericiooptions.IOStreams) (*api, []string, error) {
	a, err := newAPI(f)
	if err != nil {
		return nil, nil, err
	}
	nodes, notReady, err := c.pick(ctx, a)
	if err == nil && len(notReady) > 0 {
		fmt.Fprintf(streams.ErrOut, "Left out because not Ready: %s (use --all to try them too)\n", strings.Join(notReady, ", "))
	}
	return a, nodes, err
}

func listNodes(ctx context.Context, a *api) ([]corev1.Node, error) {
	var list corev1.NodeList
	if err := a.do(ctx, http.MethodGet, "/api/v1/nodes", nil, &list); err != nil {
		return nil, fmt.Errorf("list the nodes: %w", err)
	}
	slices.SortFunc(list.Items, func(a, b corev1.Node) int { return cmp.Compare(a.Name, b.Name) })
	return list.Items, nil
}

func nodeNames(ctx context.Context, a *api) ([]string, error) {
	nodes, err := listNodes(ctx, a)
	var names []string
	for i := range nodes {
		names = append(names, nodes[i].Name)
	}
	return names, err
}

// nodeImages is the path of the images of a node, through the API server.
func nodeImages(node string) string {
	return "/api/v1/nodes/" + url.PathEscape(node) + "/proxy/images"
}

// maxNodesAtOnce bounds how many nodes are spoken to at the same time.
const maxNodesAtOnce = 4

// onNodes calls do for each node, some at a time, and returns the errors of
// those that failed, in the nodes' order.
func onNodes(nodes []string, do func(node string) error) *nodeErrors {
	errs := make([]error, len(nodes))
	slots := make(chan struct{}, maxNodesAtOnce)
	var wg sync.WaitGroup
	for i, node := range nodes {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			errs[i] = do(node)
		})
	}
	wg.Wait()
	failed := &nodeErrors{total: len(nodes)}
	for i, err := range errs {
		if err != nil {
			failed.nodes, failed.errs = append(failed.nodes, nodes[i]), append(failed.errs, err)
		}
	}
	return failed
}

// nodeErrors are the failures of an operation on several nodes.
type nodeErrors struct {
	total int
	nodes []string
	errs  []error
}

// err says what could not be done, and where; nil when nothing failed.
func (e *nodeErrors) err(what string) error {
	switch {
	case len(e.errs) == 0:
		return nil
	case e.total == 1:
		return fmt.Errorf("%s on node %s: %w", what, e.nodes[0], e.errs[0])
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s failed on %d of %d nodes:", what, len(e.errs), e.total)
	for i, node := range e.nodes {
		fmt.Fprintf(&b, "\n  %s: %v", node, e.errs[i])
	}
	fmt.Fprintf(&b, "\nTry these again with: --node %s", strings.Join(e.nodes, ","))
	return &partialError{b.String()}
}

// partialError is an error whose text needs no introduction.
type partialError struct{ text string }

func (e *partialError) Error() string { return e.text }
