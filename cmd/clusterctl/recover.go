package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	"k8s.io/kubectl/pkg/util/templates"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
)

// survey is the answer of GET /clusterd/v1/recovery.
type survey struct {
	Epoch       v1.Epoch   `json:"epoch"`
	Members     []survivor `json:"members"`
	Recommended string     `json:"recommended"`
	Obstacle    string     `json:"obstacle"`
}

type survivor struct {
	Name      string   `json:"name"`
	Address   string   `json:"address"`
	Voter     bool     `json:"voter"`
	Answered  bool     `json:"answered"`
	Problem   string   `json:"problem"`
	Epoch     v1.Epoch `json:"epoch"`
	LastTerm  uint64   `json:"lastTerm"`
	LastIndex uint64   `json:"lastIndex"`
	Applied   uint64   `json:"appliedIndex"`
	Leader    string   `json:"leader"`
}

type recoverOptions struct {
	from    string
	yes     bool
	timeout time.Duration
	genericiooptions.IOStreams
}

func newRecoverCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	o := recoverOptions{IOStreams: streams}
	cmd := &cobra.Command{
		Use:   "recover",
		Short: "Recover a cluster that has permanently lost its quorum",
		Long: templates.LongDesc(`
			Recover a cluster that has permanently lost its quorum: most of its voters are lost,
			so that no leader can be elected any more.

			The contacted server asks every reachable member for the term and index of its last
			log entry, and shows them. The state of one member, the most recent unless you choose
			another, starts a new epoch of the cluster. The other reachable members restart with a
			copy of it. All others are removed: what only they have stored is lost, and they are
			refused when they come back.

			The command refuses while enough voters are reachable to elect a leader: if you can
			start clusterd on the lost machines, do that instead. It works without a leader, with
			any running server.`),
		Example: templates.Examples(`
			# On a remaining server
			clusterctl recover --kubeconfig /var/lib/clusterd/admin.kubeconfig

			# Choose the member whose state is kept, without confirmation
			clusterctl recover --from n4 --yes`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			a, err := newAPI(f)
			if err != nil {
				return err
			}
			return o.run(cmd.Context(), a)
		},
	}
	cmd.Flags().StringVar(&o.from, "from", "", "Member whose state is kept (default: the one with the most recent)")
	cmd.Flags().BoolVarP(&o.yes, "yes", "y", false, "Do not ask for confirmation")
	cmd.Flags().DurationVar(&o.timeout, "timeout", 2*time.Minute, "How long to wait for a leader")
	return cmd
}

func (o *recoverOptions) run(ctx context.Context, a *api) error {
	var s survey
	if err := a.do(ctx, http.MethodGet, pathOf("recovery"), nil, &s); err != nil {
		return fmt.Errorf("survey of the members: %w", err)
	}
	slices.SortFunc(s.Members, func(a, b survivor) int { return strings.Compare(a.Name, b.Name) })
	if err := s.table(o.Out); err != nil {
		return err
	}
	if s.Obstacle != "" {
		return errors.New(s.Obstacle)
	}
	if o.from == "" {
		o.from = s.Recommended
	}
	kept, lost := s.split()
	if !slices.Contains(kept, o.from) {
		return fmt.Errorf("--from %q: it is none of the members that answer: %s", o.from, strings.Join(kept, ", "))
	}
	fmt.Fprintln(o.Out, "\n"+s.plan(o.from, kept, lost))
	if err := o.confirm(); err != nil {
		return err
	}
	in, err := jsonBody(v1.RecoveryRequest{From: o.from, Keep: kept})
	if err != nil {
		return err
	}
	var begun struct {
		Epoch v1.Epoch `json:"epoch"`
	}
	if err := a.do(ctx, http.MethodPost, pathOf("recovery"), in, &begun); err != nil {
		return fmt.Errorf("recover from %s: %w", o.from, err)
	}
	leader, err := o.await(ctx, a, begun.Epoch)
	if err != nil {
		return err
	}
	fmt.Fprintf(o.Out, "The cluster goes on in epoch %d; %s leads it.\n", begun.Epoch.Number, leader)
	return nil
}

func (s *survey) table(w io.Writer) error {
	var rows [][]string
	for _, m := range s.Members {
		vote, state, last, applied := "no", "reachable", "-", "-"
		if m.Voter {
			vote = "yes"
		}
		if m.Answered {
			last = fmt.Sprintf("%d/%d", m.LastTerm, m.LastIndex)
			applied = strconv.FormatUint(m.Applied, 10)
			if m.Epoch != s.Epoch {
				state = fmt.Sprintf("in epoch %d", m.Epoch.Number)
			}
		} else {
			state = m.Problem
		}
		if m.Name == s.Recommended {
			state += " (most recent)"
		}
		rows = append(rows, []string{m.Name, orNone(m.Address), vote, state, last, applied})
	}
	return printTable(w, []string{"NAME", "ADDRESS", "VOTES", "STATE", "TERM/INDEX", "APPLIED"}, rows)
}

// split tells the members that would take part from those left out.
func (s *survey) split() (kept, lost []string) {
	for _, m := range s.Members {
		if m.Answered && m.Epoch == s.Epoch {
			kept = append(kept, m.Name)
		} else {
			lost = append(lost, m.Name)
		}
	}
	return kept, lost
}

// plan says what a recovery would do.
func (s *survey) plan(from string, kept, lost []string) string {
	text := fmt.Sprintf("The cluster would go on in epoch %d from the state of %s", s.Epoch.Number+1, from)
	if from != s.Recommended {
		text += ", which is NOT the newest: " + s.Recommended + " knows more"
	}
	text += "."
	others := slices.DeleteFunc(slices.Clone(kept), func(n string) bool { return n == from })
	if len(others) > 0 {
		text += " Begun anew with a copy of it: " + strings.Join(others, ", ") + "."
	}
	if len(lost) > 0 {
		text += " Removed: " + strings.Join(lost, ", ") + "; what only they know is lost, and they are refused when they come back."
	}
	return text
}

func (o *recoverOptions) confirm() error {
	if o.yes {
		return nil
	}
	fmt.Fprint(o.Out, `Type "recover" to do it: `)
	line, err := bufio.NewReader(o.In).ReadString('\n')
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if strings.TrimSpace(line) != "recover" {
		return errors.New("nothing was changed (give --yes when not interactive)")
	}
	return nil
}

// await returns when the new epoch has a leader, and its name. The server that
// is asked starts again meanwhile.
func (o *recoverOptions) await(ctx context.Context, a *api, want v1.Epoch) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, o.timeout)
	defer cancel()
	last := errors.New("no leader yet")
	for {
		var s survey
		err := a.do(ctx, http.MethodGet, pathOf("recovery"), nil, &s)
		if err == nil && s.Epoch == want {
			var list v1.MemberList
			err = a.do(ctx, http.MethodGet, pathOf("members"), nil, &list)
			if err == nil && list.Leader != "" {
				return list.Leader, nil
			}
		}
		if err != nil && ctx.Err() == nil {
			last = err
		}
		select {
		case <-ctx.Done():
			return "", fmt.Errorf("epoch %d was begun, but has no leader after %s (%w): see `clusterctl members` and the logs of clusterd on %s", want.Number, o.timeout, last, o.from)
		case <-time.After(200 * time.Millisecond):
		}
	}
}
