// Package raftstore is a replicated, revisioned keyspace: every member holds
// all of it in memory, hashicorp/raft puts the changes in one order and on
// disk, and package mvcc gives them their meaning. Clients write, read and
// watch through any member.
//
// It knows nothing of what is stored, of addresses, or of who may be a member:
// streams come in authenticated, and are dialed by member ID.
package raftstore

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/capability"
	"github.com/clusterd/clusterd/raftstore/clock"
	"github.com/clusterd/clusterd/raftstore/disk"
	"github.com/clusterd/clusterd/raftstore/divergence"
	"github.com/clusterd/clusterd/raftstore/election"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/peer"
	"github.com/clusterd/clusterd/raftstore/quota"
	"github.com/clusterd/clusterd/raftstore/raftlog"
	"github.com/clusterd/clusterd/raftstore/raftside"
	"github.com/clusterd/clusterd/raftstore/recovery"
	"github.com/clusterd/clusterd/raftstore/settle"
	"github.com/clusterd/clusterd/raftstore/state"
	"github.com/clusterd/clusterd/raftstore/wait"
	"github.com/clusterd/clusterd/raftstore/watch"
)

// slowSync is from when on a leader sends ahead what it writes. A variable for
// tests.
var slowSync time.Duration = raftside.SlowSync

// Store is one member. All methods may be called concurrently.
type Store struct {
	cfg Config

	fsm      *fsm
	hub      *watch.Hub
	clock    *clock.Clock
	streams  *peer.Streams
	peers    *peer.Calls
	raftSide *raftside.Transport
	disk     *disk.Disk
	state    *state.State
	logs     *raftlog.Guarded // raft's own view of state.Log
	raftPtr  atomic.Pointer[raft.Raft]
	epoch    Epoch

	leader     *election.Leader
	leadership *election.Leadership
	divergence *divergence.Check
	election   *election.Election
	readyTerm  atomic.Uint64 // the term in which this member leads and is ready; 0: it does not

	commands      *commands
	quotas        quota.Limits
	usage         *quota.Usage
	capabilities  *capability.Known
	settling      *settle.Settling
	changing      chan struct{} // holds one while this member, as the leader, checks and makes a change of the members
	founding      sync.Mutex    // held while this member founds a store, or looks at the others' formats
	applied       wait.Change
	readRounds    *wait.Rounds
	confirmRounds *wait.Rounds

	life
}

// Open opens the data directory and starts the member: it takes part in raft, and
// serves once a leader is known. The first member of all is bootstrapped then
// (Bootstrap); others wait until a member adds them. Close it.
func Open(cfg Config) (*Store, error) {
	if err := cfg.setDefaults(); err != nil {
		return nil, err
	}
	epoch, err := ReadEpoch(cfg.Dir)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open store in %s: %w", cfg.Dir, err), cfg.Listener.Close())
	}
	commands, err := newCommands(cfg.MaxPendingBytes, cfg.MayWaitFor)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("draw a session number: %w", err), cfg.Listener.Close())
	}
	s := &Store{
		cfg:        cfg,
		epoch:      epoch,
		commands:   commands,
		changing:   make(chan struct{}, 1),
		clock:      clock.New(cfg.Wall, cfg.elapsed),
		leader:     election.NewLeader(),
		leadership: election.NewLeadership(),
		quotas:     quota.Limits{Bytes: cfg.QuotaBytes, Reserve: cfg.ReserveBytes, Folders: cfg.FolderQuotas, Prefixes: cfg.VitalPrefixes},
		usage:      quota.NewUsage(),
		disk:       disk.New(cfg.Dir, cfg.MinFreeBytes, cfg.SlowDisk, cfg.freeBytes),
	}
	s.begin()
	s.fsm = &fsm{s: s}
	s.fsm.keyspace.Store(mvcc.New())
	s.streams = peer.NewStreams(peer.StreamConfig{
		ID: cfg.ID, Epoch: epoch, Listener: cfg.Listener, Dial: cfg.Dial, PeerID: cfg.PeerID, May: s.mayStream, Logger: cfg.Logger, Refused: cfg.Events.Refused,
	})
	s.peers = peer.NewCalls(s.ctx, max(cfg.ElectionTimeout*4, cfg.LeaderLease*2), s.openCalls)
	s.capabilities = capability.New(s.peers)
	s.readRounds = wait.NewRounds(s.boundRound(s.askReadIndex), s.start, s.ctx.Done())
	s.confirmRounds = wait.NewRounds(s.boundRound(s.confirmReadIndex), s.start, s.ctx.Done())
	s.hub = watch.NewHub(present{s}, s.cfg.Events.Watches)
	if err := s.openRaft(); err != nil {
		s.cancel()
		s.hub.Close()
		return nil, errors.Join(fmt.Errorf("open store in %s: %w", cfg.Dir, err), s.streams.Close(), s.closeState())
	}
	return s, nil
}

func (s *Store) openRaft() error {
	if err := s.openState(); err != nil {
		return err
	}
	err := s.disk.Begin()
	s.logDiskSpace(s.disk.Short(), err)
	s.raftSide = raftside.New(raftside.Config{
		ID: s.cfg.ID, Streams: s.streams, Logger: s.cfg.Logger, Disk: s.disk, Changed: s.leader.Changed, Done: s.ctx.Done(), SlowSync: slowSync, Lost: s.state.Lost,
		Heartbeat: s.cfg.HeartbeatTimeout / 10,
	})
	corrupt := func(err error) {
		s.cfg.Logger.Error("a file of the store has become damaged", "err", err)
		s.damaged(err)
		s.fail(err, false)
	}
	s.state.Snapshots.Corrupt, s.state.Snapshots.Allow = corrupt, s.maySnapshot
	s.state.Snapshots.Checked.Store(true)
	s.logs = raftlog.NewGuarded(s.cfg.wrapLog(s.state.Log), raftlog.Guard{
		Disk: s.disk, Latest: s.state.Snapshots.Latest, Logger: s.cfg.Logger, Done: s.ctx.Done(),
		Corrupt: corrupt, Synced: s.cfg.Events.Synced, Ahead: s.raftSide,
	})
	cached, err := raft.NewLogCache(32, s.logs)
	if err != nil {
		return err
	}
	conf := raft.DefaultConfig()
	conf.LocalID = raft.ServerID(s.cfg.ID)
	conf.Logger = raftside.NewLogger(s.cfg.Logger)
	// The quick decisions are package election's, which knows slow from gone.
	conf.HeartbeatTimeout = max(s.cfg.HeartbeatTimeout, s.cfg.LeaderLease)
	conf.ElectionTimeout = max(s.cfg.ElectionTimeout, conf.HeartbeatTimeout)
	conf.LeaderLeaseTimeout = s.cfg.LeaderLease
	conf.CommitTimeout = raftside.CommitPause // raftSide is quicker
	conf.MaxAppendEntries = 32
	conf.ShutdownOnRemove = false
	conf.SnapshotThreshold = s.cfg.SnapshotEntries
	conf.SnapshotInterval = 30 * time.Second
	conf.TrailingLogs = 0 // raftlog.Guarded knows what to keep
	conf.NoLegacyTelemetry = true
	s.start(s.raftSide.RunGate)
	r, err := raft.NewRaft(conf, s.fsm, cached, s.state.Stable, s.state.Snapshots, s.raftSide)
	if err != nil {
		return errors.Join(err, s.raftSide.Close())
	}
	s.state.Snapshots.Checked.Store(false)
	s.raftPtr.Store(r)
	s.raftSide.Begin(r)
	s.begins(r)
	return nil
}

// begins makes what works with a raft that runs, and starts it.
func (s *Store) begins(r *raft.Raft) {
	s.election = election.New(election.Config{
		ID: s.cfg.ID, Raft: r, Voters: s.peers, Leader: s.leader, Dial: s.openCalls, Stand: s.raftSide.StandForElection, GiveUp: s.raftSide.GiveUpElection,
		Gap: s.raftSide.Gap, Lost: s.raftSide.Gate.Shut, Logger: s.cfg.Logger,
		HeartbeatTimeout: s.cfg.HeartbeatTimeout, ElectionTimeout: s.cfg.ElectionTimeout, Silence: s.cfg.silence,
	})
	s.divergence = divergence.New(divergence.Config{
		ID: s.cfg.ID, Hashes: &s.fsm.hashes, Members: s.peers, IDs: s.memberIDs, Leads: s.IsLeader, Reach: s.waitIndex, Logger: s.cfg.Logger,
		Applied: func() uint64 { return s.keyspace().Index() },
		Stop:    func(err error) { s.fail(err, true) },
	})

	observed := make(chan raft.Observation, 16)
	r.RegisterObserver(raft.NewObserver(observed, false, func(o *raft.Observation) bool {
		switch o.Data.(type) {
		case raft.LeaderObservation, raft.RaftState:
			return true
		}
		return false
	}))
	s.streams.Start(s.serveCalls)
	s.start(func() { s.leaderLoop(observed) })
	s.start(func() { s.leadership.Run(s.ctx.Done()) })
	s.start(s.raftSide.RunHeartbeats)
	s.start(s.housekeep)
	s.start(func() { s.divergence.Run(s.ctx) })
	s.start(s.formatLoop)
	if s.raftSide.Gate.Shut() {
		s.start(s.rejoin)
	}
	for range entriesInFlight {
		s.start(s.proposeLoop)
	}
	s.start(func() { s.election.MonitorLeader(s.ctx) })
	s.start(func() { s.election.MonitorSilence(s.ctx) })
	if s.state.Had {
		s.start(func() { s.election.Agree(s.ctx, "") })
	}
}

// openState opens the data directory.
func (s *Store) openState() (err error) {
	if err := os.MkdirAll(s.cfg.Dir, 0o700); err != nil {
		return err
	}
	s.state, err = state.Open(state.Options{
		Dir: s.cfg.Dir, ID: s.cfg.ID, Engine: s.cfg.LogEngine, Logger: s.cfg.Logger, Damaged: s.damaged, Now: s.cfg.Now,
	})
	if err != nil {
		return err
	}
	s.state.Stable.Failed = func(err error) { s.fail(err, false) }
	return s.openFormat()
}

func (s *Store) damaged(err error) {
	if fn := s.cfg.Events.Damaged; fn != nil {
		fn(err)
	}
}

// closeState closes the data directory's files, if they are open.
func (s *Store) closeState() error {
	if s.state == nil {
		return nil
	}
	return s.state.Close()
}

// memberIDs are those of all members.
func (s *Store) memberIDs() ([]string, error) {
	ms, err := s.Members()
	ids := make([]string, len(ms))
	for i := range ms {
		ids[i] = ms[i].ID
	}
	return ids, err
}

// openCalls opens a stream of calls to a member.
func (s *Store) openCalls(ctx context.Context, id string) (net.Conn, error) {
	return s.streams.Open(ctx, id, peer.CallStream)
}

func (s *Store) raft() *raft.Raft         { return s.raftPtr.Load() }
func (s *Store) keyspace() *mvcc.Keyspace { return s.fsm.keyspace.Load() }

// present is the keyspace that is in place now, for the watch hub.
type present struct{ s *Store }

func (p present) Revision() int64 { return p.s.keyspace().Revision() }
func (p present) Events(from int64, limit int) ([]mvcc.Event, int64, error) {
	return p.s.keyspace().Events(from, limit)
}

// Bootstrap makes this member the only voter of a new store.
func (s *Store) Bootstrap() error {
	if s.raftSide.Gate.Shut() {
		return ErrStateExists // lost, and to be fetched from the others
	}
	s.founding.Lock()
	err := s.raft().BootstrapCluster(recovery.OnlyVoter(s.cfg.ID)).Error()
	if err == nil && !s.cfg.older {
		err = s.settling.Found()
	}
	s.founding.Unlock()
	if errors.Is(err, raft.ErrCantBootstrap) {
		return ErrStateExists
	}
	if err == nil {
		s.start(s.election.Stand)
	}
	return err
}

// Snapshot writes a snapshot now and trims the log.
func (s *Store) Snapshot(ctx context.Context) error {
	done := make(chan error, 1)
	s.start(func() { done <- s.errorOf(s.raft().Snapshot()) })
	select {
	case err := <-done:
		if errors.Is(err, raft.ErrNothingNewToSnapshot) {
			err = nil
		}
		return err
	case <-ctx.Done():
		return ctx.Err()
	case <-s.ctx.Done():
		return ErrClosed
	}
}
