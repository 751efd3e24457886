// Command report says which rows of docs/FEATURES.md or docs/CONFORMANCE.md
// passing tests show. It runs every test package that names rows of that list,
// or reads what an earlier run recorded.
//
//	go run ./features/report                      (make features)
//	go run ./features/report -list conformance    (make conformance)
//	go run ./features/report -from FILE
package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"

	"github.com/clusterd/clusterd/features"
)

// list is one of the lists of rows.
type list struct {
	docs string // where it is written
	env  string // names the file that tests record its rows in
	call string // how a test names its rows
}

var lists = map[string]list{
	"features":    {"docs/FEATURES.md", features.FileEnv, "features.Shows"},
	"conformance": {"docs/CONFORMANCE.md", features.ConformanceEnv, "features.Conforms"},
}

func main() {
	name := flag.String("list", "features", "features or conformance")
	from := flag.String("from", "", "a file of recorded rows; none: run the tests")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *name, *from, os.Stdout); err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", *name, err)
		os.Exit(1)
	}
}

func run(ctx context.Context, name, from string, out io.Writer) error {
	l, ok := lists[name]
	if !ok {
		return fmt.Errorf("-list %q: want features or conformance", name)
	}
	text, err := os.ReadFile(l.docs)
	if err != nil {
		return err
	}
	areas, err := parse(string(text))
	if err != nil {
		return fmt.Errorf("%s: %w", l.docs, err)
	}
	var testErr error
	if from == "" {
		tmp, err := os.CreateTemp("", "features-")
		if err != nil {
			return err
		}
		defer func() { _ = os.Remove(tmp.Name()) }()
		if err := tmp.Close(); err != nil {
			return err
		}
		from = tmp.Name()
		testErr = runTests(ctx, l, from)
	}
	recorded, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	shown, err := readRecord(string(recorded))
	if err != nil {
		return fmt.Errorf("%s: %w", from, err)
	}
	if err := report(out, areas, shown); err != nil {
		return err
	}
	return testErr // the rows of failed tests are among the missing
}

// runTests runs every package whose tests name rows of the list.
func runTests(ctx context.Context, l list, file string) error {
	packages, err := packagesOf(ctx, l)
	if err != nil {
		return err
	}
	test := exec.CommandContext(ctx, "go", append([]string{"test", "-count=1", "-p=1", "-timeout=30m"}, packages...)...)
	test.Stdout, test.Stderr = os.Stderr, os.Stderr
	test.Env = append(os.Environ(), l.env+"="+file)
	if os.Geteuid() == 0 {
		test.Env = append(test.Env, "CLUSTERD_ROOT=1", "CLUSTERD_E2E=netns")
	} else {
		fmt.Fprintln(os.Stderr, "without root no container starts, and most rows stay missing: sudo make features")
	}
	if err := test.Run(); err != nil {
		return fmt.Errorf("go test: %w", err)
	}
	return nil
}

// packagesOf finds the packages with a test file that names rows of the list.
func packagesOf(ctx context.Context, l list) ([]string, error) {
	cmd := exec.CommandContext(ctx, "go", "list", "-f",
		`{{$d := .Dir}}{{$p := .ImportPath}}{{range .TestGoFiles}}{{$p}} {{$d}}/{{.}}{{"\n"}}{{end}}{{range .XTestGoFiles}}{{$p}} {{$d}}/{{.}}{{"\n"}}{{end}}`, "./...")
	cmd.Stderr = os.Stderr
	b, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	var packages []string
	for line := range strings.Lines(string(b)) {
		pkg, file, ok := strings.Cut(strings.TrimSpace(line), " ")
		if !ok || slices.Contains(packages, pkg) {
			continue
		}
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		if bytes.Contains(text, []byte(l.call)) {
			packages = append(packages, pkg)
		}
	}
	if len(packages) == 0 {
		return nil, errors.New("no test calls " + l.call + "…")
	}
	return packages, nil
}

// area is a section of the list.
type area struct {
	title string
	rows  []row
}

type row struct {
	number int
	name   string
}

// parse reads the tables of a list; each row must be there once and in order.
func parse(text string) ([]area, error) {
	var areas []area
	next := 1
	s := bufio.NewScanner(strings.NewReader(text))
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		line := s.Text()
		if title, ok := strings.CutPrefix(line, "## "); ok {
			areas = append(areas, area{title: title})
			continue
		}
		cells := strings.Split(line, "|")
		if len(cells) < 4 || len(areas) == 0 {
			continue
		}
		n, err := strconv.Atoi(strings.TrimSpace(cells[1]))
		if err != nil {
			continue // a heading
		}
		if n != next {
			return nil, fmt.Errorf("row %d comes where row %d should", n, next)
		}
		next++
		last := &areas[len(areas)-1]
		last.rows = append(last.rows, row{n, strings.TrimSpace(cells[2])})
	}
	if err := s.Err(); err != nil {
		return nil, err
	}
	areas = slices.DeleteFunc(areas, func(a area) bool { return len(a.rows) == 0 })
	if len(areas) == 0 {
		return nil, errors.New("no rows found")
	}
	return areas, nil
}

// evidence is what the tests that name a row came to.
type evidence struct {
	passed  []string // on the real program
	doubles []string // passed, but against doubles
	not     []string // failed, never ended, or were skipped wherever they ran
}

// counts says whether the row is shown: every test that names it passed, one
// of them at least on the real program.
func (e evidence) counts() bool { return len(e.passed) > 0 && len(e.not) == 0 }

func (e evidence) tests() []string { return slices.Concat(e.passed, e.doubles, e.not) }

// readRecord returns the evidence for each row. A test may have run more than
// once: a run in which it was skipped is made up for by one in which it passed,
// one in which it failed or never ended is not.
func readRecord(text string) (map[int]evidence, error) {
	type key struct {
		row  int
		test string
	}
	states := map[key]map[string]int{}
	var order []key
	for line := range strings.Lines(text) {
		f := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if len(f) != 3 {
			return nil, fmt.Errorf("not a recorded row: %q", line)
		}
		n, err := strconv.Atoi(f[0])
		known := []string{features.Began, features.Passed, features.Doubles, features.Failed, features.Skipped}
		if err != nil || !slices.Contains(known, f[2]) {
			return nil, fmt.Errorf("not a recorded row: %q", line)
		}
		k := key{n, f[1]}
		if states[k] == nil {
			states[k] = map[string]int{}
			order = append(order, k)
		}
		states[k][f[2]]++
	}
	shown := map[int]evidence{}
	for _, k := range order {
		e, s := shown[k.row], states[k]
		ended := s[features.Passed] + s[features.Doubles] + s[features.Failed] + s[features.Skipped]
		switch {
		case s[features.Failed] > 0 || ended < s[features.Began] || s[features.Passed]+s[features.Doubles] == 0:
			e.not = append(e.not, k.test)
		case s[features.Passed] > 0:
			e.passed = append(e.passed, k.test)
		default:
			e.doubles = append(e.doubles, k.test)
		}
		shown[k.row] = e
	}
	return shown, nil
}

func report(w io.Writer, areas []area, shown map[int]evidence) error {
	var b bytes.Buffer
	total, have, known := 0, 0, map[int]bool{}
	for _, a := range areas {
		for _, r := range a.rows {
			total++
			known[r.number] = true
			if shown[r.number].counts() {
				have++
			}
		}
	}
	fmt.Fprintf(&b, "rows shown: %d of %d\n", have, total)
	for _, a := range areas {
		missing := slices.DeleteFunc(slices.Clone(a.rows), func(r row) bool { return shown[r.number].counts() })
		fmt.Fprintf(&b, "\n%s: %d of %d\n", a.title, len(a.rows)-len(missing), len(a.rows))
		for _, r := range missing {
			e, why := shown[r.number], ""
			switch {
			case len(e.not) > 0:
				why = "  (did not pass: " + strings.Join(e.not, ", ") + ")"
			case len(e.doubles) > 0:
				why = "  (with doubles only: " + strings.Join(e.doubles, ", ") + ")"
			}
			fmt.Fprintf(&b, "  missing %3d  %s%s\n", r.number, r.name, why)
		}
	}
	if _, err := w.Write(b.Bytes()); err != nil {
		return err
	}
	for n, e := range shown {
		if !known[n] {
			return fmt.Errorf("%s names row %d, which is not in the list", strings.Join(e.tests(), ", "), n)
		}
	}
	return nil
}
