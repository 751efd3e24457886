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

func newTokenKeysCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:   "token-keys",
		Short: "Show or rotate the keys that sign service account tokens",
		Long: templates.LongDesc(`
			Show the keys with which servers sign and recognise the tokens of service accounts;
			others find their public parts at /openid/v1/jwks. Another key is made when it is
			asked for, after clusterctl ca rotate or ca rotate secrets, and when the last one is
			older than clusterd's --token-key-age.`),
		Example: templates.Examples(`
			# Which key signs, and how old is it?
			clusterctl token-keys`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var list v1.TokenKeyList
			return show(cmd.Context(), f, streams, out, "show the keys of service accounts' tokens", pathOf("token-keys"), &list, nil, func(w io.Writer) error { return tokenKeyTable(w, list, time.Now()) })
		},
	}
	cmd.Flags().StringVarP((*string)(&out), "output", "o", "", "One of: json, yaml")
	cmd.AddCommand(newTokenKeysRotateCommand(f, streams))
	return cmd
}

func tokenKeyTable(w io.Writer, list v1.TokenKeyList, now time.Time) error {
	if len(list.Keys) == 0 {
		fmt.Fprintln(w, "There is no key yet: the first token makes it.")
		return nil
	}
	var rows [][]string
	for _, k := range list.Keys {
		rows = append(rows, []string{k.ID, k.Created.Format(time.RFC3339), tokenKeyState(k, now)})
	}
	return printTable(w, []string{"KEY", "CREATED", "STATE"}, rows)
}

func tokenKeyState(k v1.TokenKey, now time.Time) string {
	switch {
	case k.Signs:
		return "signs"
	case k.From.After(now):
		return "signs from " + k.From.Format(time.RFC3339)
	case !k.Until.IsZero():
		return "verifies until " + k.Until.Format(time.RFC3339)
	}
	return "verifies"
}

func newTokenKeysRotateCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var wait bool
	var timeout time.Duration
	cmd := &cobra.Command{
		Use:   "rotate",
		Short: "Make another key for service accounts' tokens",
		Long: templates.LongDesc(`
			Make another key for the tokens of service accounts. It is published at once and
			signs a minute later, on all servers and without a restart. Tokens that the keys
			before have signed stay good until they expire. Anybody who has read a key can
			make tokens of it for as long as it verifies: clusterctl ca rotate secrets --finish
			ends that, with all tokens in use.`),
		Example: templates.Examples(`
			# Make another key, and wait until it signs
			clusterctl token-keys rotate --wait`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a, err := newAPI(f)
			if err != nil {
				return err
			}
			var list v1.TokenKeyList
			if err := a.do(cmd.Context(), http.MethodPost, pathOf("token-keys"), nil, &list); err != nil {
				return err
			}
			newest := list.Keys[len(list.Keys)-1]
			if !wait {
				fmt.Fprintf(streams.Out, "Key %s signs from %s on.\n", newest.ID, newest.From.Format(time.RFC3339))
				return nil
			}
			if err := awaitTokenKey(cmd.Context(), a, newest.ID, timeout); err != nil {
				return err
			}
			fmt.Fprintf(streams.Out, "Key %s signs.\n", newest.ID)
			return nil
		},
	}
	cmd.Flags().BoolVar(&wait, "wait", false, "Wait until the new key signs")
	cmd.Flags().DurationVar(&timeout, "timeout", 5*time.Minute, "How long to wait")
	return cmd
}

// awaitTokenKey waits until that key signs.
func awaitTokenKey(ctx context.Context, a *api, id string, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	for {
		var list v1.TokenKeyList
		err := a.do(ctx, http.MethodGet, pathOf("token-keys"), nil, &list)
		for _, k := range list.Keys {
			if err == nil && k.ID == id && k.Signs {
				return nil
			}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("after %s key %s does not sign yet: see clusterctl token-keys", timeout, id)
		case <-time.After(500 * time.Millisecond):
		}
	}
}
