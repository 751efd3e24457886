// Package static reads pods that need no API: one or more in each file of a
// folder, and a document at an HTTP address. It makes nothing of them: it
// passes on the whole set whenever it changed.
//
// A source that cannot be read, or a file that is wrong, is reported and keeps
// what was last read from it: a mistake in a file stops no pod. The pods of a
// file end when the file is gone.
package static

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/fsnotify/fsnotify"
	v1 "k8s.io/api/core/v1"

	"github.com/clusterd/clusterd/slack"
)

// Config of a Reader.
type Config struct {
	NodeName string // required
	// Dir is the directory of pod files; it is made if it is missing. Empty: none.
	Dir string
	// URL is asked for a Pod, a PodList, or several of them. Empty: none.
	URL string
	// Period is how often both are read even if nothing seems to have changed;
	// default 20 s.
	Period time.Duration
	// Client asks the URL; default: one that gives up after 10 s.
	Client *http.Client
	// OnFault is called once for each fault: where names the file or URL. It must
	// not block. Optional.
	OnFault func(where string, err error)
}

// settleTime is how long a directory has to be quiet before it is read: a file
// is seldom written in one go.
const settleTime = 50 * time.Millisecond

// maxDocument bounds a file or an answer.
const maxDocument = 4 << 20

// Reader reads static pods. See New.
type Reader struct {
	cfg    Config
	files  map[string]*document // by path
	remote *document            // nil: never read
	faults map[string]string    // as last reported, by source
}

// document is what was last read from one place.
type document struct {
	text string
	pods []*v1.Pod
}

// New checks the configuration; it reads nothing.
func New(cfg Config) (*Reader, error) {
	if cfg.NodeName == "" {
		return nil, errors.New("static pods: NodeName is required")
	}
	if cfg.URL != "" {
		if u, err := url.Parse(cfg.URL); err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
			return nil, fmt.Errorf("static pods: %q is not an address such as http://192.0.2.7/pods.yaml", cfg.URL)
		}
	}
	if cfg.Period <= 0 {
		cfg.Period = 20 * time.Second
	}
	if cfg.Client == nil {
		cfg.Client = &http.Client{Timeout: 10 * time.Second}
	}
	return &Reader{cfg: cfg, files: map[string]*document{}, faults: map[string]string{}}, nil
}

// Run reads until ctx ends. set is called, from this goroutine, with all pods
// whenever they changed; complete is false as long as the URL has never been
// read, so that a missing pod may still be one of its.
func (r *Reader) Run(ctx context.Context, set func(pods []*v1.Pod, complete bool)) error {
	var events <-chan fsnotify.Event
	if r.cfg.Dir != "" {
		if err := os.MkdirAll(r.cfg.Dir, 0o750); err != nil {
			return fmt.Errorf("static pods: %w", err)
		}
		// Without inotify (its instances can run out) there is the period.
		if w, err := fsnotify.NewWatcher(); err != nil {
			r.report("inotify", err)
		} else {
			defer w.Close()
			if err := w.Add(r.cfg.Dir); err != nil {
				r.report(r.cfg.Dir, err)
			} else {
				events = w.Events
			}
		}
	}
	var last string
	passed := false
	tell := func() {
		pods := r.pods()
		complete := r.cfg.URL == "" || r.remote != nil
		key := fmt.Sprint(complete)
		for _, p := range pods {
			key += " " + string(p.UID)
		}
		if !passed || key != last {
			passed, last = true, key
			set(pods, complete)
		}
	}
	tick := slack.NewTicker(r.cfg.Period)
	defer tick.Stop()
	r.readDir()
	tell() // a URL that does not answer keeps no file waiting
	r.readURL(ctx)
	tell()
	var quiet <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case _, ok := <-events:
			if !ok {
				events = nil
				continue
			}
			if quiet == nil {
				quiet = time.After(settleTime)
			}
			continue
		case <-quiet:
			quiet = nil
			r.readDir()
		case <-tick.C:
			r.readDir()
			r.readURL(ctx)
		}
		tell()
	}
}

// report passes a fault on, unless it is the one that was reported last; nil: all is
// well again.
func (r *Reader) report(where string, err error) {
	if err == nil {
		delete(r.faults, where)
		return
	}
	if r.faults[where] == err.Error() {
		return
	}
	r.faults[where] = err.Error()
	if r.cfg.OnFault != nil {
		r.cfg.OnFault(where, err)
	}
}

// readDir takes the directory's files in.
func (r *Reader) readDir() {
	if r.cfg.Dir == "" {
		return
	}
	entries, err := os.ReadDir(r.cfg.Dir)
	r.report(r.cfg.Dir, err)
	if err != nil {
		return
	}
	here := map[string]bool{}
	for _, e := range entries {
		// Editors leave such files behind.
		if strings.HasPrefix(e.Name(), ".") || strings.HasSuffix(e.Name(), "~") {
			continue
		}
		path := filepath.Join(r.cfg.Dir, e.Name())
		st, err := os.Stat(path)
		if errors.Is(err, os.ErrNotExist) || err == nil && st.IsDir() {
			continue
		}
		here[path] = true
		text, err := readFile(path, st)
		if err == nil {
			err = r.take(r.files[path], text, path, "file", func(d *document) { r.files[path] = d })
		}
		r.report(path, err)
	}
	for path := range r.files {
		if !here[path] {
			delete(r.files, path)
			r.report(path, nil)
		}
	}
}

func readFile(path string, st os.FileInfo) (string, error) {
	if st != nil && !st.Mode().IsRegular() {
		return "", errors.New("it is not a plain file")
	}
	f, err := os.Open(path)
	if err != nil {
		return "", err
	}
	defer f.Close()
	return readAll(f)
}

func readAll(from io.Reader) (string, error) {
	b, err := io.ReadAll(io.LimitReader(from, maxDocument+1))
	if err == nil && len(b) > maxDocument {
		err = fmt.Errorf("it is larger than %d MiB", maxDocument>>20)
	}
	return string(b), err
}

// readURL takes the answer of the address in.
func (r *Reader) readURL(ctx context.Context) {
	if r.cfg.URL == "" {
		return
	}
	text, err := r.ask(ctx)
	if ctx.Err() != nil {
		return
	}
	if err == nil {
		err = r.take(r.remote, text, r.cfg.URL, "http", func(d *document) { r.remote = d })
	}
	r.report(r.cfg.URL, err)
}

func (r *Reader) ask(ctx context.Context) (string, error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.cfg.URL, nil)
	if err != nil {
		return "", err
	}
	res, err := r.cfg.Client.Do(req)
	if err != nil {
		return "", err
	}
	defer res.Body.Close()
	if res.StatusCode != http.StatusOK {
		return "", fmt.Errorf("it answers %s", res.Status)
	}
	return readAll(res.Body)
}

// take decodes a text that differs from the one read last.
func (r *Reader) take(have *document, text, where, source string, keep func(*document)) error {
	if have != nil && have.text == text {
		return nil
	}
	pods, err := decode(text, where, source, r.cfg.NodeName)
	switch {
	case err == nil:
		keep(&document{text: text, pods: pods})
	case have != nil:
		return fmt.Errorf("%w; its pods run on as they were", err)
	case source == "http":
		keep(&document{text: text}) // it was read, so nothing else is to come from it
	}
	return err
}

// pods are all pods, those of files before those of the URL, without those
// whose name is taken.
func (r *Reader) pods() []*v1.Pod {
	names := map[string]string{} // name → where
	var out []*v1.Pod
	add := func(where string, d *document) {
		for _, p := range d.pods {
			name := p.Namespace + "/" + p.Name
			other, taken := names[name]
			if taken && other != where {
				r.report(where+"#"+p.Name, fmt.Errorf("pod %s is named in %s already: rename one of them", name, other))
				continue
			}
			r.report(where+"#"+p.Name, nil)
			names[name] = where
			out = append(out, p)
		}
	}
	for _, path := range slices.Sorted(maps.Keys(r.files)) {
		add(path, r.files[path])
	}
	if r.remote != nil {
		add(r.cfg.URL, r.remote)
	}
	return out
}
