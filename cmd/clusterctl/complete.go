package main

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
)

// completionTimeout keeps a shell from hanging on a server that is away.
const completionTimeout = 3 * time.Second

// completeFrom completes one argument from what the server lists.
func completeFrom(f cmdutil.Factory, list func(context.Context, *api) ([]string, error)) cobra.CompletionFunc {
	return func(cmd *cobra.Command, args []string, toComplete string) ([]string, cobra.ShellCompDirective) {
		if len(args) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx := cmd.Context()
		if ctx == nil {
			ctx = context.Background()
		}
		ctx, cancel := context.WithTimeout(ctx, completionTimeout)
		defer cancel()
		a, err := newAPI(f)
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		all, err := list(ctx, a)
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		var fitting []string
		for _, s := range all {
			if strings.HasPrefix(s, toComplete) {
				fitting = append(fitting, s)
			}
		}
		return fitting, cobra.ShellCompDirectiveNoFileComp
	}
}
