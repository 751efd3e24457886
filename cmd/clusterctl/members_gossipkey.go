package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	"k8s.io/kubectl/pkg/util/templates"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
)

func newGossipKeyCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:   "gossip-key",
		Short: "Show or rotate the gossip encryption key",
		Long: templates.LongDesc(`
			Show the age of the gossip encryption key, and which servers have it. It is rotated
			automatically: each day (--gossip-key-age of clusterd), when a server is removed or
			demoted, and at the end of clusterctl ca rotate.`),
		Example: templates.Examples(`
			# Show its age
			clusterctl members gossip-key

			# List the servers that lag behind the current key
			clusterctl members gossip-key -o json | jq -r '.servers[] | select(.ready | not) | .name'`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var status v1.GossipKeyStatus
			return show(cmd.Context(), f, streams, out, "show the gossip key", pathOf("gossip-key"), &status, nil, func(w io.Writer) error { return gossipKeyTable(w, status, time.Now()) })
		},
	}
	cmd.Flags().StringVarP((*string)(&out), "output", "o", "", "One of: json, yaml")
	cmd.AddCommand(newGossipKeyRotateCommand(f, streams))
	return cmd
}

func gossipKeyTable(w io.Writer, s v1.GossipKeyStatus, now time.Time) error {
	age := "the cluster's first key"
	if !s.Used.IsZero() {
		age = fmt.Sprintf("in use for %s", now.Sub(s.Used).Round(time.Second))
	}
	fmt.Fprintf(w, "Phase: %s\nKey: %s (generation %d)\n\n", gossipKeyPhase(s), age, s.Generation)
	var rows [][]string
	for _, m := range s.Servers {
		state := "ready"
		if !m.Ready {
			state = "lags"
		}
		rows = append(rows, []string{m.Name, state})
	}
	return printTable(w, []string{"SERVER", "STATE"}, rows)
}

func gossipKeyPhase(s v1.GossipKeyStatus) string {
	if s.Wanted && s.Phase == "stable" {
		return "stable; rotation requested"
	}
	return s.Phase
}

func newGossipKeyRotateCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var wait bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "rotate",
		Short: "Rotate the gossip encryption key",
		Long: templates.LongDesc(`
			Rotate the gossip encryption key online: the servers receive a new key, then encrypt
			with it, then forget the old one. It takes some seconds. It does not wait for a server
			that is down: that one fetches the key when it comes back.`),
		Example: templates.Examples(`
			# After a possible compromise
			clusterctl members gossip-key rotate --wait`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a, err := newAPI(f)
			if err != nil {
				return err
			}
			var status v1.GossipKeyStatus
			if err := a.do(cmd.Context(), http.MethodGet, pathOf("gossip-key"), nil, &status); err != nil {
				return err
			}
			before := status.Generation
			if status.Phase == "distribute" { // to one that will be replaced
				before++
			}
			if err := a.do(cmd.Context(), http.MethodPost, pathOf("gossip-key"), nil, &status); err != nil {
				return err
			}
			if !wait {
				fmt.Fprintln(streams.Out, "The gossip key is being rotated: see clusterctl members gossip-key.")
				return nil
			}
			if err := awaitGossipKey(cmd.Context(), a, before, timeout); err != nil {
				return err
			}
			fmt.Fprintln(streams.Out, "The gossip key was rotated.")
			return nil
		},
	}
	cmd.Flags().BoolVar(&wait, "wait", false, "Wait until the old key is forgotten")
	cmd.Flags().DurationVar(&timeout, "timeout", 5*time.Minute, "How long to wait")
	return cmd
}

// awaitGossipKey waits for the end of a change that began after the generation.
func awaitGossipKey(ctx context.Context, a *api, before uint64, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for {
		var s v1.GossipKeyStatus
		err := a.do(ctx, http.MethodGet, pathOf("gossip-key"), nil, &s)
		if err == nil && s.Phase == "stable" && !s.Wanted && s.Generation > before {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("after %s it is in the phase %s: see clusterctl members gossip-key", timeout, gossipKeyPhase(s))
		case <-time.After(500 * time.Millisecond):
		}
	}
}
