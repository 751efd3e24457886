package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	"k8s.io/kubectl/pkg/util/templates"

	"github.com/clusterd/clusterd/apis/paths"
)

func newNetCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "net",
		Short: "Diagnose the node network",
		Run:   cmdutil.DefaultSubCommandRun(streams.ErrOut),
	}
	cmd.AddCommand(newNetDoctorCommand(f, streams))
	return cmd
}

func newNetDoctorCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var choice nodeChoice
	var out output
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Show the connectivity between all nodes, problems, and their fixes",
		Long: templates.LongDesc(`
			Show the connectivity between all nodes, problems, and their fixes.

			Nodes continuously measure the paths between them, from pod address to pod address:
			packet loss in each direction, round-trip time, path MTU, and whether a TCP stream
			passes. The table has a row for each measuring node, a column for each measured one,
			and in each cell the median round-trip time or the problem. For paths through
			WireGuard it also shows the time since the last handshake.

			The exit status is 1 if there is a problem or a node could not be reached.`),
		Example: templates.Examples(`
			# All nodes that are Ready
			clusterctl net doctor

			# The paths from one node, as JSON
			clusterctl net doctor --node n1 -o json`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			return netDoctor(cmd.Context(), f, streams, &choice, out)
		},
	}
	choice.addFlags(cmd, f)
	cmd.Flags().StringVarP((*string)(&out), "output", "o", "", "One of: json, yaml")
	return cmd
}

// netHealth is what -o json prints.
type netHealth struct {
	Nodes    []paths.Report  `json:"nodes"`
	Findings []paths.Finding `json:"findings"`
}

func netDoctor(ctx context.Context, f cmdutil.Factory, streams genericiooptions.IOStreams, choice *nodeChoice, out output) error {
	a, nodes, err := choice.open(ctx, f, streams)
	if err != nil {
		return err
	}
	var mu sync.Mutex
	health := netHealth{Nodes: []paths.Report{}, Findings: []paths.Finding{}}
	failed := onNodes(nodes, func(node string) error {
		var r paths.Report
		if err := a.do(ctx, http.MethodGet, "/api/v1/nodes/"+url.PathEscape(node)+"/proxy/paths", nil, &r); err != nil {
			return err
		}
		mu.Lock()
		defer mu.Unlock()
		health.Nodes = append(health.Nodes, r)
		health.Findings = append(health.Findings, paths.Findings(r)...)
		return nil
	})
	slices.SortFunc(health.Nodes, func(a, b paths.Report) int { return cmp.Compare(a.Node, b.Node) })
	slices.SortStableFunc(health.Findings, func(a, b paths.Finding) int {
		return cmp.Or(cmp.Compare(a.From, b.From), cmp.Compare(a.To, b.To))
	})
	if len(health.Nodes) > 0 {
		if err := out.print(streams.Out, health, func(w io.Writer) error { return health.table(w) }); err != nil {
			return err
		}
	}
	if err := failed.err("look at the network"); err != nil {
		return err
	}
	if n := len(health.Findings); n > 0 {
		return &partialError{fmt.Sprintf("%d of the ways between nodes %s", n, plural(n, "has a fault", "have faults"))}
	}
	return nil
}

func plural(n int, one, more string) string {
	if n == 1 {
		return one
	}
	return more
}

// widest is how many nodes a table of all of them is for.
const widest = 12

// table shows the ways, then each finding with its cure.
func (h netHealth) table(w io.Writer) error {
	names := h.names()
	switch {
	case len(names) == 1:
		fmt.Fprintf(w, "%s has no other node to reach.\n", names[0])
	case len(names) <= widest:
		if err := h.matrix(w, names); err != nil {
			return err
		}
	}
	if len(names) > 1 && len(h.Findings) == 0 {
		fmt.Fprintf(w, "\nNothing is wrong on %s.\n", h.counted())
	}
	for _, f := range h.Findings {
		fmt.Fprintf(w, "\n%s\n  %s\n", f, f.Cure)
	}
	return nil
}

// names are those of all nodes that measured or were measured.
func (h netHealth) names() []string {
	var out []string
	for _, r := range h.Nodes {
		out = append(out, r.Node)
		for _, p := range r.Paths {
			out = append(out, p.Peer)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// counted is how many ways were measured.
func (h netHealth) counted() string {
	measured, unknown := 0, 0
	for _, r := range h.Nodes {
		for _, p := range r.Paths {
			switch {
			case !p.Expected:
			case paths.Judge(p, paths.HeardWithin(len(r.Paths))) == paths.Unknown:
				unknown++
			default:
				measured++
			}
		}
	}
	text := fmt.Sprintf("%d ways", measured)
	if measured == 1 {
		text = "1 way"
	}
	if unknown > 0 {
		text += fmt.Sprintf("; %d were not measured yet", unknown)
	}
	return text
}

func (h netHealth) matrix(w io.Writer, names []string) error {
	var rows [][]string
	for _, r := range h.Nodes {
		row := []string{r.Node}
		for _, to := range names {
			row = append(row, cell(r, to))
		}
		rows = append(rows, row)
	}
	return printTable(w, append([]string{"FROM \\ TO"}, names...), rows)
}

// through is the tunnel of a way, with the age of its last handshake.
func through(p paths.Path) string {
	if p.WireGuard == nil || p.WireGuard.Handshake < 0 {
		return ""
	}
	return fmt.Sprintf(" (wireguard, %.0f s)", p.WireGuard.Handshake)
}

// cell is how a node reaches another, by both families where there are two.
func cell(r paths.Report, to string) string {
	if r.Node == to {
		return "-"
	}
	var words []string
	for _, p := range r.Paths {
		if p.Peer != to {
			continue
		}
		state := paths.Judge(p, paths.HeardWithin(len(r.Paths)))
		switch {
		case state == paths.OK:
			words = append(words, fmt.Sprintf("%.1f ms%s", p.RTT, through(p)))
		case !p.Expected && state != paths.Unknown:
			words = append(words, string(state)+" (not Ready)")
		case state == paths.Lossy:
			words = append(words, fmt.Sprintf("lossy %d%%", 100*p.Lost/p.Sent))
		case state == paths.Short:
			words = append(words, fmt.Sprintf("mtu %d", p.Carries))
		default:
			words = append(words, string(state))
		}
	}
	if len(words) == 0 {
		return "?"
	}
	return strings.Join(slices.Compact(words), ", ")
}
