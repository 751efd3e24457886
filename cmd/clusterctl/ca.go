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
		Short: "Show or exchange the cluster's certificate authorities",
		Long: templates.LongDesc(`
			Show or exchange the cluster's certificate authorities.

			There is one for each purpose: peer (servers, and what the API shows), node
			(agents), client (people and programs), front (what servers show to aggregated APIs)
			and secrets, which signs nothing: what seals Secrets at rest follows from its key. A
			cluster of an earlier version has one for all, until clusterctl ca split.`),
		Example: templates.Examples(`
			# How far is the exchange?
			clusterctl ca status

			# Exchange all
			clusterctl ca rotate

			# Exchange the one that signs people's certificates
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
		Short: "Show the authorities, and how far an exchange is",
		Long: templates.LongDesc(`
			Show the authorities that are trusted and, while they are being exchanged, which
			members have done what the phase asks.`),
		Example: templates.Examples(`
			# Show the authorities
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
		return fmt.Sprintf("%s; the new authority is made known, %d members are waited for", s.Phase, waited)
	case v1.AuthorityReissue:
		switch {
		case waited > 0:
			return fmt.Sprintf("%s; the new authority signs, %d members are waited for", s.Phase, waited)
		case s.Ends.After(now):
			return fmt.Sprintf("%s; both authorities are trusted until %s (clusterctl ca finish ends that now)", s.Phase, s.Ends.Format(time.RFC3339))
		}
		return s.Phase + "; the old authority is being given up"
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
		Short: "Exchange the authorities, or one, while the cluster works",
		Long: templates.LongDesc(`
			Exchange the cluster's certificate authorities while the cluster works: all, or
			the one for PURPOSE, which is one of peer, client, front, node, secrets.

			A new authority is made and made known to every member; when all trust it, it
			signs, and all certificates are issued anew; when the grace is over, the old one
			is no longer trusted, and what was opened with its certificates is closed. Each
			step waits for all members: start clusterd where it is down, or remove that
			member with clusterctl members rm.

			What an exchange of one purpose leaves alone: certificates, connections, join tokens
			and keys of all others. With client's, servers' kubeconfigs are written anew. Everybody else's, and the certificates of
			clusterctl user add, are good until the old authority goes: copy a server's
			admin.kubeconfig again, run clusterctl user add again. Pods learn of it by themselves.
			Join tokens that were made before peer's new authority signed go with the old one.
			With peer's the gossip key is changed, and with secrets' the key that signs service
			accounts' tokens.`),
		Example: templates.Examples(`
			# Exchange all, and give everybody a week to get a new kubeconfig
			clusterctl ca rotate --grace 168h

			# A server's disk was stolen: as fast as the members can
			clusterctl ca rotate --finish --wait --yes

			# Only people's and programs' certificates
			clusterctl ca rotate client

			# End the grace of the exchange that is under way
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
		Short: "Give each purpose an authority of its own",
		Long: templates.LongDesc(`
			Give each purpose an authority of its own, while the cluster works. Clusters that
			were founded by this version or a later one have them.

			It goes in the steps of clusterctl ca rotate: new authorities for client, front,
			node and secrets are made known, sign, and at the end the one there was until then
			is trusted as the servers' alone: kubeconfigs with its certificates end then, as with
			rotate; join tokens and the authority in kubeconfigs stay. It is refused while a
			member's version would not follow; afterwards no earlier version can join, and
			none starts on a member's data folder.`),
		Example: templates.Examples(`
			# Give everybody a week to get a new kubeconfig
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
		Short: "End the grace of the exchange that is under way",
		Long: templates.LongDesc(`
			End the grace of the exchange that clusterctl ca rotate or split has begun: the old
			authority is trusted until all members are ready, and no longer. Kubeconfigs and join
			tokens of it end then. If no exchange is under way nothing is changed, and the exit
			code is 1.`),
		Example: templates.Examples(`
			# What is under way?
			clusterctl ca status

			# End its grace, and wait until the old authority has gone
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

// runFinish ends the grace of the exchange that the status shows, and of no other that may
// begin meanwhile.
func (o *rotateOptions) runFinish(ctx context.Context, a *api) error {
	var now v1.AuthorityStatus
	if err := a.do(ctx, http.MethodGet, pathOf("authority"), nil, &now); err != nil {
		return err
	}
	if now.Phase == v1.AuthorityStable {
		return errors.New("no exchange of an authority is under way: nothing was changed (clusterctl ca rotate begins one)")
	}
	if len(now.Of) == 1 {
		o.purpose = now.Of[0]
	}
	if err := confirm(o.IOStreams, o.yes, "What the old authority signed ends as soon as all members are ready: "+phaseWords(now, time.Now())+"."); err != nil {
		return err
	}
	return o.ask(ctx, a, pathOf("authority", "finish"), v1.AuthorityRequest{Of: now.Of})
}

func (o *rotateOptions) addFlags(cmd *cobra.Command) {
	o.addWaitFlags(cmd)
	cmd.Flags().DurationVar(&o.grace, "grace", 24*time.Hour, "How long the old authority is trusted at least, once all members have new certificates")
	cmd.Flags().BoolVar(&o.finish, "finish", false, "No grace: the old authority is trusted until all members are ready, and no longer")
}

func (o *rotateOptions) addWaitFlags(cmd *cobra.Command) {
	cmd.Flags().BoolVarP(&o.yes, "yes", "y", false, "Do not ask for confirmation")
	cmd.Flags().BoolVar(&o.wait, "wait", false, "Wait until the exchange is at its end, or its grace has begun")
	cmd.Flags().DurationVar(&o.timeout, "timeout", 10*time.Minute, "How long to wait")
}

// people reports whether certificates of people, or what their kubeconfigs trust, are exchanged.
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
		return errors.New("the server's clusterd is of a version that knows one authority for all purposes: upgrade it first")
	}
	path, request := pathOf("authority"), v1.AuthorityRequest{Grace: o.grace.String(), Finish: o.finish, Purpose: o.purpose}
	question := "The cluster gets new certificate authorities. Kubeconfigs and join tokens that were handed out end with the old ones"
	switch {
	case o.split:
		path = pathOf("authority", "split")
		question = "Each purpose gets an authority of its own. Kubeconfigs that were handed out end with the old one's"
	case !o.people():
		question = "The cluster gets a new authority for the purpose " + o.purpose
	case o.purpose == "client":
		question = "The cluster gets a new authority for the purpose client. Kubeconfigs with certificates that were handed out end with the old one"
	case o.purpose == "peer":
		question = "The cluster gets a new authority for the purpose peer. Kubeconfigs and join tokens that were handed out end with the old one"
	}
	if now.Phase != v1.AuthorityStable {
		return fmt.Errorf("the authority is being exchanged already: %s; nothing was changed. clusterctl ca finish ends that exchange's grace", phaseWords(now, time.Now()))
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

// await follows the exchange. At its end this kubeconfig may be none that the
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
