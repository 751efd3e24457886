package recovery_test

import (
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hashicorp/go-hclog"
	"github.com/hashicorp/raft"

	"github.com/clusterd/clusterd/raftstore/datadir"
	"github.com/clusterd/clusterd/raftstore/mvcc"
	"github.com/clusterd/clusterd/raftstore/raftlog"
	"github.com/clusterd/clusterd/raftstore/recovery"
	"github.com/clusterd/clusterd/raftstore/wire"
)

// TestReplayDamagedSnapshot: a newer snapshot that cannot be read is passed over only
// where the log holds all that it has beyond the older one.
func TestReplayDamagedSnapshot(t *testing.T) {
	for _, tc := range []struct {
		name, file string
		log        bool // has the entries between the two
	}{
		{"the state, and the log goes on from the older one", "state.bin", true},
		{"the state, and the log ends before", "state.bin", false},
		{"its metadata", "meta.json", false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "store")
			k := mvcc.New()
			write := func(value string) mvcc.Txn {
				return mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "/k", Value: []byte(value)}}}
			}
			if err := recovery.Amend(k, write("old")); err != nil {
				t.Fatal(err)
			}
			older := k.Index()
			if err := recovery.Recover(dir, "n1", datadir.Epoch{}, k, 1); err != nil {
				t.Fatal(err)
			}
			record, _, err := raftlog.ReadRecord(dir)
			if err != nil {
				t.Fatal(err)
			}
			log, err := record.Open(dir, 0, slog.New(slog.DiscardHandler))
			if err != nil {
				t.Fatal(err)
			}
			if tc.log {
				cmd := mvcc.Command{Type: mvcc.CmdTxn, Basis: older, Txn: write("new"), ID: mvcc.CommandID{Session: 1, Seq: 1}}
				data := wire.AppendBatch(nil, k.Time(), [][]byte{wire.AppendCommand(nil, &cmd)})
				if err := log.StoreLog(&raft.Log{Index: older + 1, Term: 1, Type: raft.LogCommand, Data: data}); err != nil {
					t.Fatal(err)
				}
			}
			if err := log.Close(); err != nil {
				t.Fatal(err)
			}
			if err := recovery.Amend(k, write("new")); err != nil {
				t.Fatal(err)
			}
			snapshots, err := datadir.OpenSnapshots(dir, hclog.NewNullLogger())
			if err != nil {
				t.Fatal(err)
			}
			_, trans := raft.NewInmemTransport("n1")
			sink, err := snapshots.Create(raft.SnapshotVersionMax, k.Index(), 1, recovery.OnlyVoter("n1"), k.Index(), trans)
			if err != nil {
				t.Fatal(err)
			}
			if err := wire.WriteSnapshot(sink, k.Snapshot()); err != nil {
				t.Fatal(err)
			}
			if err := sink.Close(); err != nil {
				t.Fatal(err)
			}
			if whole, _, err := recovery.Replay(dir, slog.New(slog.DiscardHandler)); err != nil || whole.Index() != k.Index() {
				t.Fatalf("undamaged: %v", err)
			}
			if err := os.WriteFile(filepath.Join(dir, datadir.SnapshotsDir, sink.ID(), tc.file), []byte("x"), 0o600); err != nil {
				t.Fatal(err)
			}
			got, _, err := recovery.Replay(dir, slog.New(slog.DiscardHandler))
			if !tc.log {
				if err == nil || !strings.Contains(err.Error(), sink.ID()) {
					t.Fatalf("the older state was taken: %v", err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if kv, _, err := got.Get("/k", 0); err != nil || string(kv.Value) != "new" {
				t.Errorf("%v, %v", kv, err)
			}
		})
	}
}
