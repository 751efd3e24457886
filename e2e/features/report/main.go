// Command report says which rows of docs/FEATURES.md passing tests show. It
// runs every test package that imports e2e/features, or reads what an earlier
// run recorded.
//
//	go run ./e2e/features/report              (make features)
//	go run ./e2e/features/report -from FILE
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

	"github.com/clusterd/clusterd/e2e/features"
)

const featuresPackage = "github.com/clusterd/clusterd/e2e/features"

func main() {
	docs := flag.String("docs", "docs/FEATURES.md", "the list of rows")
	from := flag.String("from", "", "a file of recorded rows; none: run the tests")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *docs, *from, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "features:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, docs, from string, out io.Writer) error {
	text, err := os.ReadFile(docs)
	if err != nil {
		return err
	}
	areas, err := parse(string(text))
	if err != nil {
		return fmt.Errorf("%s: %w", docs, err)
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
		testErr = runTests(ctx, from)
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

// runTests runs every package whose tests import e2e/features.
func runTests(ctx context.Context, file string) error {
	list := exec.CommandContext(ctx, "go", "list", "-f", "{{.ImportPath}} {{.TestImports}} {{.XTestImports}}", "./...")
	list.Stderr = os.Stderr
	b, err := list.Output()
	if err != nil {
		return fmt.Errorf("go list: %w", err)
	}
	var packages []string
	for line := range strings.Lines(string(b)) {
		pkg, imports, _ := strings.Cut(strings.NewReplacer("[", " ", "]", " ").Replace(line), " ")
		if slices.Contains(strings.Fields(imports), featuresPackage) {
			packages = append(packages, pkg)
		}
	}
	if len(packages) == 0 {
		return errors.New("no test imports " + featuresPackage)
	}
	test := exec.CommandContext(ctx, "go", append([]string{"test", "-count=1", "-p=1", "-timeout=30m"}, packages...)...)
	test.Stdout, test.Stderr = os.Stderr, os.Stderr
	test.Env = append(os.Environ(), features.FileEnv+"="+file)
	if os.Geteuid() == 0 {
		test.Env = append(test.Env, "CLUSTERD_ROOT=1", "CLUSTERD_E2E=netns")
	} else {
		fmt.Fprintln(os.Stderr, "features: without root no container starts, and most rows stay missing: sudo make features")
	}
	if err := test.Run(); err != nil {
		return fmt.Errorf("go test: %w", err)
	}
	return nil
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

// parse reads the tables of docs/FEATURES.md; each row must be there once and
// in order.
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

// readRecord returns the tests that show each row.
func readRecord(text string) (map[int][]string, error) {
	shown := map[int][]string{}
	for line := range strings.Lines(text) {
		number, test, ok := strings.Cut(strings.TrimSuffix(line, "\n"), "\t")
		n, err := strconv.Atoi(number)
		if !ok || err != nil {
			return nil, fmt.Errorf("not a recorded row: %q", line)
		}
		if !slices.Contains(shown[n], test) {
			shown[n] = append(shown[n], test)
		}
	}
	return shown, nil
}

func report(w io.Writer, areas []area, shown map[int][]string) error {
	var b bytes.Buffer
	total, have, known := 0, 0, map[int]bool{}
	for _, a := range areas {
		for _, r := range a.rows {
			total++
			known[r.number] = true
			if len(shown[r.number]) > 0 {
				have++
			}
		}
	}
	fmt.Fprintf(&b, "rows shown: %d of %d\n", have, total)
	for _, a := range areas {
		missing := slices.DeleteFunc(slices.Clone(a.rows), func(r row) bool { return len(shown[r.number]) > 0 })
		fmt.Fprintf(&b, "\n%s: %d of %d\n", a.title, len(a.rows)-len(missing), len(a.rows))
		for _, r := range missing {
			fmt.Fprintf(&b, "  missing %3d  %s\n", r.number, r.name)
		}
	}
	if _, err := w.Write(b.Bytes()); err != nil {
		return err
	}
	for n, tests := range shown {
		if !known[n] {
			return fmt.Errorf("%s names row %d, which is not in the list", strings.Join(tests, ", "), n)
		}
	}
	return nil
}
