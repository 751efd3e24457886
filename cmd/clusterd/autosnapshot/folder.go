package autosnapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/clusterd/clusterd/durable"
	"github.com/clusterd/clusterd/raftstore/backup"
)

// Writer is where an archive goes.
type Writer = io.Writer

// Files of a directory: CLUSTER-20261127T030000Z.backup, by the time of the schedule.
const (
	extension  = ".backup"
	slotFormat = "20060102T150405Z"
)

// Unfinished files: .clusterd-snapshot-NODE_…, which no pattern of shells shows; no
// node's name has a "_" in it.
const unfinished = ".clusterd-snapshot-"

// abandoned is how old an unfinished file of another node's is when it is removed:
// its node may be writing it, in a directory that several nodes share.
const abandoned = 24 * time.Hour

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

// take writes one snapshot, reads it again from the disk, and gives it its name when
// it is whole. When it fails, or ctx ends, no file is left.
func (t *Taker) take(ctx context.Context, slot time.Time) (_ *Snapshot, err error) {
	cluster, err := t.cfg.Cluster(ctx)
	if err != nil {
		return nil, err
	}
	if err := t.makeFolder(); err != nil {
		return nil, err
	}
	path := filepath.Join(t.cfg.Folder, fileName(cluster, slot))
	if st, err := os.Lstat(path); err == nil {
		// It has its name because it was whole: whoever took it could not record it any more.
		return &Snapshot{Node: t.cfg.Node, File: path, Taken: st.ModTime().UTC(), Bytes: st.Size()}, nil
	}
	f, err := os.CreateTemp(t.cfg.Folder, unfinished+t.cfg.Node+"_") // 0600
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			f.Close()
			if rerr := os.Remove(f.Name()); rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
				err = errors.Join(err, rerr)
			}
		}
	}()
	lock, key, err := backup.Once()
	if err != nil {
		return nil, err
	}
	taken := time.Now().UTC()
	sealed, err := backup.Seal(f, slices.Concat(t.cfg.Lock, lock))
	if err != nil {
		return nil, fmt.Errorf("write %s: %w", path, err)
	}
	if err := t.cfg.Write(ctx, bounded{ctx, sealed}); err != nil {
		return nil, fmt.Errorf("write %s: %w", path, err)
	}
	if err := errors.Join(sealed.Close(), f.Sync()); err != nil {
		return nil, fmt.Errorf("write %s: %w", path, err)
	}
	manifest, size, err := verify(ctx, f, key)
	if err != nil {
		return nil, fmt.Errorf("%s was written, and reads otherwise: %w", path, err)
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	if err := durable.Commit(f, path); err != nil {
		return nil, fmt.Errorf("write %s: %w", path, err)
	}
	return &Snapshot{Node: t.cfg.Node, File: path, Taken: taken, Bytes: size, Revision: manifest.Digest.Revision}, nil
}

// verify reads a file from its beginning.
func verify(ctx context.Context, f *os.File, key backup.Key) (backup.Manifest, int64, error) {
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return backup.Manifest{}, 0, err
	}
	plain, err := backup.Open(f, key)
	if err != nil {
		return backup.Manifest{}, 0, err
	}
	m, err := backup.Check(boundedReader{ctx, plain})
	if err != nil {
		return backup.Manifest{}, 0, err
	}
	size, err := f.Seek(0, io.SeekCurrent)
	return m, size, err
}

// makeFolder makes the directory, but not those that it is in: where a disk is to be
// mounted and is not, that would fill another.
func (t *Taker) makeFolder() error {
	err := os.Mkdir(t.cfg.Folder, 0o700)
	if err == nil || errors.Is(err, fs.ErrExist) {
		return nil
	}
	return fmt.Errorf("make the folder of snapshots: %w", err)
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

type boundedReader struct {
	ctx context.Context
	r   io.Reader
}

func (b boundedReader) Read(p []byte) (int, error) {
	if err := b.ctx.Err(); err != nil {
		return 0, err
	}
	return b.r.Read(p)
}

// prune removes the cluster's files that are too many or too old.
func (t *Taker) prune(ctx context.Context, now time.Time) error {
	cluster, err := t.cfg.Cluster(ctx)
	if err != nil {
		return err
	}
	files, err := os.ReadDir(t.cfg.Folder)
	if err != nil {
		return err
	}
	var slots []time.Time
	for _, f := range files {
		if at, ok := slotOf(cluster, f.Name()); ok && f.Type().IsRegular() {
			slots = append(slots, at)
		}
	}
	slices.SortFunc(slots, func(a, b time.Time) int { return b.Compare(a) })
	var errs []error
	for i, at := range slots {
		if i == 0 || (t.cfg.Keep == 0 || i < t.cfg.Keep) && (t.cfg.KeepAge == 0 || now.Sub(at) <= t.cfg.KeepAge) {
			continue
		}
		path := filepath.Join(t.cfg.Folder, fileName(cluster, at))
		if err := os.Remove(path); err != nil {
			errs = append(errs, err)
			continue
		}
		t.cfg.Log.Info("an old snapshot was removed", "file", path)
	}
	return errors.Join(errs...)
}

// cleanUp removes unfinished files that a process which was killed has left.
func (t *Taker) cleanUp(now time.Time) error {
	files, err := os.ReadDir(t.cfg.Folder)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, f := range files {
		if !strings.HasPrefix(f.Name(), unfinished) {
			continue
		}
		own := strings.HasPrefix(f.Name(), unfinished+t.cfg.Node+"_")
		if st, err := f.Info(); err == nil && (own || now.Sub(st.ModTime()) > abandoned) {
			errs = append(errs, os.Remove(filepath.Join(t.cfg.Folder, f.Name())))
		}
	}
	return errors.Join(errs...)
}
