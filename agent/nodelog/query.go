package nodelog

import (
	"io/fs"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

// question is a query that makes sense.
type question struct {
	services []string // or
	file     string   // of Dir
	pattern  *regexp.Regexp
	since    time.Time // zero: from the beginning
	until    time.Time // zero: to the end
	tail     int       // -1: all
	boot     *int      // nil: all that the journal holds
}

// Bounds of a question.
const (
	maxServices = 16
	maxName     = 256
	maxPattern  = 512
	maxTail     = 1_000_000
)

// serviceName is what systemd calls a unit, without the patterns that it
// would take as well, and not to be taken for an option.
var serviceName = regexp.MustCompile(`^[A-Za-z0-9_@][A-Za-z0-9_@:.\-]*$`)

// ask reads a query. Each error names the parameter, its value and the cure.
func ask(q url.Values) (question, error) {
	out := question{tail: -1}
	for name, values := range q {
		if !slices.Contains([]string{"query", "pattern", "sinceTime", "untilTime", "tailLines", "boot"}, name) {
			return out, refuse(http.StatusBadRequest, "%s: there is no such parameter: use query, pattern, sinceTime, untilTime, tailLines or boot", name)
		}
		if len(values) > 1 && name != "query" {
			return out, refuse(http.StatusBadRequest, "%s: it is given %d times", name, len(values))
		}
	}
	for _, value := range q["query"] {
		switch {
		case value == "" || len(value) > maxName:
			return out, refuse(http.StatusBadRequest, "query: %.300q: name a service, such as %s, or a file below the folder of logs, such as /syslog", value, Service)
		case strings.Contains(value, "/"):
			name := strings.TrimPrefix(value, "/")
			if !fs.ValidPath(name) || name == "." {
				return out, refuse(http.StatusBadRequest, "query: %q: give the path of a file below the folder of logs, without . and .. in it", value)
			}
			out.file = name
		case !serviceName.MatchString(value) || strings.Contains(value, ".."):
			return out, refuse(http.StatusBadRequest, "query: %q is no service's name: letters, digits and _ @ : . - are in one", value)
		case !slices.Contains(out.services, value):
			out.services = append(out.services, value)
		}
	}
	switch {
	case len(q["query"]) == 0:
		return out, refuse(http.StatusBadRequest, "query: name a service, such as query=%s, or a file, such as query=/syslog", Service)
	case out.file != "" && len(q["query"]) > 1:
		return out, refuse(http.StatusBadRequest, "query: one file is read at a time, and no service with it")
	case len(out.services) > maxServices:
		return out, refuse(http.StatusBadRequest, "query: %d services: name %d at most", len(out.services), maxServices)
	}
	var err error
	if p := q.Get("pattern"); p != "" {
		if len(p) > maxPattern {
			return out, refuse(http.StatusBadRequest, "pattern: it has %d letters: use %d at most", len(p), maxPattern)
		}
		if out.pattern, err = regexp.Compile(p); err != nil {
			return out, refuse(http.StatusBadRequest, "pattern: %v", err)
		}
	}
	for name, to := range map[string]*time.Time{"sinceTime": &out.since, "untilTime": &out.until} {
		if value := q.Get(name); value != "" {
			if *to, err = time.Parse(time.RFC3339, value); err != nil {
				return out, refuse(http.StatusBadRequest, "%s: %.40q: give a time such as 2026-01-02T15:04:05Z", name, value)
			}
		}
	}
	if !out.since.IsZero() && !out.until.IsZero() && out.until.Before(out.since) {
		return out, refuse(http.StatusBadRequest, "untilTime: it is before sinceTime")
	}
	if value := q.Get("tailLines"); value != "" {
		if out.tail, err = strconv.Atoi(value); err != nil || out.tail < 0 || out.tail > maxTail {
			return out, refuse(http.StatusBadRequest, "tailLines: %.40q: give a number from 0 to %d", value, maxTail)
		}
	}
	if value := q.Get("boot"); value != "" {
		n, err := strconv.Atoi(value)
		if err != nil || n > 0 || n < -10000 {
			return out, refuse(http.StatusBadRequest, "boot: %.40q: 0 is the current boot, -1 the one before", value)
		}
		if out.file != "" {
			return out, refuse(http.StatusBadRequest, "boot: a file knows of no boots: leave it out")
		}
		out.boot = &n
	}
	return out, nil
}

// arguments are those of journalctl for the question.
func (q question) arguments() []string {
	args := []string{"--quiet", "--utc", "--no-pager", "--output=short-precise"}
	for _, s := range q.services {
		args = append(args, "--unit="+s)
	}
	if !q.since.IsZero() {
		args = append(args, "--since="+q.since.UTC().Format("2006-01-02 15:04:05.999999"))
	}
	if !q.until.IsZero() {
		args = append(args, "--until="+q.until.UTC().Format("2006-01-02 15:04:05.999999"))
	}
	if q.tail >= 0 {
		args = append(args, "--lines="+strconv.Itoa(q.tail))
	}
	if q.boot != nil {
		args = append(args, "--boot="+strconv.Itoa(*q.boot))
	}
	if q.pattern != nil {
		args = append(args, "--grep="+q.pattern.String())
	}
	return args
}
