package main

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/clusterd/clusterd/cmd/clusterd/autosnapshot"
	"github.com/clusterd/clusterd/raftstore/raftstoretest"
)

const recipient = "age1ql3z7hjy54pw3hyww5ayyfg7zqgvc7w3j2elw8zmrj2kg5sfn9aqmcac8p"

func TestSnapshotConfig(t *testing.T) {
	good := SnapshotConfig{SnapshotSchedule: "0 3 * * *", SnapshotFolder: "/var/backups/clusterd", SnapshotRecipients: recipient + ", " + recipient, SnapshotStoreTimeout: Duration{time.Minute}}
	if err := good.check(); err != nil {
		t.Error(err)
	}
	none := defaultSnapshots()
	if err := none.check(); err != nil {
		t.Error(err)
	}
	t.Setenv("AWS_ACCESS_KEY_ID", "")
	for want, change := range map[string]func(c *SnapshotConfig){
		"--snapshot-keep -1":                                                     func(c *SnapshotConfig) { c.SnapshotKeep = -1 },
		"--snapshot-keep-age -1s":                                                func(c *SnapshotConfig) { c.SnapshotKeepAge = Duration{-time.Second} },
		"--snapshot-schedule: it is empty":                                       func(c *SnapshotConfig) { c.SnapshotSchedule = "" },
		`--snapshot-schedule "nightly"`:                                          func(c *SnapshotConfig) { c.SnapshotSchedule = "nightly" },
		`--snapshot-schedule "@every 10s": give 1m0s or more`:                    func(c *SnapshotConfig) { c.SnapshotSchedule = "@every 10s" },
		`--snapshot-folder "snapshots"`:                                          func(c *SnapshotConfig) { c.SnapshotFolder = "snapshots" },
		"--snapshot-store-timeout 0s: give more than 0":                          func(c *SnapshotConfig) { c.SnapshotStoreTimeout = Duration{} },
		"--snapshot-store and --snapshot-folder /var/backups/clusterd: give one": func(c *SnapshotConfig) { c.SnapshotStore = "s3://backups" },
		"--snapshot-store: it names no host: write it as https://":               func(c *SnapshotConfig) { c.SnapshotFolder, c.SnapshotStore = "", "backups" },
		"--snapshot-store-credentials: stat /none": func(c *SnapshotConfig) {
			c.SnapshotFolder, c.SnapshotStore, c.SnapshotStoreCredentials = "", "s3://backups", "/none"
		},
		"--snapshot-store-credentials: name a file":      func(c *SnapshotConfig) { c.SnapshotFolder, c.SnapshotStore = "", "s3://backups" },
		"age-keygen, or clusterd keys new, makes a pair": func(c *SnapshotConfig) { c.SnapshotRecipients = "" },
		`--snapshot-recipients: public key "mine"`:       func(c *SnapshotConfig) { c.SnapshotRecipients = "mine" },
	} {
		c := good
		change(&c)
		if err := c.check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", c, err, want)
		}
	}
}

// TestSnapshotState: the record is in the store, replaced only by who has read it, and
// shown with what failed.
func TestSnapshotState(t *testing.T) {
	store := raftstoretest.New(t, 1, nil).Leader()
	state := snapshotState{store}
	ctx := t.Context()
	since := time.Date(2026, 11, 27, 1, 0, 0, 0, time.UTC)
	api := &clusterAPI{store: store}
	if v := api.snapshots(ctx, since); v != nil || v.warning() != "" {
		t.Errorf("without a schedule: %+v", v)
	}
	rec, revision, err := state.Load(ctx)
	if err != nil || revision != 0 || !rec.Since.IsZero() {
		t.Fatalf("%+v, %d, %v", rec, revision, err)
	}
	rec.Since = since
	rec.Failure = &autosnapshot.Failure{Node: "n1", Slot: since.Add(2 * time.Hour), At: since.Add(3 * time.Hour), Tries: 3, Error: "no space left on device"}
	if ok, err := state.Save(ctx, rec, 0); !ok || err != nil {
		t.Fatal(ok, err)
	}
	if ok, err := state.Save(ctx, rec, 0); ok || err != nil {
		t.Errorf("a record that was written since was replaced: %v, %v", ok, err)
	}
	got, revision, err := state.Load(ctx)
	if err != nil || revision == 0 || got.Failure == nil || *got.Failure != *rec.Failure {
		t.Errorf("%+v, %d, %v", got, revision, err)
	}
	api.schedule.SnapshotSchedule = "0 3 * * *"
	v := api.snapshots(ctx, since)
	if v == nil || v.Next == nil || !v.Next.Equal(since.Add(2*time.Hour)) {
		t.Errorf("%+v", v)
	}
	want := "the snapshot of 2026-11-27T03:00:00Z was not taken by n1 (3 tries, there is none): no space left on device"
	if w := v.warning(); w != want {
		t.Errorf("%q, want %q", w, want)
	}
	m := newSnapshotCollector()
	m.store.Store(store)
	expect := func(text string) {
		t.Helper()
		r := prometheus.NewRegistry()
		r.MustRegister(m)
		if err := testutil.GatherAndCompare(r, strings.NewReader(text), "clusterd_snapshot_failed_tries", "clusterd_snapshot_last_bytes"); err != nil {
			t.Error(err)
		}
	}
	expect(`# HELP clusterd_snapshot_failed_tries How often the snapshot that is due was tried in vain; 0: none is due.
# TYPE clusterd_snapshot_failed_tries gauge
clusterd_snapshot_failed_tries 3
`)
	got.Failure, got.Slot, got.Last = nil, since.Add(2*time.Hour), &autosnapshot.Snapshot{Node: "n2", File: "/b/c.backup", Taken: since.Add(2 * time.Hour), Bytes: 77}
	if ok, err := state.Save(ctx, got, revision); !ok || err != nil {
		t.Fatal(ok, err)
	}
	if v := api.snapshots(ctx, since.Add(3*time.Hour)); v.warning() != "" || v.Last == nil || v.Last.Node != "n2" || !v.Next.Equal(since.Add(26*time.Hour)) {
		t.Errorf("%+v", v)
	}
	expect(`# HELP clusterd_snapshot_failed_tries How often the snapshot that is due was tried in vain; 0: none is due.
# TYPE clusterd_snapshot_failed_tries gauge
clusterd_snapshot_failed_tries 0
# HELP clusterd_snapshot_last_bytes How large that snapshot is.
# TYPE clusterd_snapshot_last_bytes gauge
clusterd_snapshot_last_bytes 77
`)
}
