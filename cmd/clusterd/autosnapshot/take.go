package autosnapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/clusterd/clusterd/raftstore/backup"
)

// Writer is where an archive goes.
type Writer = io.Writer

// Target is where snapshots are kept. Methods block until ctx ends at most, and are not
// called concurrently.
type Target interface {
	// Path is how people find the file of that name.
	Path(name string) string
	// Find returns the file of that name; nil: there is none.
	Find(ctx context.Context, name string) (*File, error)
	// Put stores what write writes. The file gets its name when verify has accepted what
	// is read again. When it fails, or ctx ends, there is no file of that name. Both
	// functions end with the context that they are given.
	Put(ctx context.Context, name string, write func(context.Context, io.Writer) error, verify func(context.Context, io.Reader) error) error
	// Names are those of the files whose names begin with prefix.
	Names(ctx context.Context, prefix string) ([]string, error)
	// Remove removes a file.
	Remove(ctx context.Context, name string) error
	// CleanUp removes what Puts of processes that were killed have left.
	CleanUp(ctx context.Context, cluster string, now time.Time) error
}

// File is one of a Target.
type File struct {
	Bytes    int64
	Modified time.Time
}

// Files of a Target: CLUSTER-20261127T030000Z.backup, by the time of the schedule.
const (
	extension  = ".backup"
	slotFormat = "20060102T150405Z"
)

// Unfinished is how names of unfinished files begin, which no pattern of shells shows.
const Unfinished = ".clusterd-snapshot-"

// Abandoned is how old an unfinished file of another node's is when it is removed:
// its node may be writing it.
const Abandoned = 24 * time.Hour

// skew is how far clocks may differ: no snapshot is older than its time by more.
const skew = 15 * time.Minute

func fileName(cluster string, slot time.Time) string {
	return cluster + "-" + slot.UTC().Format(slotFormat) + extension
}

// slotOf is the time in a file's name; false: the file is none of the cluster's.
func slotOf(cluster, name string) (time.Time, bool) {
	text, ok := strings.CutPrefix(name, cluster+"-")
	text, whole := strings.CutSuffix(text, extension)
	at, err := time.Parse(slotFormat, text)
	return at, ok && whole && err == nil
}

// take writes one snapshot, and reads it again before it has its name.
func (t *Taker) take(ctx context.Context, slot time.Time) (*Snapshot, error) {
	cluster, err := t.cfg.Cluster(ctx)
	if err != nil {
		return nil, err
	}
	name := fileName(cluster, slot)
	path := t.cfg.Target.Path(name)
	found, err := t.cfg.Target.Find(ctx, name)
	if err != nil {
		return nil, err
	}
	if found != nil {
		if found.Bytes == 0 || found.Modified.Before(slot.Add(-skew)) {
			return nil, fmt.Errorf("%s has %d bytes, of %s, and is older than its time or empty: remove it", path, found.Bytes, found.Modified.UTC().Format(time.RFC3339))
		}
		// It has its name because it was whole: its leader could not record it any more.
		return &Snapshot{Node: t.cfg.Node, File: path, Taken: found.Modified.UTC(), Bytes: found.Bytes}, nil
	}
	lock, key, err := backup.Once()
	if err != nil {
		return nil, err
	}
	s := &Snapshot{Node: t.cfg.Node, File: path, Taken: time.Now().UTC()}
	write := func(ctx context.Context, w io.Writer) error {
		sealed, err := backup.Seal(w, slices.Concat(t.cfg.Lock, lock))
		if err != nil {
			return err
		}
		if err := t.cfg.Write(ctx, bounded{ctx, sealed}); err != nil {
			return err
		}
		return sealed.Close()
	}
	verify := func(ctx context.Context, r io.Reader) error {
		manifest, size, err := verify(ctx, r, key)
		if err != nil {
			return fmt.Errorf("it was written, and reads otherwise: %w", err)
		}
		s.Revision, s.Bytes = manifest.Digest.Revision, size
		return nil
	}
	if err := t.cfg.Target.Put(ctx, name, write, verify); err != nil {
		return nil, fmt.Errorf("write %s: %w", path, err)
	}
	return s, nil
}

// verify reads a file from its beginning to its end.
func verify(ctx context.Context, r io.Reader, key backup.Key) (backup.Manifest, int64, error) {
	read := &boundedReader{ctx: ctx, r: r}
	plain, err := backup.Open(read, key)
	if err != nil {
		return backup.Manifest{}, 0, err
	}
	m, err := backup.Check(plain)
	if err != nil {
		return backup.Manifest{}, 0, err
	}
	if _, err := io.Copy(io.Discard, read); err != nil {
		return backup.Manifest{}, 0, err
	}
	return m, read.n, nil
}

// bounded ends what is written when ctx ends.
type bounded struct {
	ctx context.Context
	w   io.Writer
}

func (b bounded) Write(p []byte) (int, error) {
	if err := b.ctx.Err(); err != nil {
		return 0, err
	}
	return b.w.Write(p)
}

// boundedReader ends what is read when ctx ends, and counts it.
type boundedReader struct {
	ctx context.Context
	r   io.Reader
	n   int64
}

func (b *boundedReader) Read(p []byte) (int, error) {
	if err := b.ctx.Err(); err != nil {
		return 0, err
	}
	n, err := b.r.Read(p)
	b.n += int64(n)
	return n, err
}

// prune removes the cluster's files that are too many or too old.
func (t *Taker) prune(ctx context.Context, now time.Time) error {
	cluster, err := t.cfg.Cluster(ctx)
	if err != nil {
		return err
	}
	names, err := t.cfg.Target.Names(ctx, cluster+"-")
	if err != nil {
		return err
	}
	var slots []time.Time
	for _, name := range names {
		if at, ok := slotOf(cluster, name); ok {
			slots = append(slots, at)
		}
	}
	slices.SortFunc(slots, func(a, b time.Time) int { return b.Compare(a) })
	var errs []error
	for i, at := range slots {
		if i == 0 || (t.cfg.Keep == 0 || i < t.cfg.Keep) && (t.cfg.KeepAge == 0 || now.Sub(at) <= t.cfg.KeepAge) {
			continue
		}
		if err := ctx.Err(); err != nil {
			return errors.Join(append(errs, err)...)
		}
		name := fileName(cluster, at)
		if err := t.cfg.Target.Remove(ctx, name); err != nil {
			errs = append(errs, err)
			continue
		}
		t.cfg.Log.Info("an old snapshot was removed", "file", t.cfg.Target.Path(name))
	}
	return errors.Join(errs...)
}

// cleanUp removes what processes that were killed have left.
func (t *Taker) cleanUp(ctx context.Context, now time.Time) error {
	cluster, err := t.cfg.Cluster(ctx)
	if err != nil {
		return err
	}
	return t.cfg.Target.CleanUp(ctx, cluster, now)
}
