package bucket

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"filippo.io/age"
	"github.com/minio/minio-go/v7"
	"github.com/robfig/cron/v3"

	"github.com/clusterd/clusterd/cmd/clusterd/autosnapshot"
	"github.com/clusterd/clusterd/cmd/clusterd/autosnapshot/bucket/s3test"
	"github.com/clusterd/clusterd/raftstore/backup"
	"github.com/clusterd/clusterd/raftstore/mvcc"
)

// record is an autosnapshot.State that several leaders share.
type record struct {
	mu       sync.Mutex // guards all below
	rec      autosnapshot.Record
	revision int64
	lost     bool // a snapshot is not recorded
}

func (m *record) Load(context.Context) (autosnapshot.Record, int64, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.rec, m.revision, nil
}

func (m *record) Save(_ context.Context, r autosnapshot.Record, revision int64) (bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if revision != m.revision || m.lost && r.Last != nil {
		return false, nil
	}
	m.rec, m.revision = r, m.revision+1
	return true, nil
}

func (m *record) get() autosnapshot.Record {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.rec
}

// archive is that of a small cluster.
func archive(w io.Writer) error {
	ks := mvcc.New()
	ks.Apply(1, mvcc.Batch{Time: 1, Commands: []mvcc.Command{{
		Type: mvcc.CmdTxn, ID: mvcc.CommandID{Session: 1, Seq: 1}, Txn: mvcc.Txn{Ops: []mvcc.Op{{Type: mvcc.OpPut, Key: "/registry/core/pods/a/b", Value: bytes.Repeat([]byte{7}, 200_000)}}},
	}}})
	counts, err := backup.Counts(ks)
	if err != nil {
		return err
	}
	return backup.Write(w, backup.Manifest{Cluster: "c"}, backup.Secrets{CACert: []byte("CERT"), CAKey: []byte("KEY")}, ks.Snapshot(), counts)
}

// leader runs a Taker of every second until stop is called.
type leader struct {
	*record
	key    *age.X25519Identity
	failed chan string
	wrote  chan struct{} // each time the archive is written
}

func newLeader(t *testing.T) *leader {
	key, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	return &leader{record: &record{}, key: key, failed: make(chan string, 1000), wrote: make(chan struct{}, 1000)}
}

func (l *leader) lead(t *testing.T, b *Bucket, every time.Duration, keep int) (stop func()) {
	lock, err := backup.Recipients([]string{l.key.Recipient().String()})
	if err != nil {
		t.Fatal(err)
	}
	taker := autosnapshot.New(autosnapshot.Config{
		Schedule: cron.ConstantDelaySchedule{Delay: every}, Target: b, Keep: keep, Lock: lock, Node: "n1", State: l.record,
		Cluster: func(context.Context) (string, error) { return "c", nil },
		Write:   func(_ context.Context, w io.Writer) error { l.wrote <- struct{}{}; return archive(w) },
		Failed:  func(m string) { l.failed <- m },
		Log:     slog.New(slog.DiscardHandler),
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- taker.Run(ctx) }()
	return func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
}

// until waits for a level.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: not within a minute", what)
		}
	}
}

// TestSchedule: as many stay as are to be kept, each opens, and nothing else is removed.
func TestSchedule(t *testing.T) {
	s := s3test.New(t)
	foreign := []string{"c-20200101T030000Z.backup", prefix + "c-notes.txt", prefix + "d-20200101T030000Z.backup", prefix + "c-20200101T030000Z.backup.old"}
	for _, key := range foreign {
		s.Put(key, nil, 0)
	}
	s.Put(prefix+"c-20200101T030000Z.backup", nil, 0) // the cluster's, and too many
	own := func() (names []string) {
		for _, n := range s.Names() {
			if !slices.Contains(foreign, n) && strings.HasSuffix(n, ".backup") && !strings.Contains(n, autosnapshot.Unfinished) {
				names = append(names, n)
			}
		}
		return names
	}
	l := newLeader(t)
	stop := l.lead(t, of(t, s), time.Second, 2)
	until(t, "four were taken", func() bool { return len(l.wrote) >= 4 })
	stop()
	// The next leader begins its second when its first has been taken and too many removed.
	before := len(l.wrote)
	stop = l.lead(t, of(t, s), time.Second, 2)
	until(t, "two more were taken", func() bool { return len(l.wrote) >= before+2 })
	stop()
	// The last may have been taken and the one before it not yet been removed.
	got := own()
	if len(got) < 2 || len(got) > 3 || slices.Contains(got, prefix+"c-20200101T030000Z.backup") {
		t.Errorf("kept %q", got)
	}
	for _, key := range foreign {
		if !slices.Contains(s.Names(), key) {
			t.Errorf("%s was removed", key)
		}
	}
	for _, key := range got {
		plain, err := backup.Open(bytes.NewReader(s.Object(key)), backup.Key{l.key})
		if err != nil {
			t.Fatal(err)
		}
		if c, err := backup.Read(plain); err != nil || c.Digest.Keys != 1 {
			t.Errorf("%s: %+v, %v", key, c, err)
		}
	}
	if r := l.get(); r.Last == nil || !strings.HasPrefix(r.Last.File, s.URL+"/"+prefix+"c-") || r.Last.Bytes < 200_000 || r.Last.Revision != 2 || len(l.failed) > 0 {
		t.Errorf("%+v, failed %d", r.Last, len(l.failed))
	}
}

// TestNotTwice: a leader that could not record what it had taken, and the next one, make
// one object of it.
func TestNotTwice(t *testing.T) {
	s := s3test.New(t)
	l := newLeader(t)
	l.record.rec.Since, l.record.rec.Slot, l.record.revision = time.Now().Add(-90*time.Minute), time.Now().Add(-90*time.Minute), 1
	l.record.lost = true
	stop := l.lead(t, of(t, s), time.Hour, 0)
	until(t, "an object is there", func() bool {
		return slices.ContainsFunc(s.Names(), func(n string) bool { return strings.HasPrefix(n, prefix+"c-") })
	})
	stop()
	l.mu.Lock()
	l.lost = false
	l.mu.Unlock()
	stop = l.lead(t, of(t, s), time.Hour, 0)
	until(t, "it is recorded", func() bool { return l.get().Last != nil })
	stop()
	if len(s.Names()) != 1 || len(l.wrote) != 1 {
		t.Errorf("%q, written %d times", s.Names(), len(l.wrote))
	}
}

// TestRightsThatLack: what cannot be removed is said; what cannot be written is recorded.
func TestRightsThatLack(t *testing.T) {
	s := s3test.New(t)
	s.Put(prefix+"c-20200101T030000Z.backup", nil, 0)
	s.Hook = func(w http.ResponseWriter, r *http.Request) bool {
		if refused := r.Method == http.MethodDelete && strings.HasSuffix(r.URL.Path, "c-20200101T030000Z.backup"); refused {
			s3test.Refuse(w, http.StatusForbidden, "AccessDenied", "no")
			return true
		}
		return false
	}
	l := newLeader(t)
	stop := l.lead(t, of(t, s), time.Second, 1)
	if m := <-l.failed; !strings.Contains(m, "Old snapshots were not removed: --snapshot-store") || !strings.Contains(m, "s3:DeleteObject") {
		t.Errorf("%q", m)
	}
	stop()
	if r := l.get(); r.Last == nil || r.Failure != nil {
		t.Errorf("%+v", r)
	}
	stop = l.lead(t, of(t, s, func(c *Config) { c.CA = "" }), time.Second, 1)
	until(t, "the failure is recorded", func() bool { f := l.get().Failure; return f != nil && strings.Contains(f.Error, "--snapshot-store-ca") })
	stop()
}

// TestRealServer: a server that checks signatures and checksums, with TLS and without.
func TestRealServer(t *testing.T) {
	program := os.Getenv(s3test.Program)
	if program == "" {
		t.Skip("needs an S3 server: make s3-test")
	}
	t.Run("https", func(t *testing.T) {
		cert, key := s3test.Certificate(t, "127.0.0.1")
		addr, dir := s3test.Real(t, program, "ID", "SECRET", cert, key)
		realServer(t, "https://"+addr, dir, cert)
	})
	t.Run("http", func(t *testing.T) {
		addr, dir := s3test.Real(t, program, "ID", "SECRET", "", "")
		realServer(t, "http://"+addr, dir, "")
	})
}

func realServer(t *testing.T, url, dir, cert string) {
	b := bucketAt(t, url+"/"+s3test.Bucket+"/site/a", func(c *Config) { c.CA = cert })
	data := random()
	if err := put(t.Context(), b, data); err != nil {
		t.Fatal(err)
	}
	if f, err := b.Find(t.Context(), name); err != nil || f == nil || f.Bytes != int64(len(data)) {
		t.Errorf("%+v, %v", f, err)
	}
	if f, err := b.Find(t.Context(), "c-20261127T040000Z.backup"); err != nil || f != nil {
		t.Errorf("%+v, %v", f, err)
	}
	if got, err := os.ReadFile(filepath.Join(dir, s3test.Bucket, "site/a", name)); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	var got []byte
	if err := b.Get(t.Context(), name, func(r io.Reader) (err error) { got, err = io.ReadAll(r); return err }); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if err := b.Get(t.Context(), "none", nil); err == nil || !strings.Contains(err.Error(), "the last by name is "+name) {
		t.Errorf("%v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	err := b.Put(ctx, "c-20261127T050000Z.backup", func(_ context.Context, w io.Writer) error {
		_, err := w.Write(make([]byte, partSize+1))
		cancel()
		return errors.Join(err, ctx.Err())
	}, nil)
	if !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	// What a process that was killed leaves.
	c, done, err := b.cfg.client(b.cfg.Location)
	if err != nil {
		t.Fatal(err)
	}
	defer done()
	if _, err := c.NewMultipartUpload(t.Context(), s3test.Bucket, own+"1", minio.PutObjectOptions{}); err != nil {
		t.Fatal(err)
	}
	if err := b.CleanUp(t.Context(), "c", time.Now()); err != nil {
		t.Error(err)
	}
	for u := range c.ListIncompleteUploads(t.Context(), s3test.Bucket, prefix, true) {
		t.Errorf("left: %s, %v", u.Key, u.Err)
	}
	if names, err := b.Names(t.Context(), ""); err != nil || !slices.Equal(names, []string{name}) {
		t.Errorf("%q, %v", names, err)
	}
	if err := b.Remove(t.Context(), name); err != nil {
		t.Error(err)
	}
	if names, err := b.Names(t.Context(), ""); err != nil || len(names) > 0 {
		t.Errorf("%q, %v", names, err)
	}
	wrong := bucketAt(t, url+"/"+s3test.Bucket, func(c *Config) {
		c.CA, c.Credentials = cert, keyFile(t, "[default]\naws_access_key_id = ID\naws_secret_access_key = OTHER\n", 0o600)
	})
	if err := put(t.Context(), wrong, data); err == nil || !strings.Contains(err.Error(), "check the key and the secret of --snapshot-store-credentials") {
		t.Errorf("%v", err)
	}
	none := bucketAt(t, url+"/none", func(c *Config) { c.CA = cert })
	if err := put(t.Context(), none, data); err == nil || !strings.Contains(err.Error(), "create the bucket none") {
		t.Errorf("%v", err)
	}
}
