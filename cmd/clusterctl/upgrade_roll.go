package main

import (
	"cmp"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
)

// roller takes a release over the nodes of a plan. All that it needs to go on is on
// the nodes: killed at any point, it can be run again, and a node that was on trial
// then has gone back by itself or is found on trial.
type roller struct {
	a    *api
	file *releaseFile
	plan upgradePlan
	// limit is how long a node may take to pass its gate, start to begin with it.
	limit, start time.Duration
	rec          v1.Rollout
	recorded     time.Time // when the record was written last
	// begun: the roll-out is this command's.
	begun bool
	// taken says that another command runs the roll-out now: this one stood still for
	// so long that it was thought dead. It changes nothing more.
	taken error
	out   io.Writer // lines of the table
	// errOut is for remarks.
	errOut io.Writer
	wide   int // of the longest name
}

const (
	// gatePeriod is how often a node is looked at.
	gatePeriod = 500 * time.Millisecond
	// recordPeriod is how often the record says that this command lives.
	recordPeriod = 10 * time.Second
	// trialMargin is what a node waits for longer than this command does, which
	// can say why it goes back.
	trialMargin = time.Minute
	// backTimeout is how long a node that goes back may take beyond its trial.
	backTimeout = 2 * time.Minute
	// handoverTimeout is how long another leader may take.
	handoverTimeout = time.Minute
)

func newRoller(a *api, file *releaseFile, plan upgradePlan, limit, start time.Duration, out, errOut io.Writer) *roller {
	now := time.Now().UTC()
	r := &roller{a: a, file: file, plan: plan, limit: limit, start: start, out: out, errOut: errOut, wide: len("NODE")}
	r.rec = v1.Rollout{ID: fmt.Sprintf("%d-%d", now.UnixNano(), os.Getpid()), Version: file.manifest.Version, State: v1.RolloutRunning, Began: now}
	for _, n := range plan.steps {
		r.rec.Nodes = append(r.rec.Nodes, v1.RolloutNode{Name: n.name(), Role: n.role(), From: fromOf(n), State: v1.RolloutWaiting})
		r.wide = max(r.wide, len(n.name()))
	}
	for _, name := range plan.done {
		r.rec.Nodes = append(r.rec.Nodes, v1.RolloutNode{Name: name, From: file.manifest.Version, State: v1.RolloutDone})
	}
	return r
}

// fromOf is the version that a node goes back to.
func fromOf(n upgradeNode) string {
	if n.release.Trial != nil {
		return n.release.Trial.From
	}
	return n.release.Version
}

func (r *roller) line(node, role, state, detail string) {
	fmt.Fprintf(r.out, "%-*s  %-8s  %-11s  %s\n", r.wide, node, role, state, detail)
}

// run rolls the release out.
func (r *roller) run(ctx context.Context) error {
	if err := r.begin(ctx); err != nil {
		return fmt.Errorf("record the roll-out: %w", err)
	}
	r.line("NODE", "ROLE", "STATE", "DETAIL")
	err := r.send(ctx)
	for left := slices.Clone(r.plan.steps); err == nil && len(left) > 0; {
		var next int
		if next, err = r.next(ctx, left); err == nil {
			err = r.step(ctx, left[next])
			left = slices.Delete(left, next, next+1)
		}
	}
	if r.taken != nil {
		return err
	}
	r.rec.State = v1.RolloutDone
	if err != nil {
		r.rec.State, r.rec.Why = v1.RolloutStopped, err.Error()
	}
	if recorded := r.record(context.WithoutCancel(ctx)); recorded != nil && err == nil {
		fmt.Fprintln(r.errOut, "The release is everywhere, and that could not be recorded:", recorded)
	}
	return err
}

// closeRecord records a roll-out as done of which nothing is left to do: its command
// may have ended before it could say so.
func closeRecord(ctx context.Context, r *roller) error {
	var last v1.Rollout
	err := r.a.do(ctx, http.MethodGet, pathOf("upgrade"), nil, &last)
	if isCode(err, http.StatusNotFound) || err == nil && (last.Version != r.rec.Version || last.State == v1.RolloutDone) {
		return nil
	}
	if err != nil {
		return err
	}
	return r.run(ctx)
}

// begin takes the roll-out over: from a command that has ended at once, from one that
// was killed when nothing was heard of it for a while, and from no other.
func (r *roller) begin(ctx context.Context) error {
	warned := false
	err := r.await(ctx, v1.RolloutSilence+2*recordPeriod, func(ctx context.Context) error {
		err := r.record(ctx)
		if isCode(err, http.StatusConflict) && !warned {
			warned = true
			fmt.Fprintf(r.errOut, "%v; waiting whether it goes on …\n", err)
		}
		if err != nil && !isCode(err, http.StatusConflict) && !isCode(err, http.StatusServiceUnavailable) {
			return &permanentError{err}
		}
		return err
	})
	r.begun = err == nil
	return err
}

// record writes down how far it is.
func (r *roller) record(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, askFor)
	defer cancel()
	in, err := jsonBody(r.rec)
	if err == nil {
		err = r.a.do(ctx, http.MethodPut, pathOf("upgrade"), in, nil)
	}
	if err == nil {
		r.recorded = time.Now()
	}
	return err
}

// note records the state of a node. That it cannot be written down while a server
// begins again holds nothing up: the next does it.
func (r *roller) note(ctx context.Context, name, state, why string) {
	for i := range r.rec.Nodes {
		if n := &r.rec.Nodes[i]; n.Name == name {
			n.State, n.Why = state, why
		}
	}
	r.keep(ctx)
}

// keep records, and finds out whether the roll-out is another's.
func (r *roller) keep(ctx context.Context) {
	if err := r.record(ctx); isCode(err, http.StatusConflict) {
		r.taken = fmt.Errorf("another command has taken the roll-out over: %w", err)
	}
}

// send brings the file to all nodes before any of them is changed.
func (r *roller) send(ctx context.Context) error {
	for _, n := range r.plan.steps {
		if s := n.release.Staged; n.release.Trial != nil || s != nil && s.Digest == r.file.digest {
			r.line(n.name(), n.role(), "there", "the file is on its disk")
			continue
		}
		began := time.Now()
		if err := r.file.sendTo(ctx, r.a, n.name()); err != nil {
			return fmt.Errorf("send the release to %s, nothing was changed: %w", n.name(), err)
		}
		r.line(n.name(), n.role(), "sent", fmt.Sprintf("%s in %.1fs, signed by %s", size(r.file.size), time.Since(began).Seconds(), r.file.signature.KeyName()))
		if r.alive(ctx); r.taken != nil {
			return r.taken
		}
	}
	return nil
}

// alive says that this command lives, now and then.
func (r *roller) alive(ctx context.Context) {
	if r.begun && time.Since(r.recorded) >= recordPeriod {
		r.keep(ctx)
	}
}

// next chooses the node that comes now: the first that does not lead, or is on trial.
// All others have to be well, so that never two are away at once.
func (r *roller) next(ctx context.Context, left []upgradeNode) (int, error) {
	next := 0
	err := r.await(ctx, r.limit, func(ctx context.Context) error {
		var list v1.MemberList
		if err := r.a.do(ctx, http.MethodGet, pathOf("members"), nil, &list); err != nil {
			return err
		}
		if list.Leader == "" {
			return errors.New("there is no leader")
		}
		for _, m := range list.Members {
			if slices.Contains(r.plan.left, m.Name) {
				continue
			}
			if m.Gossip != "alive" && m.Gossip != "answers" {
				return fmt.Errorf("%s is %s", m.Name, m.Gossip)
			}
		}
		next = max(0, slices.IndexFunc(left, func(n upgradeNode) bool { return n.release.Trial != nil || n.name() != list.Leader }))
		if left[next].release.Trial != nil {
			return nil // it is not stopped
		}
		return quorumWithout(list, left[next].name())
	})
	if err != nil {
		return 0, fmt.Errorf("stopped before %s, which was not changed: the other members are not well: %w", left[0].name(), err)
	}
	return next, nil
}

// await asks until there is no error, or it is a permanentError, or the time is over.
func (r *roller) await(ctx context.Context, limit time.Duration, ask func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		one, stop := context.WithTimeout(ctx, askFor)
		err := ask(one)
		stop()
		var no *permanentError
		if err == nil || errors.As(err, &no) {
			return err
		}
		if r.alive(ctx); r.taken != nil {
			return &permanentError{r.taken}
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("not within %s: %w", limit, err)
		case <-time.After(gatePeriod):
		}
	}
}

// step exchanges the program of one node and waits until it is well; else it goes back.
func (r *roller) step(ctx context.Context, n upgradeNode) error {
	began := time.Now()
	gate := upgradeGate{node: n, version: r.file.manifest.Version}
	if err := r.prepare(ctx, &gate); err != nil {
		return fmt.Errorf("stopped before %s, which was not changed: %w", n.name(), err)
	}
	if n.release.Trial == nil {
		if err := r.handOver(ctx, n); err != nil {
			return fmt.Errorf("stopped before %s, which was not changed: %w", n.name(), err)
		}
		if r.note(ctx, n.name(), v1.RolloutTrial, ""); r.taken != nil {
			return r.taken
		}
		if err := r.post(ctx, n.name(), "switch", v1.SwitchRequest{Digest: r.file.digest, Limit: (r.limit + trialMargin).String(), StartLimit: r.start.String()}); err != nil {
			var no *refused
			if errors.As(err, &no) && no.code <= http.StatusInternalServerError {
				r.note(ctx, n.name(), v1.RolloutWaiting, err.Error())
				return fmt.Errorf("%s did not take the new program: %w", n.name(), err)
			}
			// It may have, and its answer was lost: the gate finds out.
			fmt.Fprintf(r.errOut, "%s: %v; looking whether it took the new program …\n", n.name(), err)
		}
	}
	r.line(n.name(), n.role(), "on trial", fmt.Sprintf("%s → %s", fromOf(n), r.file.manifest.Version))
	err := r.await(ctx, r.limit, func(ctx context.Context) error {
		now, err := observe(ctx, r.a, n.name())
		if err != nil {
			return err
		}
		return gate.judge(now)
	})
	if err == nil {
		// The node waits that much longer than the gate does; an election fits into it.
		err = r.await(ctx, trialMargin/2, func(ctx context.Context) error {
			return r.post(ctx, n.name(), "confirm", v1.TrialRequest{Version: r.file.manifest.Version})
		})
	}
	if r.taken != nil {
		return r.taken
	}
	if err != nil {
		return r.back(ctx, n, err)
	}
	r.note(ctx, n.name(), v1.RolloutDone, "")
	r.line(n.name(), n.role(), "done", fmt.Sprintf("Ready after %.1fs, %s", time.Since(began).Seconds(), containersRunOn(len(gate.before))))
	return nil
}

func containersRunOn(n int) string {
	if n == 1 {
		return "1 container runs on"
	}
	return fmt.Sprintf("%d containers run on", n)
}

// prepare takes down how the node is before.
func (r *roller) prepare(ctx context.Context, gate *upgradeGate) error {
	return r.await(ctx, r.limit, func(ctx context.Context) error {
		var now v1.NodeRelease
		if err := r.a.do(ctx, http.MethodGet, pathOf("upgrade", "nodes", gate.node.name()), nil, &now); err != nil {
			return err
		}
		last := now.Failure
		if gate.node.release.Trial != nil { // it may have gone back since it was found on trial
			last = gate.node.release.Failure
		}
		if last != nil {
			gate.since = last.At
		}
		pods, err := podsOn(ctx, r.a, gate.node.name())
		gate.before = containersOf(pods)
		return err
	})
}

// handOver makes another server lead than the node that comes next.
func (r *roller) handOver(ctx context.Context, n upgradeNode) error {
	var list v1.MemberList
	err := r.await(ctx, r.limit, func(ctx context.Context) error {
		return r.a.do(ctx, http.MethodGet, pathOf("members"), nil, &list)
	})
	voters := 0
	for _, m := range list.Members {
		if m.Role == v1.RoleVoter {
			voters++
		}
	}
	if err != nil || list.Leader != n.name() || voters < 2 {
		return err
	}
	asked := false
	return r.await(ctx, handoverTimeout, func(ctx context.Context) error {
		if !asked {
			if err := r.a.do(ctx, http.MethodPost, pathOf("upgrade", "handover"), nil, nil); err != nil {
				return fmt.Errorf("hand the leadership over: %w", err)
			}
			asked = true
		}
		if err := r.a.do(ctx, http.MethodGet, pathOf("members"), nil, &list); err != nil {
			return err
		}
		switch list.Leader {
		case "":
			return errors.New("there is no leader")
		case n.name():
			asked = false
			return fmt.Errorf("%s leads still", n.name())
		}
		r.line(n.name(), n.role(), "handed over", list.Leader+" leads")
		return nil
	})
}

func (r *roller) post(ctx context.Context, node, what string, in any) error {
	body, err := jsonBody(in)
	if err != nil {
		return err
	}
	return r.a.do(ctx, http.MethodPost, pathOf("upgrade", "nodes", node, what), body, nil)
}

// back takes the program back that did not pass, and says what came of it. The error
// is why the roll-out stops.
func (r *roller) back(ctx context.Context, n upgradeNode, why error) error {
	from := fromOf(n)
	r.line(n.name(), n.role(), "failed", why.Error())
	words := strings.TrimSpace(why.Error())
	err := r.await(ctx, r.limit+trialMargin+backTimeout, func(ctx context.Context) error {
		now, err := observe(ctx, r.a, n.name())
		if err != nil {
			return err
		}
		if t := now.release.Trial; t != nil && t.Version == r.file.manifest.Version {
			if err := r.post(ctx, n.name(), "back", v1.TrialRequest{Version: t.Version, Why: words}); err != nil {
				return err
			}
			return errors.New("it goes back")
		}
		switch {
		case now.release.Version != from:
			return fmt.Errorf("it runs %s", now.release.Version)
		case !now.release.AgentRuns || !now.ready:
			return errors.New("it runs " + from + " and is not Ready")
		}
		return nil
	})
	if err != nil {
		r.note(ctx, n.name(), v1.RolloutFailed, words)
		return fmt.Errorf("%s did not become well with %s (%s), and is not well after the way back: %w; look at the log of clusterd there. The nodes behind it were not changed", n.name(), r.file.manifest.Version, words, err)
	}
	r.note(ctx, n.name(), v1.RolloutTookBack, words)
	r.line(n.name(), n.role(), "taken back", "Ready with "+from)
	return fmt.Errorf("%s did not become well with %s and is back at %s: %s. The nodes behind it were not changed; those before it run %s", n.name(), r.file.manifest.Version, from, words, r.file.manifest.Version)
}

// sendTo brings the file to one node.
func (f *releaseFile) sendTo(ctx context.Context, a *api, node string) error {
	file, err := os.Open(f.path)
	if err != nil {
		return err
	}
	defer file.Close()
	in := &body{Reader: file, contentType: "application/gzip", size: f.size, header: http.Header{
		v1.ReleaseSignature: {base64.StdEncoding.EncodeToString(f.signed)},
	}}
	var now v1.NodeRelease
	if err := a.do(ctx, http.MethodPut, pathOf("upgrade", "nodes", node, "file"), in, &now); err != nil {
		return err
	}
	if now.Staged == nil || now.Staged.Digest != f.digest {
		return fmt.Errorf("the node has another file than was sent (%s)", cmp.Or(stagedDigest(now), "none"))
	}
	return nil
}

func stagedDigest(n v1.NodeRelease) string {
	if n.Staged == nil {
		return ""
	}
	return n.Staged.Digest
}
