package nodelog

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"
)

func sorted(entries []fs.DirEntry) []fs.DirEntry {
	slices.SortFunc(entries, func(a, b fs.DirEntry) int { return strings.Compare(a.Name(), b.Name()) })
	return entries
}

// query answers with what services or a file said.
func (h *Handler) query(w http.ResponseWriter, r *http.Request) error {
	if rest := strings.TrimPrefix(r.URL.Path, Prefix); rest != "" {
		return refuse(http.StatusBadRequest, "a query is asked at %s: %s%s takes none", Prefix, Prefix, rest)
	}
	q, err := ask(r.URL.Query())
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	if q.file != "" {
		return h.lines(w, q, q.file)
	}
	if len(q.services) == 1 && h.cfg.Own != "" && (q.services[0] == Service || q.services[0] == Kubelet) {
		return h.own(w, q)
	}
	for i, s := range q.services {
		if s == Kubelet {
			q.services[i] = Service
		}
	}
	ctx, cancel := context.WithTimeout(r.Context(), queryTime)
	defer cancel()
	out := &counter{w: w}
	jerr := h.journal(ctx, q, out)
	switch {
	case out.n > 0: // whoever reads has it; what went wrong after that they see by the words at its end
		if jerr != nil {
			fmt.Fprintf(w, "journalctl: %v\n", jerr)
		}
		return nil
	case ctx.Err() != nil:
		return refuse(http.StatusGatewayTimeout, "the journal was not read within %s", queryTime)
	}
	for _, s := range q.services {
		for _, name := range []string{s + ".log", s + "/" + s + ".log", s} {
			err := h.lines(w, q, name)
			var no *refusal
			if err == nil || !errors.As(err, &no) || no.code != http.StatusNotFound {
				return err
			}
		}
	}
	if jerr == nil {
		return refuse(http.StatusNotFound, "the journal has no lines of %s, and %s no log of that name", strings.Join(q.services, ", "), h.cfg.Dir)
	}
	return refuse(http.StatusNotFound, "there is no log of %s: the journal says nothing (%v), and %s has none of that name", strings.Join(q.services, ", "), jerr, h.cfg.Dir)
}

// journal runs journalctl.
func (h *Handler) journal(ctx context.Context, q question, out io.Writer) error {
	cmd := exec.CommandContext(ctx, h.cfg.Journalctl, q.arguments()...)
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = out, &limited{&said, 4096}
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	if words := strings.TrimSpace(said.String()); words != "" {
		return errors.New(strings.ReplaceAll(words, "\n", "; "))
	}
	var exit *exec.ExitError
	if errors.As(err, &exit) && exit.ExitCode() == 1 {
		return nil // it found nothing
	}
	return err
}

// errFull ends an answer that has become too long.
var errFull = errors.New("the answer is cut off here: ask for less by tailLines, sinceTime or pattern")

// counter passes on what is written, up to maxAnswer.
type counter struct {
	w io.Writer
	n int64
}

// Write implements io.Writer.
func (c *counter) Write(p []byte) (int, error) {
	if c.n+int64(len(p)) > maxAnswer {
		return 0, errFull
	}
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}

// limited keeps the beginning of what is written.
type limited struct {
	to   *bytes.Buffer
	left int
}

// Write implements io.Writer.
func (l *limited) Write(p []byte) (int, error) {
	keep := p[:min(len(p), l.left)]
	l.to.Write(keep)
	l.left -= len(keep)
	return len(p), nil
}

// lines answers with a file of Dir.
func (h *Handler) lines(w io.Writer, q question, name string) error {
	if !q.since.IsZero() || !q.until.IsZero() {
		return refuse(http.StatusBadRequest, "sinceTime, untilTime: the lines of a file do not say their time in a way that is known: leave them out")
	}
	f, st, err := h.open(name)
	if err != nil {
		return err
	}
	defer f.Close()
	if st.IsDir() {
		return refuse(http.StatusNotFound, "%s is a folder: name a file in it", name)
	}
	return copyLines(w, q, f)
}

// own answers with this program's own log, the file before first.
func (h *Handler) own(w io.Writer, q question) error {
	var files []io.Reader
	for _, path := range append(OlderLogs(h.cfg.Own), h.cfg.Own) {
		f, err := os.Open(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		defer f.Close()
		files = append(files, f)
	}
	return copyLines(w, q, io.MultiReader(files...))
}

// maxLine is the longest line that is looked at as a whole.
const maxLine = 1 << 20

// copyLines writes the lines that are asked for.
func copyLines(w io.Writer, q question, from io.Reader) error {
	out := bufio.NewWriter(&counter{w: w})
	var last [][]byte // the newest q.tail lines, in a ring that begins at next
	next := 0
	s := bufio.NewScanner(from)
	s.Buffer(make([]byte, 64<<10), maxLine)
	for s.Scan() {
		line := s.Bytes()
		if q.pattern != nil && !q.pattern.Match(line) || !q.during(line) {
			continue
		}
		var err error
		switch {
		case q.tail < 0:
			_, err = fmt.Fprintf(out, "%s\n", line)
		case q.tail == 0:
		case len(last) < q.tail:
			last = append(last, bytes.Clone(line))
		default:
			last[next] = bytes.Clone(line)
			next = (next + 1) % q.tail
		}
		if err != nil {
			return cut(w, err)
		}
	}
	for i := range last {
		if _, err := fmt.Fprintf(out, "%s\n", last[(next+i)%len(last)]); err != nil {
			return cut(w, err)
		}
	}
	return cut(w, errors.Join(s.Err(), out.Flush()))
}

// cut says at the end of an answer why it ends there.
func cut(w io.Writer, err error) error {
	if err != nil {
		fmt.Fprintln(w, err)
	}
	return nil
}

// during tells whether a line of log/slog is of the time that is asked for. One
// without a time belongs to those before it and is left out.
func (q question) during(line []byte) bool {
	if q.since.IsZero() && q.until.IsZero() {
		return true
	}
	text, found := bytes.CutPrefix(line, []byte("time="))
	if !found {
		if text, found = bytes.CutPrefix(line, []byte(`{"time":"`)); !found {
			return false
		}
	}
	end := bytes.IndexAny(text, ` "`)
	if end < 0 {
		return false
	}
	at, err := time.Parse(time.RFC3339Nano, string(text[:end]))
	return err == nil && !at.Before(q.since) && (q.until.IsZero() || !at.After(q.until))
}
