package main

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/clusterd/clusterd/cmd/clusterd/autosnapshot"
	"github.com/clusterd/clusterd/cmd/clusterd/autosnapshot/bucket/s3test"
	"github.com/clusterd/clusterd/member/join"
	"github.com/clusterd/clusterd/raftstore/backup"
	"github.com/clusterd/clusterd/raftstore/mvcc"
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
		"--snapshot-store-credentials keys: an absolute path": func(c *SnapshotConfig) {
			c.SnapshotFolder, c.SnapshotStore, c.SnapshotStoreCredentials = "", "s3://backups", "keys"
		},
		"age-keygen, or clusterd keys new, makes a pair": func(c *SnapshotConfig) { c.SnapshotRecipients = "" },
		`--snapshot-recipients: public key "mine"`:       func(c *SnapshotConfig) { c.SnapshotRecipients = "mine" },
	} {
		c := good
		change(&c)
		if err := c.check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v, want %q", c, err, want)
		}
	}
	// Files of keys may come later than the server: only init asks for them.
	c := good
	c.SnapshotFolder, c.SnapshotStore = "", "s3://backups"
	for path, want := range map[string]string{"": "--snapshot-store-credentials: name a file", "/none": "--snapshot-store-credentials: stat /none"} {
		c.SnapshotStoreCredentials = path
		if err := c.check(); err != nil {
			t.Error(err)
		}
		if err := prepareInit(Config{Data: t.TempDir(), Advertise: "192.0.2.7", ClusterCIDR: DefaultClusterCIDR, ServiceCIDR: DefaultServiceCIDR, SnapshotConfig: c}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("init: %v, want %q", err, want)
		}
	}
	if err := good.checkAccess(); err != nil {
		t.Error(err)
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

// TestClustersInOneBucket: clusters have one name, one schedule and one bucket: each takes
// its snapshot, and removes its own old ones.
func TestClustersInOneBucket(t *testing.T) {
	s := s3test.New(t)
	keys := filepath.Join(t.TempDir(), "credentials")
	if err := os.WriteFile(keys, []byte("[default]\naws_access_key_id = ID\naws_secret_access_key = SECRET\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	cfg := defaultSnapshots()
	cfg.SnapshotSchedule, cfg.SnapshotRecipients, cfg.SnapshotKeep = "@every 1h", recipient, 1
	cfg.SnapshotStore, cfg.SnapshotStoreCredentials, cfg.SnapshotStoreCA = s.URL+"/site", keys, s.CA
	created := time.Date(2026, 11, 27, 1, 0, 0, 0, time.UTC)
	a, b := join.Cluster{Name: "clusterd", Created: created}, join.Cluster{Name: "clusterd", Created: created.Add(time.Microsecond)}
	since := time.Now().Add(-90 * time.Minute)
	object := func(c join.Cluster, at time.Time) string {
		return "site/" + cfg.clusterName(c) + "-" + at.UTC().Format("20060102T150405Z") + ".backup"
	}
	old, slot := since.Add(-24*time.Hour), since.Add(time.Hour)
	s.Put(object(a, old), nil, 0)
	s.Put(object(b, old), nil, 0)
	take := func(c join.Cluster, want ...string) {
		t.Helper()
		state := snapshotState{raftstoretest.New(t, 1, nil).Leader()}
		if ok, err := state.Save(t.Context(), autosnapshot.Record{Since: since}, 0); !ok || err != nil {
			t.Fatal(ok, err)
		}
		schedule, err := cfg.schedule()
		if err != nil {
			t.Fatal(err)
		}
		lock, err := cfg.lock()
		if err != nil {
			t.Fatal(err)
		}
		target, err := cfg.target("n1", slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		taker := autosnapshot.New(autosnapshot.Config{
			Schedule: schedule, Target: target, Lock: lock, Node: "n1", Keep: cfg.SnapshotKeep, State: state, Log: slog.New(slog.DiscardHandler),
			Cluster: func(context.Context) (string, error) { return cfg.clusterName(c), nil },
			Failed:  func(m string) { t.Error(m) },
			Write: func(_ context.Context, w autosnapshot.Writer) error {
				ks := mvcc.New()
				counts, err := backup.Counts(ks)
				if err != nil {
					return err
				}
				return backup.Write(w, backup.Manifest{Cluster: c.Name}, backup.Secrets{CACert: []byte("CERT"), CAKey: []byte("KEY")}, ks.Snapshot(), counts)
			},
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- taker.Run(ctx) }()
		defer func() {
			cancel()
			if err := <-done; err != nil {
				t.Error(err)
			}
		}()
		slices.Sort(want)
		for end := time.Now().Add(time.Minute); !slices.Equal(s.Names(), want); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(end) {
				t.Fatalf("%q, want %q", s.Names(), want)
			}
		}
	}
	take(a, object(a, slot), object(b, old))
	take(b, object(a, slot), object(b, slot))
	cfg.SnapshotStore, cfg.SnapshotFolder = "", "/var/backups/clusterd"
	if got := cfg.clusterName(a); got != "clusterd" {
		t.Errorf("files of a directory begin with %s: those of before would stay for ever", got)
	}
}
