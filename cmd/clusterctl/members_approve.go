package main

import (
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

func newMembersApproveCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var role string
	cmd := &cobra.Command{
		Use:   "approve CODE --role {agent|server}",
		Short: "Let a machine join that shows this code",
		Long: templates.LongDesc(`
			Let a machine join that has no token: it was started with "clusterd join ADDRESS
			--ask" and shows a code. Read the code from the machine itself, not from a message:
			it proves that the machine and the cluster speak with each other and with nobody
			in between.`),
		Example: templates.Examples(`
			# Let it join as an agent, which runs pods and holds nothing of the cluster
			clusterctl members approve 7K2M-Q9XA --role agent`),
		Args: oneArg("the code that the machine shows", "clusterctl members asking"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if role != v1.TokenAgent && role != v1.TokenServer {
				return fmt.Errorf("--role %q: say what the machine becomes: %s, which runs pods and holds nothing of the cluster, or %s, which holds all of it", role, v1.TokenAgent, v1.TokenServer)
			}
			a, err := newAPI(f)
			if err != nil {
				return err
			}
			in, err := jsonBody(v1.Approval{Code: args[0], Role: role})
			if err != nil {
				return err
			}
			var m v1.AskingMachine
			if err := a.do(cmd.Context(), http.MethodPost, pathOf("asking"), in, &m); err != nil {
				return fmt.Errorf("approve: %w", err)
			}
			fmt.Fprintf(streams.Out, "machine %q at %s may join as %s\n", m.Name, m.Addr, map[string]string{v1.TokenServer: "a server", v1.TokenAgent: "an agent"}[role])
			return nil
		},
	}
	cmd.Flags().StringVar(&role, "role", "", "What the machine becomes: agent or server")
	return cmd
}

func newMembersAskingCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:   "asking",
		Short: "List the machines that wait to be approved",
		Example: templates.Examples(`
			# List who waits
			clusterctl members asking`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			list := v1.AskingList{Machines: []v1.AskingMachine{}}
			return show(cmd.Context(), f, streams, out, "list the machines that ask to join", pathOf("asking"), &list, func() string {
				if len(list.Machines) == 0 {
					return "No machine waits; start one with: clusterd join ADDRESS --ask"
				}
				return ""
			}, func(w io.Writer) error {
				var rows [][]string
				for _, m := range list.Machines {
					rows = append(rows, []string{m.ID, m.Name, m.Addr, m.Peer, m.Version, age(m.Since, time.Now())})
				}
				return printTable(w, []string{"ID", "NAME", "ADDRESS", "SEEN FROM", "VERSION", "AGE"}, rows)
			})
		},
	}
	cmd.Flags().StringVarP((*string)(&out), "output", "o", "", "One of: json, yaml")
	return cmd
}

func newMembersDenyCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	return &cobra.Command{
		Use:   "deny ID",
		Short: "Send a machine away that waits to be approved",
		Example: templates.Examples(`
			# Send one away that clusterctl members asking lists
			clusterctl members deny 4xq2mw`),
		Args: oneArg("the id of a machine that waits", "clusterctl members asking"),
		RunE: func(cmd *cobra.Command, args []string) error {
			a, err := newAPI(f)
			if err != nil {
				return err
			}
			if err := a.do(cmd.Context(), http.MethodDelete, pathOf("asking", args[0]), nil, nil); err != nil {
				return fmt.Errorf("deny %s: %w", args[0], err)
			}
			fmt.Fprintf(streams.Out, "machine %q denied\n", args[0])
			return nil
		},
	}
}
