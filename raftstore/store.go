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
	crand "crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"
	"golang.org/x/sync/semaphore"

	"github.com/clusterd/clusterd/raftstore/clock"
	"github.com/clusterd/clusterd/raftstore/datadir"
	"github.com/clusterd/clusterd/raftstore/disk"
	"github.com/clusterd/clusterd/raftstore/election"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/peer"
	"github.com/clusterd/clusterd/raftstore/quota"
	"github.com/clusterd/clusterd/raftstore/raftlog"
	"github.com/clusterd/clusterd/raftstore/raftside"
	"github.com/clusterd/clusterd/raftstore/wait"
	"github.com/clusterd/clusterd/raftstore/watch"
	"github.com/clusterd/clusterd/raftstore/wire"
)

// slowSync is from when on a leader sends ahead what it writes. A variable for
// tests.
var slowSync time.Duration = raftside.SlowSync

// Store is one member. All methods may be called concurrently.
type Store struct {
	cfg     Config
	session uint64 // random: this process's commands
	seq     atomic.Uint64

	fsm       *fsm
	hub       *watch.Hub
	clock     *clock.Clock
	streams   *peer.Streams
	peers     *peer.Calls
	raftSide  *raftside.Transport
	disk      *disk.Disk
	stable    *datadir.Stable
	log       raftlog.Log
	logs      *raftlog.Guarded // raft's own view of log
	snapshots *datadir.Snapshots
	raftPtr   atomic.Pointer[raft.Raft]
	hadState  bool
	lost      bool // the state was lost when it was opened
	epoch     Epoch

	leader     *election.Leader
	leadership *election.Leadership
	election   *election.Election
	readyTerm  atomic.Uint64 // the term in which this member leads and is ready; 0: it does not

	quotas        quota.Limits
	usage         *quota.Usage
	proposals     *proposals
	waiting       *wait.Outcomes[mvcc.Outcome]
	pending       *semaphore.Weighted
	applied       wait.Change
	readRounds    *wait.Rounds
	confirmRounds *wait.Rounds

	ctx    context.Context // ends when Close begins
	cancel context.CancelFunc
	wg     sync.WaitGroup
	mu     sync.Mutex
	closed bool
	done   chan struct{} // closed when Close is through
	// raftEnded is closed when nothing of raft runs any more, see errorOf.
	raftEnded chan struct{}

	failure failure
	noted   []Member  // in membersFile; housekeep's own
	yielded time.Time // when a leader without room last looked for one with; housekeep's own
}

// Open opens the data folder and starts the member: it takes part in raft, and
// serves once a leader is known. The first member of all is then told to
// Bootstrap; others wait until a member adds them. Close it.
func Open(cfg Config) (*Store, error) {
	if err := cfg.setDefaults(); err != nil {
		return nil, err
	}
	epoch, err := ReadEpoch(cfg.Dir)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open store in %s: %w", cfg.Dir, err), cfg.Listener.Close())
	}
	var random [8]byte
	if _, err := crand.Read(random[:]); err != nil {
		return nil, fmt.Errorf("draw a session number: %w", err)
	}
	s := &Store{
		cfg:        cfg,
		epoch:      epoch,
		session:    binary.LittleEndian.Uint64(random[:]),
		clock:      clock.New(cfg.Now, cfg.elapsed),
		leader:     election.NewLeader(),
		leadership: election.NewLeadership(),
		quotas:     quota.Limits{Bytes: cfg.QuotaBytes, Reserve: cfg.ReserveBytes, Folders: cfg.FolderQuotas, Prefixes: cfg.VitalPrefixes},
		usage:      quota.NewUsage(),
		proposals:  newProposals(),
		waiting:    wait.NewOutcomes[mvcc.Outcome](),
		pending:    semaphore.NewWeighted(cfg.MaxPendingBytes),
		done:       make(chan struct{}),
		raftEnded:  make(chan struct{}),
		failure:    failure{ch: make(chan struct{})},
		disk:       disk.New(cfg.Dir, cfg.MinFreeBytes, cfg.SlowDisk, cfg.freeBytes),
	}
	s.ctx, s.cancel = context.WithCancel(context.Background())
	s.fsm = &fsm{s: s}
	s.fsm.keyspace.Store(mvcc.New())
	s.streams = peer.NewStreams(peer.StreamConfig{
		ID: cfg.ID, Epoch: epoch, Listener: cfg.Listener, Dial: cfg.Dial, PeerID: cfg.PeerID, May: s.mayStream, Logger: cfg.Logger, Refused: cfg.Events.Refused,
	})
	s.peers = peer.NewCalls(s.ctx, cfg.ElectionTimeout*4, s.openCalls)
	s.readRounds = wait.NewRounds(s.boundRound(s.askReadIndex), s.start, s.ctx.Done())
	s.confirmRounds = wait.NewRounds(s.boundRound(s.confirmReadIndex), s.start, s.ctx.Done())
	s.hub = watch.NewHub(present{s}, s.cfg.Events.Watches)
	if err := s.openRaft(); err != nil {
		s.cancel()
		s.hub.Close()
		return nil, errors.Join(fmt.Errorf("open store in %s: %w", cfg.Dir, err), s.streams.Close(), s.closeFiles())
	}
	return s, nil
}

func (s *Store) openRaft() error {
	if err := os.MkdirAll(s.cfg.Dir, 0o700); err != nil {
		return err
	}
	if err := s.openState(); err != nil {
		return err
	}
	err := s.disk.Begin()
	s.tellRoom(s.disk.Short(), err)
	s.raftSide = raftside.New(raftside.Config{
		ID: s.cfg.ID, Streams: s.streams, Logger: s.cfg.Logger, Disk: s.disk, Changed: s.leader.Changed, Done: s.ctx.Done(), SlowSync: slowSync, Lost: s.lost,
	})
	corrupt := func(err error) {
		s.foundDamage(err, "a file of the store has become damaged")
		s.fail(err, false)
	}
	s.snapshots.Corrupt = corrupt
	s.snapshots.Checked.Store(true)
	s.logs = raftlog.NewGuarded(s.cfg.wrapLog(s.log), raftlog.Guard{
		Disk: s.disk, Latest: s.snapshots.Latest, Logger: s.cfg.Logger, Done: s.ctx.Done(),
		Corrupt: corrupt, Synced: s.cfg.Events.Synced, Ahead: s.raftSide,
	})
	cached, err := raft.NewLogCache(32, s.logs)
	if err != nil {
		return err
	}
	conf := raft.DefaultConfig()
	conf.LocalID = raft.ServerID(s.cfg.ID)
	conf.Logger = raftside.NewLogger(s.cfg.Logger)
	conf.HeartbeatTimeout = s.cfg.HeartbeatTimeout
	conf.ElectionTimeout = s.cfg.ElectionTimeout
	conf.LeaderLeaseTimeout = s.cfg.LeaderLease
	conf.CommitTimeout = raftside.CommitPause // raftSide is quicker
	conf.MaxAppendEntries = 32
	conf.ShutdownOnRemove = false
	conf.SnapshotThreshold = s.cfg.SnapshotEntries
	conf.SnapshotInterval = 30 * time.Second
	conf.TrailingLogs = 0 // raftlog.Guarded knows what to keep
	conf.NoLegacyTelemetry = true
	s.start(s.raftSide.RunGate)
	r, err := raft.NewRaft(conf, s.fsm, cached, s.stable, s.snapshots, s.raftSide)
	if err != nil {
		return errors.Join(err, s.raftSide.Close())
	}
	s.snapshots.Checked.Store(false)
	s.logs.Replaced.Store(false) // what was restored was our own
	s.raftPtr.Store(r)
	s.raftSide.Begin(r)
	s.election = election.New(election.Config{
		ID: s.cfg.ID, Raft: r, Voters: s.peers, Leader: s.leader, Dial: s.openCalls, Stand: s.raftSide.StandForElection, Lost: s.raftSide.Gate.Shut, Logger: s.cfg.Logger,
		HeartbeatTimeout: s.cfg.HeartbeatTimeout, ElectionTimeout: s.cfg.ElectionTimeout, Silence: s.cfg.silence,
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
	s.start(s.housekeep)
	s.start(s.compareForever)
	if s.raftSide.Gate.Shut() {
		s.start(s.rejoin)
	}
	for range entriesInFlight {
		s.start(s.proposeLoop)
	}
	s.start(func() { s.election.AttendLeader(s.ctx) })
	s.start(func() { s.election.AttendSilence(s.ctx) })
	if s.hadState {
		s.start(func() { s.election.Agree(s.ctx, "") })
	}
	return nil
}

// start runs f in a goroutine that Close waits for. After Close has begun it
// does nothing: who waits for f must wait for s.ctx as well.
func (s *Store) start(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	s.wg.Add(1)
	go func() {
		defer s.wg.Done()
		f()
	}()
}

// boundRound ends a round with the store, or when it takes longer than any
// leader would keep its lease.
func (s *Store) boundRound(do func(context.Context) (uint64, error)) func(context.Context) (uint64, error) {
	return func(context.Context) (uint64, error) {
		ctx, cancel := context.WithTimeout(s.ctx, 2*s.cfg.ElectionTimeout)
		defer cancel()
		return do(ctx)
	}
}

// openCalls opens a stream of calls to a member.
func (s *Store) openCalls(ctx context.Context, id string) (net.Conn, error) {
	return s.streams.Open(ctx, id, peer.CallStream)
}

// errorOf waits for raft's answer to a new future, see raftside.ErrorOf.
func (s *Store) errorOf(f raft.Future) error { return raftside.ErrorOf(f, s.raftEnded) }

func (s *Store) raft() *raft.Raft         { return s.raftPtr.Load() }
func (s *Store) keyspace() *mvcc.Keyspace { return s.fsm.keyspace.Load() }

// present is the keyspace that is in place now, for the watch hub.
type present struct{ s *Store }

func (p present) Revision() int64 { return p.s.keyspace().Revision() }
func (p present) Events(from int64, limit int) ([]mvcc.Event, int64, error) {
	return p.s.keyspace().Events(from, limit)
}

// HasState reports whether the data folder held a member's state when it was
// opened: then Bootstrap is not for this member.
func (s *Store) HasState() bool { return s.hadState }

// Bootstrap makes this member the only voter of a new store.
func (s *Store) Bootstrap() error {
	if s.raftSide.Gate.Shut() {
		return ErrStateExists // lost, and to be fetched from the others
	}
	err := s.raft().BootstrapCluster(onlyVoter(s.cfg.ID)).Error()
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

// housekeep ticks once a second: as leader it lets keys expire and history age
// when something is due, and on every member it marks the end of the log and
// takes a snapshot when much log has come. An idle store is not written to.
//
// What a start or a snapshot from elsewhere leaves behind in memory is about as
// much as the state itself. It is given back once, when it is over: Go would
// keep it until the state has grown by as much.
func (s *Store) housekeep() {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	behind, settled := s.raft().LastIndex(), 0
	for {
		select {
		case <-tick.C:
		case <-s.ctx.Done():
			return
		}
		if err := s.log.Mark(); err != nil && !disk.Full(err) {
			s.cfg.Logger.Warn("mark the end of the log", "err", err)
		}
		if s.fsm.restored.Swap(false) {
			behind, settled = s.raft().LastIndex(), 0
		}
		if s.keyspace().Index() >= behind {
			if settled++; settled == settledAfter {
				debug.FreeOSMemory()
			}
		}
		s.noteMembers()
		s.lookAtDisk()
		if s.IsLeader() && s.keyspace().Due(s.clock.Millis()) {
			s.tick()
		}
		if s.snapshotDue() && !s.disk.Short() {
			if err := s.Snapshot(s.ctx); err != nil && s.ctx.Err() == nil {
				s.cfg.Logger.Warn("snapshot", "err", err)
			}
		}
	}
}

// settledAfter is how many ticks of housekeep after the last of a start or a
// restore was applied its memory is given back.
const settledAfter = 3

// snapshotDue says whether there is enough log for a snapshot: SnapshotBytes,
// and as much as there was state at the last one, so that at most half of what
// goes to disk is snapshots. (As much as there is state now would never come
// together while all that is written is new.) Members differ by up to a half in
// what they call enough: all of them at once would be felt by every write.
func (s *Store) snapshotDue() bool {
	return s.fsm.logBytes.Load() >= enoughLog(s.cfg.SnapshotBytes, s.fsm.snapBytes.Load(), s.cfg.ID)
}

func enoughLog(least, state int64, id string) int64 {
	enough := max(least, state)
	return enough + enough/16*int64(datadir.Checksum([]byte(id))%8)
}

// tick puts a CmdTick into the log. One that is lost is made up for by the
// next one.
func (s *Store) tick() {
	cmd := mvcc.Command{Type: mvcc.CmdTick, ID: mvcc.CommandID{Session: s.session, Seq: s.seq.Add(1)}}
	done := make(chan struct{})
	entry := wire.AppendBatch(nil, s.clock.Millis(), [][]byte{wire.AppendCommand(nil, &cmd)})
	s.start(func() {
		defer close(done)
		if err := s.errorOf(s.raft().Apply(entry, 0)); err != nil {
			s.cfg.Logger.Debug("tick", "err", err)
		}
	})
	select {
	case <-done:
	case <-s.ctx.Done():
	}
}

// Close hands leadership over if this member leads and others can take it,
// stops, and returns when everything that was started has ended. Calls under
// way return ErrClosed or ErrUnknownOutcome.
func (s *Store) Close() error { return s.close(true) }

// Kill stops as a crash would: nothing is handed over or finished. For tests.
func (s *Store) Kill() { _ = s.close(false) }

func (s *Store) close(graceful bool) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		<-s.done
		return nil
	}
	s.closed = true
	s.mu.Unlock()
	defer close(s.done)

	if graceful && s.leads() && s.otherVoters() {
		s.letAnotherLead()
	}
	s.cancel()
	s.raftSide.Stop()
	s.peers.Close()
	stopped := s.raft().Shutdown()
	err := s.streams.Close() // unblocks whoever reads from a peer, raft included
	err = errors.Join(err, stopped.Error())
	close(s.raftEnded)
	s.peers.Wait()
	s.raftSide.Wait()
	s.streams.Wait()
	s.wg.Wait()
	s.hub.Close()
	return errors.Join(err, s.closeFiles())
}

// handOverPatience is how long a leader that stops waits for its successor.
// raft waits for its election timeout, also for one that stops as well.
const handOverPatience = 2 * time.Second

// letAnotherLead lets another voter lead. What is still under way then ends when raft
// is shut down.
func (s *Store) letAnotherLead() {
	done := make(chan error, 1)
	s.wg.Go(func() { done <- s.errorOf(s.raft().LeadershipTransfer()) })
	select {
	case err := <-done:
		if err != nil {
			s.cfg.Logger.Info("leadership was not handed over", "err", err)
		}
	case <-time.After(handOverPatience):
		s.cfg.Logger.Info("leadership was not handed over in time")
	}
}

func (s *Store) otherVoters() bool {
	ms, err := s.Members()
	if err != nil {
		return false
	}
	for _, m := range ms {
		if m.Voter && m.ID != s.cfg.ID {
			return true
		}
	}
	return false
}
