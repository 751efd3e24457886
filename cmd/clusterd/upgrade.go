package main

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	v1 "github.com/clusterd/clusterd/apis/clusterd/v1"
	"github.com/clusterd/clusterd/cmd/clusterd/nodedir"
	"github.com/clusterd/clusterd/member/releases"
	"github.com/clusterd/clusterd/member/upgrade"
)

// nodeRelease is the program of this node, as servers ask for it: which one runs, and
// another in its place. A file is checked here, whoever sends it.
type nodeRelease struct {
	cfg     Config
	place   releases.Place
	started time.Time
	// own are the keys of this node's configuration; none: the cluster's hold.
	own []releases.Key
	// clusterKeys are the cluster's, each on a line.
	clusterKeys func(context.Context) ([]string, error)
	agentRuns   func() bool
	storeReady  func(context.Context) bool
	// reexecCh takes the *reexecError that ends this process, to be started again.
	reexecCh chan<- error
	log      *slog.Logger

	receiving sync.Mutex // held while a file is received
}

// releaseSilence is how long a file on its way may stand still.
const releaseSilence = time.Minute

// Limits of a trial.
const (
	minTrial = 10 * time.Second
	maxTrial = time.Hour
	// defaultUp is below the time after which the pods of a node that says nothing are
	// replaced (EvictionDelay), and leaves some for the way back.
	defaultUp = 25 * time.Second
	// upPeriod is how often a node on trial looks whether it is up.
	upPeriod = 200 * time.Millisecond
)

func newNodeRelease(cfg Config, log *slog.Logger) (*nodeRelease, error) {
	own, err := releases.ParseKeys(cfg.ReleaseKeys)
	if err != nil {
		return nil, err
	}
	place, err := releases.Here(cfg.Data)
	if err != nil {
		return nil, err
	}
	return &nodeRelease{cfg: cfg, place: place, started: time.Now().UTC(), own: own, log: room(log, "release")}, nil
}

func (n *nodeRelease) register(mux *http.ServeMux) {
	for pattern, do := range map[string]http.HandlerFunc{
		"GET " + v1.NodeReleasePath:               n.get,
		"PUT " + v1.NodeReleasePath + "/file":     n.putFile,
		"POST " + v1.NodeReleasePath + "/switch":  n.postSwitch,
		"POST " + v1.NodeReleasePath + "/confirm": n.postConfirm,
		"POST " + v1.NodeReleasePath + "/back":    n.postBack,
	} {
		mux.HandleFunc(pattern, serversOwn(do))
	}
}

// keys are those that this node trusts, and whose word that is.
func (n *nodeRelease) keys(ctx context.Context) ([]releases.Key, string, error) {
	if len(n.own) > 0 {
		return n.own, v1.KeysFromNode, nil
	}
	lines, err := n.clusterKeys(ctx)
	if err != nil {
		return nil, v1.KeysFromCluster, fmt.Errorf("ask for the keys that releases are signed with: %w", err)
	}
	keys, err := upgrade.Parse(lines)
	return keys, v1.KeysFromCluster, err
}

func (n *nodeRelease) get(w http.ResponseWriter, r *http.Request) {
	answer, err := n.status(r.Context())
	if err != nil {
		fail(w, err)
		return
	}
	reply(w, http.StatusOK, answer)
}

func (n *nodeRelease) status(ctx context.Context) (v1.NodeRelease, error) {
	s := v1.NodeRelease{
		Name: n.cfg.Name, Version: version(), Arch: releases.Arch, Started: n.started,
		AgentRuns: n.agentRuns(), StoreReady: n.storeReady(ctx), Keys: []string{}, Obstacle: obstacle(),
	}
	keys, from, err := n.keys(ctx)
	if err != nil {
		return s, err
	}
	s.KeysFrom = from
	for _, k := range keys {
		s.Keys = append(s.Keys, k.Name())
	}
	staged, err := n.place.Staged()
	if err != nil {
		return s, err
	}
	if staged != nil {
		s.Staged = &v1.StagedRelease{Version: staged.Version, Digest: staged.Digest, Key: staged.Key}
	}
	trial, err := n.place.Trial()
	if err != nil {
		return s, err
	}
	if trial != nil {
		s.Trial = &v1.ReleaseTrial{Version: trial.Version, From: trial.From, Deadline: trial.Deadline}
	}
	failure, err := n.place.Failure()
	if failure != nil {
		s.Failure = &v1.ReleaseFailure{Version: failure.Version, Why: failure.Why, At: failure.At}
	}
	return s, err
}

// obstacle says why a node that was started so does not exchange its program.
func obstacle() string {
	if len(os.Args) < 2 || !slices.Contains([]string{"run", "init", "join"}, os.Args[1]) {
		return "it was not started with `clusterd run`, `init` or `join`: its containers would end with it"
	}
	return ""
}

// putFile takes a release's file.
func (n *nodeRelease) putFile(w http.ResponseWriter, r *http.Request) {
	signature, err := base64.StdEncoding.DecodeString(r.Header.Get(v1.ReleaseSignature))
	if err != nil {
		refuse(w, http.StatusBadRequest, "the header "+v1.ReleaseSignature+" is not base64: "+err.Error())
		return
	}
	if !n.receiving.TryLock() {
		refuse(w, http.StatusConflict, "another file is on its way to this node: try again when it is there")
		return
	}
	defer n.receiving.Unlock()
	keys, _, err := n.keys(r.Context())
	if err != nil {
		fail(w, err)
		return
	}
	file := &slowReader{from: r.Body, conn: http.NewResponseController(w)}
	staged, err := n.place.Stage(file, signature, keys)
	if err != nil {
		if file.begun { // the sender hears nothing before it has sent all
			_, _ = io.Copy(io.Discard, file)
		}
		n.refused(w, "a release was not taken", err)
		return
	}
	n.log.Info("a release was received and checked", "version", staged.Version, "key", staged.Key)
	n.get(w, r)
}

// slowReader gives up on a sender that says nothing.
type slowReader struct {
	from  io.Reader
	conn  *http.ResponseController
	begun bool
}

func (s *slowReader) Read(p []byte) (int, error) {
	s.begun = true
	_ = s.conn.SetReadDeadline(time.Now().Add(releaseSilence)) // not every connection can
	n, err := s.from.Read(p)
	if err != nil {
		// The request ends with its connection's deadline, also while what came is unpacked.
		_ = s.conn.SetReadDeadline(time.Time{})
	}
	return n, err
}

// refused answers what a *releases.RefusedError says, or a fault of this machine.
func (n *nodeRelease) refused(w http.ResponseWriter, what string, err error) {
	n.log.Warn(what, "err", err)
	if releases.IsRefused(err) {
		refuse(w, http.StatusUnprocessableEntity, err.Error())
		return
	}
	fail(w, err)
}

func (n *nodeRelease) postSwitch(w http.ResponseWriter, r *http.Request) {
	var req v1.SwitchRequest
	if !decode(w, r, smallRequest, &req) {
		return
	}
	limit, err := time.ParseDuration(req.Limit)
	if err != nil || limit < minTrial || limit > maxTrial {
		refuse(w, http.StatusBadRequest, fmt.Sprintf("limit %q: give a duration from %s to %s", req.Limit, minTrial, maxTrial))
		return
	}
	up := defaultUp
	if req.StartLimit != "" {
		up, err = time.ParseDuration(req.StartLimit)
	}
	if err != nil || up <= 0 {
		refuse(w, http.StatusBadRequest, fmt.Sprintf("startLimit %q: give a duration such as 25s", req.StartLimit))
		return
	}
	if why := obstacle(); why != "" {
		refuse(w, http.StatusConflict, why)
		return
	}
	keys, _, err := n.keys(r.Context())
	if err != nil {
		fail(w, err)
		return
	}
	trial, err := n.place.Switch(r.Context(), req.Digest, keys, releases.Trial{From: version(), Args: runArgs(n.cfg.Data), Limit: limit, UpWithin: up}, n.guard, time.Now())
	if err != nil {
		n.refused(w, "the program was not exchanged", err)
		return
	}
	n.log.Info("this node goes on with another program, on trial", "version", trial.Version, "from", trial.From, "until", trial.Deadline)
	reply(w, http.StatusAccepted, v1.ReleaseTrial{Version: trial.Version, From: trial.From, Deadline: trial.Deadline})
	n.restart("this node goes on with version " + trial.Version)
}

// guard starts the guard of this process.
func (n *nodeRelease) guard() error { return n.place.SpawnGuard(os.Getpid(), n.cfg.Data) }

func (n *nodeRelease) postConfirm(w http.ResponseWriter, r *http.Request) {
	var req v1.TrialRequest
	if !decode(w, r, smallRequest, &req) {
		return
	}
	if err := n.place.Confirm(req.Version); err != nil {
		n.refused(w, "the trial was not confirmed", err)
		return
	}
	n.log.Info("upgrade confirmed", "version", req.Version)
	n.get(w, r)
}

func (n *nodeRelease) postBack(w http.ResponseWriter, r *http.Request) {
	var req v1.TrialRequest
	if !decode(w, r, smallRequest, &req) {
		return
	}
	// On its way back, too. It was started at the switch, and may have been killed.
	if err := n.guard(); err != nil {
		n.log.Warn("the way back is not guarded", "err", err)
	}
	if err := n.place.Back(req.Version, req.Why, time.Now()); err != nil {
		n.refused(w, "the program was not taken back", err)
		return
	}
	n.log.Warn("the program is taken back", "version", req.Version, "why", req.Why)
	reply(w, http.StatusAccepted, map[string]any{})
	n.restart("version " + req.Version + " is taken back")
}

// run notes when the node is up with a version that is on trial.
func (n *nodeRelease) run(ctx context.Context) error {
	t, err := n.place.Trial()
	if t != nil {
		n.log.Info("this version is on trial", "version", t.Version, "from", t.From, "until", t.Deadline)
	}
	tick := time.NewTicker(upPeriod)
	defer tick.Stop()
	for err == nil && t != nil && !t.Up {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if !n.agentRuns() || !n.storeReady(ctx) {
			continue
		}
		if _, err := n.place.Up(version()); err != nil {
			n.log.Warn("that this node is up could not be noted for its upgrade", "err", err)
			continue
		}
		break
	}
	<-ctx.Done()
	return nil
}

func (n *nodeRelease) restart(why string) {
	select {
	case n.reexecCh <- &reexecError{why, n.cfg.Data}:
	default: // it is about to
	}
}

// startOnTrial is the beginning of every `clusterd run`, before anything is read that
// a program on trial may not understand: its flags, variables and configuration. Where
// that program was taken back it returns a *reexecError. All is said on log, since how
// the node logs is not known yet.
func startOnTrial(args []string, log io.Writer) error {
	if len(args) < 2 || args[1] != "run" {
		return nil
	}
	data, err := dataOf(args[2:])
	if err == nil {
		data, err = realData(data)
	}
	if err != nil {
		return nil // there will be no node, and the command says why
	}
	for deadline := time.Now().Add(nodedir.LockTimeout); nodedir.Dir(data).Held(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			return nil // a node runs there, as the command will say: this is no start of it
		}
	}
	place, err := releases.Here(data)
	if err != nil {
		return err
	}
	return startAt(place, data, log)
}

func startAt(place releases.Place, data string, log io.Writer) error {
	back, on, err := place.Start(version(), time.Now())
	switch {
	case back && err == nil:
		return &reexecError{"version " + version() + " was on trial and is taken back", data}
	case errors.Is(err, fs.ErrPermission): // it needs root, which the command says
	case err != nil:
		fmt.Fprintf(log, "clusterd: what is known of an upgrade of this node cannot be used, it runs as it is: %v\n", err)
	case on != nil:
		if err := place.SpawnGuard(os.Getpid(), data); err != nil {
			fmt.Fprintf(log, "clusterd: nothing but the next start of this node can take version %s back: %v\n", on.Version, err)
		}
	}
	return nil
}

// dataOf is the data directory that a node's command line and environment name. What else
// is there is not understood, as far as that is possible: a flag that is not known takes
// the argument behind it for its value, unless that is a flag. It returns pflag.ErrHelp
// for who asks for help.
func dataOf(args []string) (string, error) {
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	flags.ParseErrorsAllowlist.UnknownFlags = true
	flags.Usage = func() {}
	data := flags.String("data", DefaultData, "")
	if err := flags.Parse(args); err != nil {
		return "", err
	}
	if value, set := os.LookupEnv(envName("data")); set && !flags.Changed("data") {
		return value, nil
	}
	return *data, nil
}

// noteStopping is called when the node has ended: whether somebody wanted that.
func noteStopping(ctx context.Context, cfg Config, log *slog.Logger) {
	if ctx.Err() == nil {
		return
	}
	place, err := releases.Here(cfg.Data)
	if err == nil {
		err = place.Stopping()
	}
	if err != nil {
		log.Warn("that this node was stopped could not be noted for its upgrade", "err", err)
	}
}

// guardTrial is called right before this process begins again with the installed
// program, which may be on trial for the first time.
func guardTrial(data string) error {
	place, err := releases.Here(data)
	if err != nil {
		return err
	}
	t, err := place.Trial()
	if err != nil || t == nil || t.Back != "" {
		return err
	}
	if t.Starts > 0 { // it begins again by its own will
		return place.Stopping()
	}
	return place.Guarded(*t, os.Getpid(), data, time.Now())
}

// upgradeGuardCommand is the guard, see releases.Place.Guard. People do not call it.
func upgradeGuardCommand() *cobra.Command {
	var data, exe string
	var pid int
	var detach, ready bool
	cmd := &cobra.Command{
		Use:    releases.GuardCommand,
		Short:  "Take a release back that does not work on this node",
		Args:   cobra.NoArgs,
		Hidden: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if detach {
				return releases.Detach()
			}
			watching := func() {}
			if ready {
				watching = releases.Ready
			}
			place := releases.Place{Exe: exe, State: nodedir.Dir(data).Path("upgrade")}
			start, args, err := place.Guard(pid, watching, cmd.ErrOrStderr())
			if err != nil || !start {
				return err
			}
			return fmt.Errorf("start the node again: %w", syscall.Exec(exe, args, os.Environ()))
		},
	}
	cmd.Flags().StringVar(&data, "data", "", "data directory of the node")
	cmd.Flags().StringVar(&exe, "exe", "", "the installed program")
	cmd.Flags().IntVar(&pid, "pid", 0, "the node's process")
	cmd.Flags().BoolVar(&detach, "detach", false, "go on in the background")
	cmd.Flags().BoolVar(&ready, releases.ReadyFlag, false, "say so when it watches")
	return cmd
}

// removeReleases removes what an upgrade has laid beside the program.
func removeReleases(data string) error {
	place, err := releases.Here(data)
	return errors.Join(err, place.CleanUp())
}
