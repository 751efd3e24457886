package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	"k8s.io/kubectl/pkg/util/templates"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
)

func newMembersCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:     "members",
		Aliases: []string{"member"},
		Short:   "List, change and remove the members of the cluster",
		Long: templates.LongDesc(`
			List the members of the cluster: their role in the store (agents have none), the
			leader, and their gossip state.

			The list is what the contacted server knows, so it works while the cluster has no
			leader.`),
		Example: templates.Examples(`
			# List the members
			clusterctl members

			# Print the name of the leader
			clusterctl members -o json | jq -r .leader

			# Remove a machine that will not come back
			clusterctl members rm n3`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			return listMembers(cmd.Context(), f, streams, out)
		},
	}
	cmd.Flags().StringVarP((*string)(&out), "output", "o", "", "One of: json, yaml")
	cmd.AddCommand(newMembersRemoveCommand(f, streams), newMembersRoleCommand(f, streams, promote), newMembersRoleCommand(f, streams, demote), newMembersVotersCommand(f, streams),
		newMembersPendingCommand(f, streams), newMembersAskingCommand(f, streams), newMembersApproveCommand(f, streams), newMembersDenyCommand(f, streams), newGossipKeyCommand(f, streams))
	return cmd
}

func listMembers(ctx context.Context, f cmdutil.Factory, streams genericiooptions.IOStreams, out output) error {
	var list v1.MemberList
	a, err := newAPI(f)
	if err != nil {
		return err
	}
	if err := a.do(ctx, http.MethodGet, pathOf("members"), nil, &list); err != nil {
		return err
	}
	slices.SortFunc(list.Members, func(a, b v1.Member) int { return cmp.Compare(a.Name, b.Name) })
	if err := out.print(streams.Out, list, func(w io.Writer) error { return memberTable(w, list) }); err != nil {
		return err
	}
	if out != "" {
		return nil
	}
	if list.Leader == "" {
		fmt.Fprintln(streams.ErrOut, leaderless(list))
	}
	for _, w := range list.Warnings {
		fmt.Fprintln(streams.ErrOut, "Warning:", w)
	}
	return nil
}

func memberTable(w io.Writer, l v1.MemberList) error {
	var rows [][]string
	for _, m := range l.Members {
		role := m.Role
		if m.Leader {
			role += " (leader)"
		}
		rows = append(rows, []string{m.Name, orNone(role), orNone(m.Address), orNone(gossipState(m.Gossip)), known(m.Applied), known(m.Lag), orNone(m.Version)})
	}
	return printTable(w, []string{"NAME", "ROLE", "ADDRESS", "GOSSIP", "APPLIED", "LAG", "VERSION"}, rows)
}

// gossipState is the state of a member as the table shows it.
func gossipState(s string) string {
	switch s {
	case "unseen":
		return "unknown"
	case "changing":
		return "demoting"
	}
	return s
}

// leaderless says why there may be no leader and what to do about it.
func leaderless(l v1.MemberList) string {
	voters, alive := 0, 0
	for _, m := range l.Members {
		if m.Role == v1.RoleVoter {
			voters++
			if m.Gossip == "alive" {
				alive++
			}
		}
	}
	need := voters/2 + 1
	if alive < need {
		return fmt.Sprintf("No leader: %d of %d voters are alive and %d are needed. Start clusterd on the others; nothing can be changed until then. If they are permanently lost: clusterctl recover.", alive, voters, need)
	}
	return "No leader at the moment: an election should end within seconds. If it does not, look at the logs of clusterd."
}

// known shows a number that not every server knows of every member.
func known(n *uint64) string {
	if n == nil {
		return "-"
	}
	return strconv.FormatUint(*n, 10)
}

func newMembersRemoveCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var yes bool
	cmd := &cobra.Command{
		Use:   "rm NAME",
		Short: "Remove a member from the cluster",
		Long: templates.LongDesc(`
			Remove a machine from the cluster for good: its key is no longer accepted, and its
			Node object is deleted. What runs on the machine itself is not touched; run clusterd
			reset there for that. Do not remove a machine that will come back.`),
		Example: templates.Examples(`
			# Move the pods away, then remove the machine
			clusterctl drain n3 --ignore-daemonsets
			clusterctl members rm n3

			# In a script
			clusterctl members rm n3 --yes`),
		Args:              oneArg("the name of a member", "clusterctl members"),
		ValidArgsFunction: completeFrom(f, memberNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			a, err := newAPI(f)
			if err != nil {
				return err
			}
			if err := confirm(streams, yes, fmt.Sprintf("%s is removed for good: its key is no longer accepted, and its Node object is deleted. To come back it must be reset and join again.", args[0])); err != nil {
				return err
			}
			if err := a.do(cmd.Context(), http.MethodDelete, pathOf("members", args[0]), nil, nil); err != nil {
				return fmt.Errorf("remove member %s: %w", args[0], err)
			}
			fmt.Fprintf(streams.Out, "member %q removed\n", args[0])
			return nil
		},
	}
	cmd.Flags().BoolVarP(&yes, "yes", "y", false, "Do not ask for confirmation")
	return cmd
}

func newMembersVotersCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	return &cobra.Command{
		Use:   "voters NUMBER|auto",
		Short: "Set the number of voters",
		Long: templates.LongDesc(`
			Set the number of voters: 1, 3, 5 or 7. With three, one may fail; with five, two;
			with seven, three, and every write waits for four. With auto (the default), the
			cluster uses as many as its members allow, up to five.

			The leader promotes and demotes voters one after the other, within 15 seconds. It
			chooses which members vote; clusterctl members shows them.`),
		Example: templates.Examples(`
			# Survive the loss of three members of seven or more
			clusterctl members voters 7`),
		Args: oneArg("a number: 1, 3, 5, 7 or auto", ""),
		RunE: func(cmd *cobra.Command, args []string) error {
			n, err := strconv.Atoi(args[0])
			if args[0] == "auto" {
				n, err = 0, nil
			}
			if err != nil || args[0] == "0" {
				return fmt.Errorf("%q voters: give 1, 3, 5, 7 or auto", args[0])
			}
			a, err := newAPI(f)
			if err != nil {
				return err
			}
			in, err := jsonBody(v1.VotersRequest{Voters: n})
			if err != nil {
				return err
			}
			if err := a.do(cmd.Context(), http.MethodPut, pathOf("voters"), in, nil); err != nil {
				return fmt.Errorf("set the number of voters: %w", err)
			}
			fmt.Fprintf(streams.Out, "voters set to %s\n", args[0])
			return nil
		},
	}
}

func memberNames(ctx context.Context, a *api) ([]string, error) {
	var list v1.MemberList
	if err := a.do(ctx, http.MethodGet, pathOf("members"), nil, &list); err != nil {
		return nil, err
	}
	var names []string
	for _, m := range list.Members {
		names = append(names, m.Name)
	}
	return names, nil
}

// oneArg wants exactly one argument and says where to find it.
func oneArg(what, see string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if len(args) == 1 {
			return nil
		}
		message := fmt.Sprintf("%s needs %s", cmd.CommandPath(), what)
		if len(args) > 1 {
			message = fmt.Sprintf("%s takes one argument, not %d", cmd.CommandPath(), len(args))
		}
		if see != "" {
			message += "; see: " + see
		}
		return errors.New(message)
	}
}
