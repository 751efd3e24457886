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
		Short: "Approve a pending join request",
		Long: templates.LongDesc(`
			Approve the join request of a machine without a token: "clusterd join ADDRESS --ask"
			shows a code there. Read the code from the machine itself, not from a message: it
			proves that the machine is connected to this cluster and not to a man in the middle.`),
		Example: templates.Examples(`
			# Let it join as an agent, which runs pods and holds no state of the cluster
			clusterctl members approve 7K2M-Q9XA --role agent`),
		Args: oneArg("the code that the machine shows", "clusterctl members pending"),
		RunE: func(cmd *cobra.Command, args []string) error {
			if role != v1.TokenAgent && role != v1.TokenServer {
				return fmt.Errorf("--role %q: give the role of the machine: %s, which runs pods and holds no state of the cluster, or %s, which holds all of it", role, v1.TokenAgent, v1.TokenServer)
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
	cmd.Flags().StringVar(&role, "role", "", "Role of the machine: agent or server")
	return cmd
}

func newMembersPendingCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:   "pending",
		Short: "List pending join requests",
		Example: templates.Examples(`
			# List the machines that wait for approval
			clusterctl members pending`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			list := v1.AskingList{Machines: []v1.AskingMachine{}}
			return show(cmd.Context(), f, streams, out, "list pending join requests", pathOf("asking"), &list, func() string {
				if len(list.Machines) == 0 {
					return "No join request is pending; a machine sends one with: clusterd join ADDRESS --ask"
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

// newMembersAskingCommand is newMembersPendingCommand by the name it had before.
func newMembersAskingCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	cmd := newMembersPendingCommand(f, streams)
	cmd.Use, cmd.Hidden = "asking", true
	return cmd
}

func newMembersDenyCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	return &cobra.Command{
		Use:   "deny ID",
		Short: "Deny a pending join request",
		Example: templates.Examples(`
			# Deny a request that clusterctl members pending lists
			clusterctl members deny 4xq2mw`),
		Args: oneArg("the id of a pending request", "clusterctl members pending"),
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
