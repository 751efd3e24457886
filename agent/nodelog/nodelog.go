// Package nodelog answers with the logs of the machine, as a kubelet does at
// /logs/: its files below /var/log, and what services wrote, by name
// (https://kubernetes.io/docs/concepts/cluster-administration/system-logs/#log-query).
// The caller has authenticated and authorized whoever asks.
//
// What is asked for is hostile: no path and no link leads out of the directory,
// nothing but plain files and directories is opened, and a name that is no
// service's reaches no program.
package nodelog

import (
	"errors"
	"fmt"
	"html"
	"io"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Config of a Handler.
type Config struct {
	// Dir holds the machine's log files; default /var/log.
	Dir string
	// Own is the file of this program's own log, in the form of log/slog; "":
	// it is in the journal, under the name of the service.
	Own string
	// Journalctl reads the journal; default: journalctl, looked up in PATH at
	// each question.
	Journalctl string
}

// Service is the name of this program as a service. Kubelet is what tools ask
// for: its work is done here.
const (
	Service = "clusterd"
	Kubelet = "kubelet"
)

// Prefix is the path that Handler serves.
const Prefix = "/logs/"

// queryTime bounds one question to the journal, maxAnswer what is answered.
const (
	queryTime = 30 * time.Second
	maxAnswer = 64 << 20
)

// Handler answers below Prefix.
type Handler struct{ cfg Config }

// New returns a Handler; it opens nothing.
func New(cfg Config) *Handler {
	if cfg.Dir == "" {
		cfg.Dir = "/var/log"
	}
	if cfg.Journalctl == "" {
		cfg.Journalctl = "journalctl"
	}
	return &Handler{cfg}
}

// refusal is an answer with a status of its own.
type refusal struct {
	code int
	text string
}

func (r *refusal) Error() string { return r.text }

func refuse(code int, format string, args ...any) error {
	return &refusal{code, fmt.Sprintf(format, args...)}
}

// ServeHTTP implements http.Handler.
func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var err error
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		err = refuse(http.StatusMethodNotAllowed, "logs are only read: use GET")
	} else if r.URL.RawQuery == "" {
		err = h.file(w, r, strings.TrimPrefix(r.URL.Path, Prefix))
	} else {
		err = h.query(w, r)
	}
	var no *refusal
	switch {
	case err == nil || r.Context().Err() != nil:
	case errors.As(err, &no):
		http.Error(w, no.text, no.code)
	default:
		http.Error(w, err.Error(), http.StatusInternalServerError)
	}
}

// open opens a plain file or directory below Dir.
func (h *Handler) open(name string) (*os.File, fs.FileInfo, error) {
	name = strings.Trim(name, "/")
	if name == "" {
		name = "."
	}
	if !fs.ValidPath(name) || strings.ContainsAny(name, "\x00\\") {
		return nil, nil, refuse(http.StatusBadRequest, "%q is no path below %s", name, h.cfg.Dir)
	}
	dir, err := os.OpenRoot(h.cfg.Dir)
	if err != nil {
		return nil, nil, err
	}
	defer dir.Close()
	// A FIFO without a writer would hold who opens it.
	f, err := dir.OpenFile(name, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	switch {
	case errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) || errors.Is(err, syscall.ENXIO):
		return nil, nil, refuse(http.StatusNotFound, "there is no log %s", path.Join(h.cfg.Dir, name))
	case err != nil:
		return nil, nil, refuse(http.StatusForbidden, "%s is not opened: it leads out of %s, or may not be read", path.Join(h.cfg.Dir, name), h.cfg.Dir)
	}
	st, err := f.Stat()
	if err == nil && !st.IsDir() && !st.Mode().IsRegular() {
		err = refuse(http.StatusForbidden, "%s is not a plain file", path.Join(h.cfg.Dir, name))
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, st, nil
}

// file answers with a file, or with what is in a directory.
func (h *Handler) file(w http.ResponseWriter, r *http.Request, name string) error {
	f, st, err := h.open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	// What a log holds is never to be run by a browser.
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if !st.IsDir() {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		http.ServeContent(w, r, st.Name(), st.ModTime(), f)
		return nil
	}
	if !strings.HasSuffix(r.URL.Path, "/") { // so that the links below lead on
		w.Header().Set("Location", path.Base(r.URL.Path)+"/")
		w.WriteHeader(http.StatusMovedPermanently)
		return nil
	}
	entries, err := f.ReadDir(-1)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	_, _ = io.WriteString(w, "<!doctype html>\n<pre>\n")
	for _, e := range sorted(entries) {
		name := e.Name()
		if e.IsDir() {
			name += "/"
		}
		link := url.URL{Path: "./" + name}
		fmt.Fprintf(w, "<a href=\"%s\">%s</a>\n", html.EscapeString(link.String()), html.EscapeString(name))
	}
	_, _ = io.WriteString(w, "</pre>\n")
	return nil
}
