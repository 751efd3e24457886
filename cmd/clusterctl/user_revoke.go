package main

import (
	"context"
	"errors"
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

func newUserRevokeCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var serial string
	cmd := &cobra.Command{
		Use:   "revoke NAME",
		Short: "Revoke a user's certificates",
		Long: templates.LongDesc(`
			Revoke all client certificates of a user that were issued until now, or one by its
			serial number. Every server refuses them within a second and closes their
			connections. Certificates that are issued later are valid: to take a user's rights
			away, delete the role bindings too.

			The user of admin.kubeconfig is called admin: each server issues itself a new one.`),
		Example: templates.Examples(`
			# The laptop with jane's kubeconfig was stolen
			clusterctl user revoke jane
			clusterctl user add jane

			# One certificate of several
			clusterctl user revoke --serial 5B2C9F`),
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if (len(args) == 0) == (serial == "") {
				return errors.New("give the name of a user or --serial, and not both")
			}
			req := v1.RevocationRequest{Serial: serial}
			if len(args) == 1 {
				req.User = args[0]
			}
			return revokeUser(cmd.Context(), f, streams, req)
		},
	}
	cmd.Flags().StringVar(&serial, "serial", "", "Serial number of the certificate, in hexadecimal, as openssl x509 -serial prints it")
	return cmd
}

func revokeUser(ctx context.Context, f cmdutil.Factory, streams genericiooptions.IOStreams, req v1.RevocationRequest) error {
	a, err := newAPI(f)
	if err != nil {
		return err
	}
	body, err := jsonBody(req)
	if err != nil {
		return err
	}
	var done v1.Revocation
	if err := a.do(ctx, http.MethodPost, pathOf("revocations"), body, &done); err != nil {
		return err
	}
	if done.Serial != "" {
		fmt.Fprintf(streams.Out, "certificate %s revoked\n", done.Serial)
		return nil
	}
	fmt.Fprintf(streams.Out, "user %q revoked: certificates that were signed until %s are refused\n", done.User, done.Revoked.Format(time.RFC3339))
	return nil
}

func newUserRevokedCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:   "revoked",
		Short: "List revoked certificates",
		Long:  "List revocations, until the last revoked certificate has expired.",
		Example: templates.Examples(`
			# List what is revoked
			clusterctl user revoked`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var list v1.RevocationList
			return show(cmd.Context(), f, streams, out, "list what is revoked", pathOf("revocations"), &list, nil, func(w io.Writer) error {
				var rows [][]string
				for _, r := range list.Revocations {
					rows = append(rows, []string{orNone(r.User), orNone(r.Serial), r.Revoked.Format(time.RFC3339), r.Ends.Format(time.RFC3339)})
				}
				return printTable(w, []string{"USER", "SERIAL", "REVOKED", "KEPT UNTIL"}, rows)
			})
		},
	}
	cmd.Flags().StringVarP((*string)(&out), "output", "o", "", "One of: json, yaml")
	return cmd
}
