package raftstore

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"time"

	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/settle"
	"github.com/clusterd/clusterd/raftstore/watch"
)

// Config is what a Store needs to know. Zero values of the fields that are not
// required mean their default.
type Config struct {
	// ID is this member's name in the raft configuration: the fingerprint of
	// its key, never an address. Required.
	ID string
	// Dir is the data directory, made if need be. One process may use it at a
	// time. Required.
	Dir string
	// Listener accepts streams of other members, already authenticated. The
	// store owns it and closes it. Required.
	Listener net.Listener
	// Dial opens an authenticated stream to the member with the given ID,
	// wherever it lives now. Called concurrently. Required.
	Dial func(ctx context.Context, id string) (net.Conn, error)
	// PeerID returns the ID that the other end of a stream from Listener has
	// proved to have. Streams are bound to it, see peerrights.go. Default: every
	// stream is trusted, for tests and benchmarks alone.
	PeerID func(net.Conn) string
	// LogEngine keeps raft's log. A log that was kept otherwise is converted
	// when the store is opened. Default: LogSegments.
	LogEngine LogEngine
	// Known says whether a peer that is not in the configuration belongs there.
	// It must not wait. Default: none does.
	Known func(id string) bool
	// Logger takes the store's and raft's logs. Default: slog.Default().
	Logger *slog.Logger
	// Events are called when something happens. See EventListener.
	Events EventListener
	// Now is the clock from which a leader makes store time. Default: time.Now.
	Now func() time.Time
	// Wall is what time it is, where the owner knows better than this machine's clock: the
	// first leader after an outage takes it for store time. Default: Now.
	Wall func() time.Time

	// HeartbeatTimeout is how long a follower waits for its leader before it
	// asks for an election, on a machine that is not overloaded. Default: 1 s.
	HeartbeatTimeout time.Duration
	// ElectionTimeout is how long a candidate waits for votes, likewise. Default and
	// minimum: HeartbeatTimeout.
	ElectionTimeout time.Duration
	// LeaderLease is how long a leader that reaches no majority continues before
	// it steps down. raft's own timeouts are at least as long. Default: five times
	// HeartbeatTimeout.
	LeaderLease time.Duration
	// LeaderWait is how long a call waits for a leader to appear before it
	// returns ErrNoLeader, if its context lasts that long. It counts from the
	// loss of the last leader, and a call waits a second at least. Default: 8 s.
	LeaderWait time.Duration

	// HistoryBytes and HistoryAge bound the history of old versions. They take
	// effect when this member leads. Default: 64 MiB, 1 h.
	HistoryBytes int64
	HistoryAge   time.Duration
	// ResultWindow is the number of transactions whose outcome is remembered,
	// so that a repeated one takes effect once. Default: 32768.
	ResultWindow int64

	// SnapshotEntries and SnapshotBytes: a snapshot is taken when this much
	// log has come since the last one; as for the bytes, not before there is as
	// much log as the last snapshot takes of the disk, and a third of the state.
	// Default: 20000 entries, 64 MiB.
	SnapshotEntries uint64
	SnapshotBytes   int64
	// FormatAfter is for how long all members of a store that was upgraded have to
	// have known a new format, one that versions before cannot read, until it is
	// used. See package settle. Default: 24 h.
	FormatAfter time.Duration
	// MinFreeBytes is how much room the data directory's disk must have: with less
	// of it, this member as leader takes only deletes and what the reserve is
	// for. Default: 64 MiB.
	MinFreeBytes int64
	// SlowDisk is how long one write to the log may take before a leader gives
	// up its leadership; more where all writes are slow. Default: 1 s.
	SlowDisk time.Duration

	// MaxKeyBytes, MaxValueBytes and MaxTxnBytes bound what a transaction may
	// hold. Default: 4 KiB, 3 MiB, 8 MiB.
	MaxKeyBytes, MaxValueBytes, MaxTxnBytes int
	// QuotaBytes bounds the live keys and values. Default: 8 GiB.
	QuotaBytes int64
	// ReserveBytes is the part of QuotaBytes that only writes under
	// VitalPrefixes and small growth of existing keys may use. Default: a
	// sixteenth of QuotaBytes.
	ReserveBytes int64
	// VitalPrefixes begin the keys without which the cluster cannot even be
	// cleaned up.
	VitalPrefixes []string
	// FolderQuotas bound the live keys and values below folders, such as
	// "/a/b/". The reserve's writers may go beyond them.
	FolderQuotas map[string]int64

	// MaxBatchBytes and MaxBatchCommands bound what is coalesced into one log
	// entry. Default: 512 KiB, 1024.
	MaxBatchBytes    int
	MaxBatchCommands int
	// MayWait says of a transaction that puts one key and does nothing else, by who
	// asked for it, that it need not be in the log at once: as leader, this member
	// gathers such ones for MayWaitFor, unless another command comes before, with which
	// they go. It must not block or keep what it gets. Default: none may.
	MayWait func(origin, key []byte) bool
	// MayWaitFor is for how long. Default: 500 ms.
	MayWaitFor time.Duration
	// MaxPendingBytes bounds the writes of this member that are under way;
	// more wait. Default: 64 MiB.
	MaxPendingBytes int64

	// For tests: a log that misbehaves, a disk that says it is full, entries
	// that come out different, a monotonic clock beside one that is set, less
	// timeout of a silent leader, an earlier version. Zero in production.
	wrapLog   func(raft.LogStore) raft.LogStore
	freeBytes func(dir string) (int64, error)
	mangle    func(*mvcc.Batch)
	elapsed   func() time.Duration
	silence   time.Duration // see election.Config
	lookAt    time.Duration // how often the members' formats are asked for
	older     bool          // it does not know format 2, see package settle
	knows     int           // the highest format that it knows; 0: settle.Newest
}

// EventListener is called for what happens in a Store. Any function may be nil.
// They are called from the store's own goroutines: they must return at once and
// must not call the store.
type EventListener struct {
	// LeaderChanged: id is "" while there is none.
	LeaderChanged func(id string, term uint64)
	// Applied: a log entry's commands were applied.
	Applied func(index uint64, commands int, took time.Duration)
	// Written: a transaction of origin, through whichever member, was decided at a store time (unix
	// milliseconds), succeeded or not, and took or would have taken so many bytes
	// of the history. It is called with the same on every member, also while it replays its
	// log.
	Written func(origin string, millis, bytes int64)
	// Committed: one of this leader's log entries was committed and applied.
	Committed func(commands, bytes int, took time.Duration)
	// Restored: the keyspace was replaced by a snapshot's.
	Restored func(d mvcc.Digest)
	// Damaged: a file of the data directory was found damaged, usually a
	// *DamageError. What is done about it is in the log.
	Damaged func(err error)
	// Snapshotted: a snapshot was written.
	Snapshotted func(index uint64, took time.Duration)
	// Synced: entries were written to the log and are on disk.
	Synced func(entries int, took time.Duration)
	// Watches is called with how the watchers are served.
	Watches watch.Listener
	// Refused: another member was reached and did not take the stream. Mostly
	// it is just stopping; or this one is no member to it, or lives in another
	// epoch.
	Refused func(id string)
}

func (c *Config) setDefaults() error {
	if c.ID == "" || c.Dir == "" || c.Listener == nil || c.Dial == nil {
		return errors.New("raftstore: Config needs ID, Dir, Listener and Dial")
	}
	setDefault(&c.LogEngine, LogEngines[0])
	if err := c.LogEngine.Check(); err != nil {
		return fmt.Errorf("%w: %w", ErrInvalid, err)
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	if c.Now == nil {
		c.Now = time.Now
	}
	if c.elapsed == nil {
		now, start := c.Now, c.Now()
		c.elapsed = func() time.Duration { return now().Sub(start) }
	}
	if c.Wall == nil {
		c.Wall = c.Now
	}
	setDefault(&c.HeartbeatTimeout, time.Second)
	setDefault(&c.ElectionTimeout, c.HeartbeatTimeout)
	setDefault(&c.LeaderLease, 5*c.HeartbeatTimeout)
	setDefault(&c.LeaderWait, 8*time.Second)
	setDefault(&c.HistoryBytes, mvcc.DefaultLimits.HistoryBytes)
	setDefault(&c.HistoryAge, time.Hour)
	setDefault(&c.ResultWindow, mvcc.DefaultLimits.Window)
	setDefault(&c.SnapshotEntries, 20000)
	setDefault(&c.SnapshotBytes, 64<<20)
	setDefault(&c.FormatAfter, 24*time.Hour)
	setDefault(&c.knows, settle.Newest)
	setDefault(&c.lookAt, min(max(c.FormatAfter/20, time.Second), 10*time.Second))
	setDefault(&c.MinFreeBytes, 64<<20)
	setDefault(&c.SlowDisk, time.Second)
	if c.wrapLog == nil {
		c.wrapLog = func(l raft.LogStore) raft.LogStore { return l }
	}
	setDefault(&c.MaxKeyBytes, 4<<10)
	setDefault(&c.MaxValueBytes, 3<<20)
	setDefault(&c.MaxTxnBytes, 8<<20)
	setDefault(&c.QuotaBytes, 8<<30)
	setDefault(&c.ReserveBytes, c.QuotaBytes/16)
	setDefault(&c.MaxBatchBytes, 512<<10)
	setDefault(&c.MaxBatchCommands, 1024)
	setDefault(&c.MaxPendingBytes, 64<<20)
	setDefault(&c.MayWaitFor, 500*time.Millisecond)
	if c.MaxPendingBytes < int64(c.MaxTxnBytes) {
		return fmt.Errorf("raftstore: MaxPendingBytes %d is less than MaxTxnBytes %d", c.MaxPendingBytes, c.MaxTxnBytes)
	}
	if c.ReserveBytes < 0 || c.ReserveBytes >= c.QuotaBytes {
		return fmt.Errorf("raftstore: ReserveBytes %d has to be less than QuotaBytes %d", c.ReserveBytes, c.QuotaBytes)
	}
	for folder := range c.FolderQuotas {
		if !strings.HasSuffix(folder, "/") {
			return fmt.Errorf("raftstore: FolderQuotas: %q has to end in a slash", folder)
		}
	}
	return nil
}

func setDefault[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

func (c *Config) limits() mvcc.Limits {
	return mvcc.Limits{HistoryBytes: c.HistoryBytes, HistoryAgeMillis: c.HistoryAge.Milliseconds(), Window: c.ResultWindow}
}
