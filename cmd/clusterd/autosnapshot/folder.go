package autosnapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/clusterd/clusterd/durable"
)

// Folder is a Target: a directory of this machine, or one that several nodes share.
type Folder struct {
	// Dir has to be there, or the directory that it is in.
	Dir string
	// Node is this node's name. Unfinished files are .clusterd-snapshot-NODE_…; no
	// node's name has a "_" in it.
	Node string
}

// Path implements Target.
func (f Folder) Path(name string) string { return filepath.Join(f.Dir, name) }

// Find implements Target.
func (f Folder) Find(_ context.Context, name string) (*File, error) {
	if err := f.make(); err != nil {
		return nil, err
	}
	st, err := os.Lstat(f.Path(name))
	if err != nil {
		return nil, nil // what else is wrong, Put says
	}
	return &File{Bytes: st.Size(), Modified: st.ModTime()}, nil
}

// Put implements Target.
func (f Folder) Put(ctx context.Context, name string, write func(context.Context, io.Writer) error, verify func(context.Context, io.Reader) error) (err error) {
	part, err := os.CreateTemp(f.Dir, Unfinished+f.Node+"_") // 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			part.Close()
			if rerr := os.Remove(part.Name()); rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
				err = errors.Join(err, rerr)
			}
		}
	}()
	if err := write(ctx, part); err != nil {
		return err
	}
	if err := part.Sync(); err != nil {
		return err
	}
	if _, err := part.Seek(0, io.SeekStart); err != nil {
		return err
	}
	if err := verify(ctx, part); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	return durable.Commit(part, f.Path(name))
}

// make makes the directory, but not those that it is in: where a disk is to be
// mounted and is not, that would fill another.
func (f Folder) make() error {
	err := os.Mkdir(f.Dir, 0o700)
	if err == nil || errors.Is(err, fs.ErrExist) {
		return nil
	}
	return fmt.Errorf("make the folder of snapshots: %w", err)
}

// Names implements Target.
func (f Folder) Names(_ context.Context, prefix string) ([]string, error) {
	files, err := os.ReadDir(f.Dir)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, file := range files {
		if file.Type().IsRegular() && strings.HasPrefix(file.Name(), prefix) {
			names = append(names, file.Name())
		}
	}
	return names, nil
}

// Remove implements Target.
func (f Folder) Remove(_ context.Context, name string) error { return os.Remove(f.Path(name)) }

// CleanUp implements Target.
func (f Folder) CleanUp(_ context.Context, _ string, now time.Time) error {
	files, err := os.ReadDir(f.Dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, file := range files {
		if !strings.HasPrefix(file.Name(), Unfinished) {
			continue
		}
		own := strings.HasPrefix(file.Name(), Unfinished+f.Node+"_")
		if st, err := file.Info(); err == nil && (own || now.Sub(st.ModTime()) > Abandoned) {
			errs = append(errs, os.Remove(f.Path(file.Name())))
		}
	}
	return errors.Join(errs...)
}
