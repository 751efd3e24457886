package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	"k8s.io/kubectl/pkg/util/templates"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/member/releases"
)

type upgradeOptions struct {
	genericiooptions.IOStreams
	to, signature, canary string
	except                []string
	dryRun                bool
	timeout, start        time.Duration
}

// Bounds of how long a node may take: nodes keep a trial for an hour at most.
const (
	minUpgradeTimeout = 10 * time.Second
	maxUpgradeTimeout = 50 * time.Minute
)

func newUpgradeCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	o := upgradeOptions{IOStreams: streams}
	cmd := &cobra.Command{
		Use:   "upgrade --to FILE",
		Short: "Roll out a new clusterd version to the nodes",
		Long: templates.LongDesc(`
			Roll out a new clusterd version to the nodes, while their pods keep running.

			FILE is a release: the tarball of make release, with its signature beside it in
			FILE.minisig. Each node verifies the signature (with the keys of clusterctl upgrade
			trust), content and architecture before it installs anything. First the file is copied
			to all nodes. Then one canary is upgraded, an agent if there is one, else a server that
			does not lead; then the other servers, the other agents and the leader, one at a time.

			A node is on trial until it runs the new version, is Ready, its store has caught up
			and its containers keep running. If that takes longer than --timeout, the node rolls
			back to the previous version and the rollout stops. A node rolls back on its own if
			the new program exits, does not start within --start-timeout, or is not confirmed.
			Containers that failed before are not counted.

			The command can be interrupted and run again at any time: nodes that already have the
			version are skipped.`),
		Example: templates.Examples(`
			# Show the plan
			clusterctl upgrade --to clusterd_0.2.0_amd64.tar.gz --dry-run

			# Roll it out
			clusterctl upgrade --to clusterd_0.2.0_amd64.tar.gz

			# Leave out n4, which is down
			clusterctl upgrade --to clusterd_0.2.0_amd64.tar.gz --except n4`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.to == "" {
				return errors.New("give the file of a release with --to FILE")
			}
			if o.timeout < minUpgradeTimeout || o.timeout > maxUpgradeTimeout {
				return fmt.Errorf("--timeout %s: give a duration from %s to %s", o.timeout, minUpgradeTimeout, maxUpgradeTimeout)
			}
			if o.start <= 0 || o.start > o.timeout {
				return fmt.Errorf("--start-timeout %s: give a duration of at most --timeout, which is %s", o.start, o.timeout)
			}
			a, err := newAPI(f)
			if err != nil {
				return err
			}
			return o.run(cmd.Context(), a)
		},
	}
	cmd.Flags().StringVar(&o.to, "to", "", "File of the release")
	cmd.Flags().StringVar(&o.signature, "signature", "", "File of its signature (default: FILE.minisig)")
	cmd.Flags().StringVar(&o.canary, "canary", "", "Node that goes first")
	cmd.Flags().StringSliceVar(&o.except, "except", nil, "Nodes to leave out")
	cmd.Flags().BoolVar(&o.dryRun, "dry-run", false, "Print the plan without doing anything")
	cmd.Flags().DurationVar(&o.timeout, "timeout", 5*time.Minute, "Time in which each node must be healthy with the new version")
	cmd.Flags().DurationVar(&o.start, "start-timeout", 25*time.Second, "Time in which the components of each node must start; pods of a node that is unreachable for longer than its --eviction-delay are replaced elsewhere")
	cmdutil.CheckErr(cmd.RegisterFlagCompletionFunc("canary", completeFrom(f, memberNames)))
	cmdutil.CheckErr(cmd.RegisterFlagCompletionFunc("except", completeFrom(f, memberNames)))
	cmd.AddCommand(newUpgradeStatusCommand(f, streams), newUpgradeTrustCommand(f, streams), newUpgradeDistrustCommand(f, streams), newUpgradeKeyCommand(streams), newUpgradeSignCommand(streams))
	return cmd
}

func (o *upgradeOptions) run(ctx context.Context, a *api) error {
	file, err := openRelease(o.to, o.signature)
	if err != nil {
		return err
	}
	plan, err := o.plan(ctx, a, planOptions{release: file.manifest, key: file.signature.KeyName(), canary: o.canary, except: o.except})
	if err != nil {
		return err
	}
	if o.dryRun {
		return plan.table(o.Out)
	}
	if len(plan.steps) == 0 {
		return errors.Join(plan.table(o.Out), closeRecord(ctx, newRoller(a, file, plan, o.timeout, o.start, io.Discard, o.ErrOut)))
	}
	return newRoller(a, file, plan, o.timeout, o.start, o.Out, o.ErrOut).run(ctx)
}

// planTimeout is how long nodes that are not well are waited for before a roll-out.
const planTimeout = 30 * time.Second

// plan asks all nodes and makes the plan.
func (o *upgradeOptions) plan(ctx context.Context, a *api, wish planOptions) (upgradePlan, error) {
	until := time.Now().Add(planTimeout)
	for warned := false; ; {
		nodes, err := surveyUpgrade(ctx, a)
		if err != nil {
			return upgradePlan{}, err
		}
		plan, err := planUpgrade(nodes, wish)
		var no *planError
		if !errors.As(err, &no) || !no.passing || time.Now().After(until) {
			return plan, err
		}
		if !warned {
			warned = true
			fmt.Fprintf(o.ErrOut, "%v\nwaiting for up to %s …\n", err, planTimeout)
		}
		select {
		case <-ctx.Done():
			return plan, err
		case <-time.After(gatePeriod):
		}
	}
}

// releaseFile is a release on this disk. Its signature is judged by the nodes.
type releaseFile struct {
	path      string
	size      int64
	digest    string
	signed    []byte // the signature as it was read
	signature *releases.Signature
	manifest  releases.Manifest
}

func openRelease(path, signature string) (*releaseFile, error) {
	if signature == "" {
		signature = path + signatureSuffix
	}
	r := &releaseFile{path: path}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	h := sha256.New()
	if r.size, err = io.Copy(h, f); err != nil {
		return nil, err
	}
	r.digest = hex.EncodeToString(h.Sum(nil))
	if r.signed, err = os.ReadFile(signature); err != nil {
		return nil, fmt.Errorf("the signature of the release: %w; sign it with clusterctl upgrade sign", err)
	}
	if r.signature, err = releases.ParseSignature(r.signed); err != nil {
		return nil, fmt.Errorf("%s: %w", signature, err)
	}
	if r.manifest, err = r.signature.Claims(); err != nil {
		return nil, fmt.Errorf("%s: %w", signature, err)
	}
	return r, nil
}

// surveyUpgrade asks all members which program they run.
func surveyUpgrade(ctx context.Context, a *api) ([]upgradeNode, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*askFor)
	defer cancel()
	var list v1.MemberList
	if err := a.do(ctx, http.MethodGet, pathOf("members"), nil, &list); err != nil {
		return nil, err
	}
	if list.Leader == "" {
		return nil, errors.New(leaderless(list))
	}
	var kube corev1.NodeList
	if err := a.do(ctx, http.MethodGet, "/api/v1/nodes", nil, &kube); err != nil {
		return nil, err
	}
	nodes := make([]upgradeNode, len(list.Members))
	var asking sync.WaitGroup
	for i, m := range list.Members {
		n := &nodes[i]
		n.member = m
		n.ready = slices.ContainsFunc(kube.Items, func(k corev1.Node) bool { return k.Name == m.Name && nodeIsReady(&k) })
		asking.Go(func() {
			one, cancel := context.WithTimeout(ctx, askFor)
			defer cancel()
			var answer v1.NodeRelease
			if err := a.do(one, http.MethodGet, pathOf("upgrade", "nodes", m.Name), nil, &answer); err != nil {
				n.problem = err.Error()
				return
			}
			n.release = &answer
		})
	}
	asking.Wait()
	return nodes, nil
}

func newUpgradeStatusCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the progress of the last rollout",
		Long:  "Show how far the last roll-out is, and which version each node runs now.",
		Example: templates.Examples(`
			# Show it
			clusterctl upgrade status

			# Why did it stop?
			clusterctl upgrade status -o json | jq -r .why`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var rollout v1.Rollout
			return show(cmd.Context(), f, streams, out, "show the roll-out", pathOf("upgrade"), &rollout, nil, func(w io.Writer) error {
				a, err := newAPI(f)
				if err != nil {
					return err
				}
				nodes, err := surveyUpgrade(cmd.Context(), a)
				if err != nil {
					fmt.Fprintln(streams.ErrOut, "Which versions run now is not known:", err)
				}
				return rolloutTable(w, rollout, nodes, time.Now())
			})
		},
	}
	cmd.Flags().StringVarP((*string)(&out), "output", "o", "", "One of: json, yaml")
	return cmd
}

func rolloutTable(w io.Writer, r v1.Rollout, nodes []upgradeNode, now time.Time) error {
	state, quiet := r.State, r.Silence(now)
	switch {
	case r.State == v1.RolloutStopped:
		state += ": " + r.Why
	case r.GoesOn(quiet):
		state += ", heard " + duration.HumanDuration(quiet) + " ago"
	case r.State == v1.RolloutRunning:
		state = "its command ended, and was heard " + duration.HumanDuration(quiet) + " ago: run clusterctl upgrade --to again"
	}
	fmt.Fprintf(w, "Release: %s\nState:   %s\n\n", r.Version, state)
	var rows [][]string
	for _, n := range r.Nodes {
		runs := "-"
		for _, k := range nodes {
			if k.name() == n.Name && k.release != nil {
				if runs = k.release.Version; k.release.Trial != nil {
					runs += " (on trial)"
				}
			}
		}
		rows = append(rows, []string{n.Name, orNone(n.Role), orNone(n.From), n.State, runs})
	}
	return printTable(w, []string{"NODE", "ROLE", "FROM", "STATE", "RUNS NOW"}, rows)
}

func newUpgradeTrustCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	return &cobra.Command{
		Use:   "trust [KEY]",
		Short: "Add a trusted release key, or list them",
		Long: templates.LongDesc(`
			Add a public key that releases may be signed with: the key itself, or a minisign
			public key file. Without KEY, list the keys.

			Anybody who has the secret key and may use clusterctl upgrade decides which program
			every node runs. A node with --release-keys trusts those instead.`),
		Example: templates.Examples(`
			# Add one
			clusterctl upgrade trust release.key.pub

			# List them
			clusterctl upgrade trust`),
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			a, err := newAPI(f)
			if err != nil {
				return err
			}
			if len(args) == 0 {
				return listReleaseKeys(cmd.Context(), a, streams.Out)
			}
			text := args[0]
			if b, err := os.ReadFile(text); err == nil {
				text = string(b)
			}
			key, err := releases.ParseKey(text)
			if err != nil {
				return err
			}
			in, err := jsonBody(v1.ReleaseKey{Key: key.String()})
			if err != nil {
				return err
			}
			if err := a.do(cmd.Context(), http.MethodPost, pathOf("upgrade", "keys"), in, nil); err != nil {
				return err
			}
			fmt.Fprintf(streams.Out, "key %s is trusted\n", key.Name())
			return nil
		},
	}
}

func listReleaseKeys(ctx context.Context, a *api, w io.Writer) error {
	var list v1.ReleaseKeyList
	if err := a.do(ctx, http.MethodGet, pathOf("upgrade", "keys"), nil, &list); err != nil {
		return err
	}
	var rows [][]string
	for _, k := range list.Keys {
		rows = append(rows, []string{k.ID, k.Key, age(k.Since, time.Now())})
	}
	return printTable(w, []string{"ID", "KEY", "AGE"}, rows)
}

func newUpgradeDistrustCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	return &cobra.Command{
		Use:     "distrust ID",
		Short:   "Remove a trusted release key",
		Long:    "Remove a trusted release key. Releases that are already installed keep running.",
		Example: templates.Examples("clusterctl upgrade distrust 1A2B3C4D5E6F7081"),
		Args:    oneArg("the id of a key", "clusterctl upgrade trust"),
		ValidArgsFunction: completeFrom(f, func(ctx context.Context, a *api) ([]string, error) {
			var list v1.ReleaseKeyList
			err := a.do(ctx, http.MethodGet, pathOf("upgrade", "keys"), nil, &list)
			var ids []string
			for _, k := range list.Keys {
				ids = append(ids, k.ID)
			}
			return ids, err
		}),
		RunE: func(cmd *cobra.Command, args []string) error {
			a, err := newAPI(f)
			if err != nil {
				return err
			}
			id := strings.ToUpper(args[0])
			if err := a.do(cmd.Context(), http.MethodDelete, pathOf("upgrade", "keys", id), nil, nil); err != nil {
				return err
			}
			fmt.Fprintf(streams.Out, "key %s is trusted no more\n", id)
			return nil
		},
	}
}
