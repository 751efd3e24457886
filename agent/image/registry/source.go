package registry

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"sync"
)

// Source is a file of settings that is read again when it, or a file that it names,
// has changed. Methods may be called concurrently.
type Source struct {
	path     string
	optional bool
	log      *slog.Logger

	mu   sync.Mutex // guards all below
	have *Settings
	// seen is how the files were when they were last read, well or not.
	seen []stamp
}

// stamp tells one state of a file from another.
type stamp struct {
	path string
	info os.FileInfo // nil: it was not there
}

// Open reads the file for the first time; what is wrong with it is an error. optional:
// it need not be there, and says nothing while it is not.
func Open(path string, optional bool, log *slog.Logger) (*Source, error) {
	s := &Source{path: path, optional: optional, log: log}
	settings, seen, err := s.load()
	if err != nil {
		return nil, err
	}
	s.have, s.seen = settings, seen
	return s, nil
}

// Settings are the file's now. It costs a look at each file. One that has become
// wrong is said in the log, once for each change, and what was before counts.
func (s *Source) Settings() *Settings {
	s.mu.Lock()
	defer s.mu.Unlock()
	if slices.EqualFunc(s.seen, stamps(paths(s.seen)), stamp.same) {
		return s.have
	}
	settings, seen, err := s.load()
	s.seen = seen
	if err != nil {
		s.log.Error("the settings of registries are wrong, those from before stay in force", "err", err)
		return s.have
	}
	s.log.Info("the settings of registries have changed", "file", s.path)
	s.have = settings
	return s.have
}

func (s *Source) load() (*Settings, []stamp, error) {
	r := &reader{}
	text, err := r.read(s.path)
	if s.optional && errors.Is(err, fs.ErrNotExist) {
		return &Settings{}, r.seen, nil
	}
	if err != nil {
		return nil, r.seen, fmt.Errorf("%s: %w: give an existing file of settings of registries (docs/images.md)", s.path, err)
	}
	settings, err := r.parse(text)
	if err != nil {
		return nil, r.seen, fmt.Errorf("%s: %w", s.path, err)
	}
	return settings, r.seen, nil
}

func paths(seen []stamp) []string {
	out := make([]string, len(seen))
	for i, s := range seen {
		out[i] = s.path
	}
	return out
}

func stamps(paths []string) []stamp {
	out := make([]stamp, len(paths))
	for i, p := range paths {
		out[i].path = p
		if st, err := os.Stat(p); err == nil {
			out[i].info = st
		}
	}
	return out
}

func (a stamp) same(b stamp) bool {
	if a.info == nil || b.info == nil {
		return a.info == b.info
	}
	return os.SameFile(a.info, b.info) && a.info.Size() == b.info.Size() && a.info.ModTime().Equal(b.info.ModTime())
}
