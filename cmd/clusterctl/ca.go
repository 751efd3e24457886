package main

import (
	"context"
	"errors"
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

func newCACommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "ca",
		Short: "Show or rotate the cluster's certificate authorities",
		Long: templates.LongDesc(`
			Show or rotate the cluster's certificate authorities (CAs).

			There is one for each purpose: peer (servers, and the API's certificate), node
			(agents), client (people and programs), front (the front proxy's client certificate
			for aggregated APIs) and secrets, which signs nothing: the keys for Secrets at rest are
			derived from its key. A cluster of an earlier version has one CA for all purposes,
			until clusterctl ca split.`),
		Example: templates.Examples(`
			# Show the progress of a rotation
			clusterctl ca status

			# Rotate all CAs
			clusterctl ca rotate

			# Rotate the CA that signs user certificates
			clusterctl ca rotate client`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newCAStatusCommand(f, streams), newCARotateCommand(f, streams), newCASplitCommand(f, streams), newCAFinishCommand(f, streams))
	return cmd
}

func newCAStatusCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the CAs and the progress of a rotation",
		Long: templates.LongDesc(`
			Show the trusted CAs and, during a rotation, which members have completed the
			current phase.`),
		Example: templates.Examples(`
			# Show the CAs
			clusterctl ca status

			# The members that the next phase waits for
			clusterctl ca status -o json | jq -r '.members[] | select(.waited) | .name'`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var status v1.AuthorityStatus
			return show(cmd.Context(), f, streams, out, "show the authority", pathOf("authority"), &status, nil, func(w io.Writer) error { return authorityTable(w, status, time.Now()) })
		},
	}
	cmd.Flags().StringVarP((*string)(&out), "output", "o", "", "One of: json, yaml")
	return cmd
}

func authorityTable(w io.Writer, s v1.AuthorityStatus, now time.Time) error {
	fmt.Fprintf(w, "Phase: %s\n\n", phaseWords(s, now))
	var rows [][]string
	for _, ca := range s.Authorities {
		signs := "no"
		if ca.Signs {
			signs = "yes"
		}
		purposes := "all"
		if ca.Purposes != nil && len(ca.Purposes) < len(v1.AuthorityPurposes) {
			purposes = strings.Join(ca.Purposes, ",")
		}
		rows = append(rows, []string{purposes, ca.ID, signs, ca.Expires.Format(time.RFC3339)})
	}
	if err := printTable(w, []string{"FOR", "AUTHORITY", "SIGNS", "EXPIRES"}, rows); err != nil {
		return err
	}
	fmt.Fprintln(w)
	rows = nil
	for _, m := range s.Members {
		state := "ready"
		switch {
		case m.Waited:
			state = "waited for"
		case !m.Ready:
			state = "away"
		}
		rows = append(rows, []string{m.Name, m.Role, state})
	}
	return printTable(w, []string{"MEMBER", "ROLE", "STATE"}, rows)
}

// phaseWords says in a line what the phase is and what comes next.
func phaseWords(s v1.AuthorityStatus, now time.Time) string {
	words := phaseOnly(s, now)
	if len(s.Of) > 0 {
		words += " (of " + strings.Join(s.Of, ", ") + ")"
	}
	return words
}

func phaseOnly(s v1.AuthorityStatus, now time.Time) string {
	waited := 0
	for _, m := range s.Members {
		if m.Waited {
			waited++
		}
	}
	switch s.Phase {
	case v1.AuthorityDistribute:
		return fmt.Sprintf("%s; the new CA is being distributed, waiting for %d members", s.Phase, waited)
	case v1.AuthorityReissue:
		switch {
		case waited > 0:
			return fmt.Sprintf("%s; the new CA signs, waiting for %d members", s.Phase, waited)
		case s.Ends.After(now):
			return fmt.Sprintf("%s; both CAs are trusted until %s (clusterctl ca finish ends that now)", s.Phase, s.Ends.Format(time.RFC3339))
		}
		return s.Phase + "; the old CA is being removed"
	}
	return s.Phase
}

type rotateOptions struct {
	genericiooptions.IOStreams
	purpose           string // empty: all
	split             bool
	yes, finish, wait bool
	grace             time.Duration
	timeout           time.Duration
}

func newCARotateCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	o := rotateOptions{IOStreams: streams}
	cmd := &cobra.Command{
		Use:   "rotate [PURPOSE]",
		Short: "Rotate all CAs, or one, while the cluster is running",
		Long: templates.LongDesc(`
			Rotate the cluster's certificate authorities while the cluster is running: all, or
			the one for PURPOSE: peer, client, front, node or secrets.

			A new CA is created and distributed to every member. When all trust it, it signs, and
			all certificates are reissued. When the overlap period (--grace) is over, the old CA is no
			longer trusted, and connections with its certificates are closed. Each step waits for
			all members: start clusterd where it is down, or remove that member with
			clusterctl members rm.

			* What rotates: the CA and its certificates; with peer also the gossip key, with
			secrets the key that signs service account tokens, with client the kubeconfigs of
			the servers. Pods are updated automatically.

			* What stays valid: certificates, connections, join tokens and keys of all other
			purposes.

			* What you must do before the old CA goes: copy a server's admin.kubeconfig again, run
			clusterctl user add again for each user (client), and create new join tokens (peer).`),
		Example: templates.Examples(`
			# Rotate all CAs, with a week to distribute new kubeconfigs
			clusterctl ca rotate --grace 168h

			# After a compromise: rotate now, without overlap
			clusterctl ca rotate --finish --wait --yes

			# Rotate only the CA of user certificates
			clusterctl ca rotate client

			# End the overlap period of the current rotation
			clusterctl ca finish`),
		Args:      cobra.MatchAll(cobra.MaximumNArgs(1), cobra.OnlyValidArgs),
		ValidArgs: v1.AuthorityPurposes,
		RunE: func(cmd *cobra.Command, args []string) error {
			a, err := newAPI(f)
			if err != nil {
				return err
			}
			if len(args) == 1 {
				o.purpose = args[0]
			}
			return o.run(cmd.Context(), a, cmd.Flags().Changed("grace"))
		},
	}
	o.addFlags(cmd)
	return cmd
}

func newCASplitCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	o := rotateOptions{IOStreams: streams, split: true}
	cmd := &cobra.Command{
		Use:   "split",
		Short: "Create a separate CA for each purpose",
		Long: templates.LongDesc(`
			Create a separate CA for each purpose, while the cluster is running. Clusters that
			were created by this version or a later one have them.

			The steps are those of clusterctl ca rotate: new CAs for client, front, node and
			secrets are distributed and sign; at the end the previous CA is trusted for servers
			only. Kubeconfigs with its certificates end then, as with rotate; join tokens and the
			CA in kubeconfigs stay valid. It is refused while the version of a member does not
			support it. Afterwards earlier versions can neither join nor start on a member's
			data directory.`),
		Example: templates.Examples(`
			# With a week to distribute new kubeconfigs
			clusterctl ca split --grace 168h`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a, err := newAPI(f)
			if err != nil {
				return err
			}
			return o.run(cmd.Context(), a, cmd.Flags().Changed("grace"))
		},
	}
	o.addFlags(cmd)
	return cmd
}

func newCAFinishCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	o := rotateOptions{IOStreams: streams, finish: true}
	cmd := &cobra.Command{
		Use:   "finish",
		Short: "End the overlap period of the current rotation",
		Long: templates.LongDesc(`
			End the overlap period of the rotation that clusterctl ca rotate or split has started:
			the old CA is trusted until all members are ready, and no longer. Its kubeconfigs and
			join tokens end then. If there is no rotation in progress, nothing is changed, and the
			exit status is 1.`),
		Example: templates.Examples(`
			# Show the current rotation
			clusterctl ca status

			# End its overlap period, and wait until the old CA is removed
			clusterctl ca finish --wait`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a, err := newAPI(f)
			if err != nil {
				return err
			}
			return o.runFinish(cmd.Context(), a)
		},
	}
	o.addWaitFlags(cmd)
	return cmd
}

// runFinish ends the grace of the rotation that the status shows, and of no other that may
// begin meanwhile.
func (o *rotateOptions) runFinish(ctx context.Context, a *api) error {
	var now v1.AuthorityStatus
	if err := a.do(ctx, http.MethodGet, pathOf("authority"), nil, &now); err != nil {
		return err
	}
	if now.Phase == v1.AuthorityStable {
		return errors.New("no CA rotation in progress: nothing was changed (clusterctl ca rotate starts one)")
	}
	if len(now.Of) == 1 {
		o.purpose = now.Of[0]
	}
	if err := confirm(o.IOStreams, o.yes, "Certificates of the old CA end as soon as all members are ready: "+phaseWords(now, time.Now())+"."); err != nil {
		return err
	}
	return o.ask(ctx, a, pathOf("authority", "finish"), v1.AuthorityRequest{Of: now.Of})
}

func (o *rotateOptions) addFlags(cmd *cobra.Command) {
	o.addWaitFlags(cmd)
	cmd.Flags().DurationVar(&o.grace, "grace", 24*time.Hour, "Minimum overlap period: how long the old CA stays trusted once all members have new certificates")
	cmd.Flags().BoolVar(&o.finish, "finish", false, "No overlap period: the old CA is trusted until all members are ready, and no longer")
}

func (o *rotateOptions) addWaitFlags(cmd *cobra.Command) {
	cmd.Flags().BoolVarP(&o.yes, "yes", "y", false, "Do not ask for confirmation")
	cmd.Flags().BoolVar(&o.wait, "wait", false, "Wait until the rotation is complete, or its overlap period has begun")
	cmd.Flags().DurationVar(&o.timeout, "timeout", 10*time.Minute, "How long to wait")
}

// people reports whether certificates of people, or what their kubeconfigs trust, are rotated.
func (o *rotateOptions) people() bool {
	return o.purpose == "" || o.purpose == "client" || o.purpose == "peer"
}

// knows reports whether the server that answered knows of purposes.
func knows(s v1.AuthorityStatus) bool {
	return len(s.Authorities) > 0 && len(s.Authorities[0].Purposes) > 0
}

func (o *rotateOptions) run(ctx context.Context, a *api, graceGiven bool) error {
	if o.finish && graceGiven {
		return errors.New("--grace and --finish: give one of them")
	}
	var now v1.AuthorityStatus
	if err := a.do(ctx, http.MethodGet, pathOf("authority"), nil, &now); err != nil {
		return err
	}
	if (o.split || o.purpose != "") && !knows(now) {
		return errors.New("the server runs a version of clusterd with one CA for all purposes: upgrade it first")
	}
	path, request := pathOf("authority"), v1.AuthorityRequest{Grace: o.grace.String(), Finish: o.finish, Purpose: o.purpose}
	question := "All CAs of the cluster are rotated. Existing kubeconfigs and join tokens end with the old CAs"
	switch {
	case o.split:
		path = pathOf("authority", "split")
		question = "A separate CA is created for each purpose. Existing kubeconfigs end with the certificates of the old CA"
	case !o.people():
		question = "The CA for the purpose " + o.purpose + " is rotated"
	case o.purpose == "client":
		question = "The CA for the purpose client is rotated. Existing kubeconfigs with certificates end with the old CA"
	case o.purpose == "peer":
		question = "The CA for the purpose peer is rotated. Existing kubeconfigs and join tokens end with the old CA"
	}
	if now.Phase != v1.AuthorityStable {
		return fmt.Errorf("CA rotation in progress: %s; nothing was changed. clusterctl ca finish ends its overlap period", phaseWords(now, time.Now()))
	}
	if err := confirm(o.IOStreams, o.yes, question+"."); err != nil {
		return err
	}
	return o.ask(ctx, a, path, request)
}

// ask sends the request and says what came of it.
func (o *rotateOptions) ask(ctx context.Context, a *api, path string, request v1.AuthorityRequest) error {
	var now v1.AuthorityStatus
	body, err := jsonBody(request)
	if err != nil {
		return err
	}
	if err := a.do(ctx, http.MethodPost, path, body, &now); err != nil {
		return err
	}
	fmt.Fprintf(o.Out, "authority: %s\n", phaseWords(now, time.Now()))
	if o.wait {
		if now, err = o.await(ctx, a, now); err != nil {
			return err
		}
	}
	switch gone := now.Phase == v1.AuthorityStable; {
	case gone && !o.people():
		fmt.Fprintln(o.Out, "The old authority is gone.")
	case gone && (o.split || o.purpose == "client"):
		fmt.Fprintln(o.Out, "The old authority's certificates of people are good no more. Copy admin.kubeconfig of a server again to where it is used, and make users' kubeconfigs anew.")
	case gone:
		fmt.Fprintln(o.Out, "The old authority is gone. Copy admin.kubeconfig of a server again to where it is used, and make join tokens and users' kubeconfigs anew.")
	case !o.people():
		fmt.Fprintln(o.Out, "See clusterctl ca status.")
	default:
		fmt.Fprintln(o.Out, "See clusterctl ca status. Before the old authority goes: copy admin.kubeconfig of a server again to where it is used, and run clusterctl user add again for each user with a certificate.")
	}
	return nil
}

// await follows the rotation. At its end this kubeconfig may be none that the
// cluster knows: then it is at its end.
func (o *rotateOptions) await(ctx context.Context, a *api, now v1.AuthorityStatus) (v1.AuthorityStatus, error) {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	shown := phaseWords(now, time.Now())
	for {
		if now.Phase == v1.AuthorityStable || !o.finish && now.Phase == v1.AuthorityReissue && nobodyWaited(now) {
			return now, nil
		}
		select {
		case <-ctx.Done():
			return now, fmt.Errorf("after %s it is in the phase %s: see clusterctl ca status", o.timeout, now.Phase)
		case <-time.After(time.Second):
		}
		next := v1.AuthorityStatus{}
		switch err := a.do(ctx, http.MethodGet, pathOf("authority"), nil, &next); {
		case err == nil:
			now = next
		case now.Phase == v1.AuthorityReissue && givenUp(err):
			now.Phase = v1.AuthorityStable
		case ctx.Err() == nil: // a server that is being started, say
			continue
		}
		if words := phaseWords(now, time.Now()); words != shown {
			fmt.Fprintf(o.Out, "authority: %s\n", words)
			shown = words
		}
	}
}

func nobodyWaited(s v1.AuthorityStatus) bool {
	for _, m := range s.Members {
		if m.Waited {
			return false
		}
	}
	return true
}

// givenUp reports whether the server does not know this kubeconfig's certificate
// any more, or this kubeconfig does not know the server's.
func givenUp(err error) bool {
	return isCode(err, http.StatusUnauthorized) || strings.Contains(err.Error(), "signed by unknown authority")
}
