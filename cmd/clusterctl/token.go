package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	"k8s.io/kubectl/pkg/util/templates"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
)

const defaultTTL = 24 * time.Hour

func newTokenCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "token",
		Short: "Create, list and remove join tokens",
		Long: templates.LongDesc(`
			A token lets a machine join the cluster, in the role that the token has, until it
			is used or expires. It also pins the cluster's certificate, so that a machine
			cannot be led to another cluster.`),
		Run: cmdutil.DefaultSubCommandRun(streams.ErrOut),
	}
	cmd.AddCommand(newTokenCreateCommand(f, streams), newTokenListCommand(f, streams), newTokenRemoveCommand(f, streams))
	return cmd
}

func newTokenCreateCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var out output
	ttl, wish, uses := defaultTTL, v1.TokenRequest{Role: v1.TokenServer}, 1
	cmd := &cobra.Command{
		Use:   "create",
		Short: "Create a join token and print the join command",
		Long: templates.LongDesc(`
			Create a join token and print the command to run on the joining machine. The secret
			of the token is shown only once.

			The command runs clusterd in the foreground. With --prepare appended it only joins;
			start the service then: systemctl enable --now clusterd.`),
		Example: templates.Examples(`
			# Print the command for the next server
			clusterctl token create

			# For five agents
			clusterctl token create --role agent --uses 5

			# For the agent n7 alone, and from one network
			clusterctl token create --role agent --name n7 --from 192.0.2.0/24

			# Let a machine with the package join, with a token for this one occasion
			ssh root@n4 "$(clusterctl token create --ttl 10m) --prepare && systemctl enable --now clusterd"

			# Use the token in a program
			clusterctl token create -o json | jq -r .token`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := out.validate(); err != nil {
				return err
			}
			if ttl <= 0 {
				return fmt.Errorf("--ttl must be a positive duration such as 24h or 30m, not %s", ttl)
			}
			a, err := newAPI(f)
			if err != nil {
				return err
			}
			wish.TTL, wish.Uses = ttl.String(), &uses
			in, err := jsonBody(wish)
			if err != nil {
				return err
			}
			var t v1.NewToken
			if err := a.do(cmd.Context(), http.MethodPost, pathOf("tokens"), in, &t); err != nil {
				return fmt.Errorf("create a token: %w", err)
			}
			if out == "" {
				fmt.Fprintf(streams.ErrOut, "Valid for %s and %s; run this as root on the machine that is to become %s (as a service: with --prepare behind it, then systemctl enable --now clusterd):\n", short(ttl), machines(uses), map[string]string{v1.TokenServer: "a server", v1.TokenAgent: "an agent"}[wish.Role])
			}
			return out.print(streams.Out, t, func(w io.Writer) error {
				_, err := fmt.Fprintln(w, t.JoinCommand)
				return err
			})
		},
	}
	cmd.Flags().DurationVar(&ttl, "ttl", ttl, "Lifetime of the token")
	cmd.Flags().StringVar(&wish.Role, "role", wish.Role, "Role of the machines: server, which also stores the cluster's state, or agent, which only runs pods")
	cmd.Flags().StringVar(&wish.Name, "name", "", "Name of the one machine that may join with the token (default: any)")
	cmd.Flags().StringSliceVar(&wish.From, "from", nil, "Addresses or ranges (192.0.2.0/24) that machines may join from, as the servers see them (default: any)")
	cmd.Flags().IntVar(&uses, "uses", uses, "How many machines may join with the token (0 = unlimited)")
	cmd.Flags().StringVarP((*string)(&out), "output", "o", "", "One of: json, yaml")
	return cmd
}

func newTokenListCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:     "ls",
		Aliases: []string{"list"},
		Short:   "List valid join tokens, without their secrets",
		Example: templates.Examples(`
			# List the tokens
			clusterctl token ls`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			list := v1.TokenList{Tokens: []v1.Token{}}
			return show(cmd.Context(), f, streams, out, "list the tokens", pathOf("tokens"), &list, func() string {
				if len(list.Tokens) == 0 {
					return "No tokens; create one with: clusterctl token create"
				}
				return ""
			}, func(w io.Writer) error { return tokenTable(w, list, time.Now()) })
		},
	}
	cmd.Flags().StringVarP((*string)(&out), "output", "o", "", "One of: json, yaml")
	return cmd
}

func tokenTable(w io.Writer, l v1.TokenList, now time.Time) error {
	var rows [][]string
	for _, t := range l.Tokens {
		left := "expired"
		switch {
		case t.Expires.IsZero():
			left = "<unknown>"
		case t.Expires.After(now):
			left = age(now, t.Expires)
		}
		uses := fmt.Sprintf("%d of %d", t.Used, t.Uses)
		if t.Uses == 0 {
			uses = fmt.Sprintf("%d of any", t.Used)
		}
		rows = append(rows, []string{t.ID, t.Role, cmp.Or(t.Name, "<any>"), cmp.Or(strings.Join(t.From, ","), "<any>"), uses, left, age(t.Created, now)})
	}
	return printTable(w, []string{"ID", "ROLE", "NAME", "FROM", "USED", "EXPIRES IN", "AGE"}, rows)
}

func newTokenRemoveCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	return &cobra.Command{
		Use:     "rm ID",
		Aliases: []string{"delete", "remove"},
		Short:   "Remove a join token; machines that joined with it stay",
		Example: templates.Examples(`
			# Remove a token
			clusterctl token rm 3f9a1c`),
		Args:              oneArg("the id of a token", "clusterctl token ls"),
		ValidArgsFunction: completeFrom(f, tokenIDs),
		RunE: func(cmd *cobra.Command, args []string) error {
			a, err := newAPI(f)
			if err != nil {
				return err
			}
			if err := a.do(cmd.Context(), http.MethodDelete, pathOf("tokens", args[0]), nil, nil); err != nil {
				return fmt.Errorf("remove token %s: %w", args[0], err)
			}
			fmt.Fprintf(streams.Out, "token %q removed\n", args[0])
			return nil
		},
	}
}

func tokenIDs(ctx context.Context, a *api) ([]string, error) {
	var list v1.TokenList
	if err := a.do(ctx, http.MethodGet, pathOf("tokens"), nil, &list); err != nil {
		return nil, err
	}
	var ids []string
	for _, t := range list.Tokens {
		ids = append(ids, t.ID)
	}
	return ids, nil
}

// machines says for how many a token is.
func machines(uses int) string {
	switch uses {
	case 0:
		return "any number of machines"
	case 1:
		return "one machine"
	}
	return fmt.Sprintf("%d machines", uses)
}

// short is a duration without its zero units: 24h, not 24h0m0s.
func short(d time.Duration) string {
	s := d.String()
	for _, zero := range []string{"m0s", "h0m"} {
		if len(s) > len(zero) && s[len(s)-len(zero):] == zero {
			s = s[:len(s)-len(zero)+1]
		}
	}
	return s
}
