package main

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	"k8s.io/kubectl/pkg/util/templates"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
)

// roleChange is `members promote` or `members demote`.
type roleChange struct {
	use, short, long, example string
	role                      string // that the member is to have
	done                      func(v1.Member) bool
}

// what is "a server" or "an agent".
func (c roleChange) what() string {
	if c.role == "agent" {
		return "an agent"
	}
	return "a server"
}

var promote = roleChange{
	use: "promote NAME", short: "Turn an agent into a server",
	long: `
		Turn an agent into a server, which then stores the cluster's state together with the
		others. Its pods keep running. The cluster chooses whether it votes.`,
	example: `
		# Replace a lost server
		clusterctl members rm n3
		clusterctl members promote a1`,
	role: "server",
	done: func(m v1.Member) bool { return m.Role == v1.RoleVoter || m.Role == v1.RoleNonvoter },
}

var demote = roleChange{
	use: "demote NAME", short: "Turn a server into an agent",
	long: `
		Turn a server into an agent. Another member votes in its place, the cluster's keys
		(those of seal.keys too) are removed from its disk, and its pods keep running. It is
		refused if the cluster would lose its majority.

		Its copy of the cluster's state stays on its disk as store.demoted in the data
		directory, so that the change can be undone. Once the machine works as an agent, remove
		it there:

		    rm -r /var/lib/clusterd/store.demoted*

		Anybody who has read that disk before still has the keys that were stored there.`,
	example: `
		# Remove the cluster's state from a machine
		clusterctl members demote n3`,
	role: "agent",
	done: func(m v1.Member) bool { return m.Role == v1.RoleAgent && m.Gossip == "answers" },
}

func newMembersRoleCommand(f cmdutil.Factory, streams genericiooptions.IOStreams, c roleChange) *cobra.Command {
	timeout := 2 * time.Minute
	cmd := &cobra.Command{
		Use: c.use, Short: c.short, Long: templates.LongDesc(c.long), Example: templates.Examples(c.example),
		Args:              oneArg("the name of a member", "clusterctl members"),
		ValidArgsFunction: completeFrom(f, memberNames),
		RunE: func(cmd *cobra.Command, args []string) error {
			a, err := newAPI(f)
			if err != nil {
				return err
			}
			in, err := jsonBody(v1.RoleRequest{Role: c.role})
			if err != nil {
				return err
			}
			if err := a.do(cmd.Context(), http.MethodPut, pathOf("members", args[0], "role"), in, nil); err != nil {
				return fmt.Errorf("make %s %s: %w", args[0], c.what(), err)
			}
			if timeout == 0 {
				fmt.Fprintf(streams.Out, "member %q: role change to %s requested\n", args[0], c.what())
				return nil
			}
			fmt.Fprintf(streams.ErrOut, "waiting for up to %s until %s is %s …\n", timeout, args[0], c.what())
			if err := awaitMember(cmd.Context(), a, args[0], timeout, c.done); err != nil {
				return err
			}
			fmt.Fprintf(streams.Out, "member %q is %s now\n", args[0], c.what())
			return nil
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", timeout, "How long to wait for the change (0 = do not wait)")
	return cmd
}

// awaitMember waits until a member is as it should be. Answers that fail are
// asked for again: the server that is asked may be the one that changes.
func awaitMember(ctx context.Context, a *api, name string, timeout time.Duration, done func(v1.Member) bool) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	last := "it was not seen"
	for {
		var list v1.MemberList
		err := a.do(ctx, http.MethodGet, pathOf("members"), nil, &list)
		if err != nil {
			last = err.Error()
		}
		for _, m := range list.Members {
			if m.Name != name {
				continue
			}
			if done(m) {
				return nil
			}
			last = fmt.Sprintf("it is %s, and %s", m.Role, m.Gossip)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s did not change within %s (%s): look at the log of clusterd there; the change is recorded and goes on", name, timeout, last)
		case <-time.After(500 * time.Millisecond):
		}
	}
}
