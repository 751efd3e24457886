package conformance

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
)

// results are the tests of a run that was not skipped, as ginkgo's JSON report has them.
type results []result

type result struct {
	name, sig string
	passed    bool
	why       string // the first line of what it failed with
}

// spec is what is read of a test in ginkgo's report.
type spec struct {
	ContainerHierarchyTexts []string
	LeafNodeType            string
	LeafNodeText            string
	State                   string
	Failure                 struct {
		Message  string
		Location struct {
			FileName   string
			LineNumber int
		}
	}
}

var sigs = regexp.MustCompile(`\[(sig-[a-z-]+)\]`)

// parse reads ginkgo's report of one suite. What failed before or after all tests
// counts as a test that failed.
func parse(text []byte) (results, error) {
	var suites []struct{ SpecReports []spec }
	if err := json.Unmarshal(text, &suites); err != nil {
		return nil, fmt.Errorf("ginkgo's report: %w", err)
	}
	var all results
	for _, suite := range suites {
		for _, s := range suite.SpecReports {
			if s.State == "skipped" || s.State == "pending" || s.LeafNodeType != "It" && s.State == "passed" {
				continue
			}
			r := result{name: strings.TrimSpace(strings.Join(append(s.ContainerHierarchyTexts, s.LeafNodeText), " ")), sig: "other", passed: s.State == "passed"}
			if r.name == "" {
				r.name = s.LeafNodeType
			}
			if m := sigs.FindStringSubmatch(r.name); m != nil {
				r.sig = m[1]
			}
			if !r.passed {
				first, _, _ := strings.Cut(strings.TrimSpace(s.Failure.Message), "\n")
				file := s.Failure.Location.FileName
				r.why = fmt.Sprintf("%s: %s (%s:%d)", s.State, first, file[strings.LastIndex(file, "/")+1:], s.Failure.Location.LineNumber)
			}
			all = append(all, r)
		}
	}
	return all, nil
}

func (r results) passed() int {
	n := 0
	for _, one := range r {
		if one.passed {
			n++
		}
	}
	return n
}

func (r results) failed() int { return len(r) - r.passed() }

// String is a table by SIG, and the names of what failed.
func (r results) String() string {
	type count struct{ passed, failed int }
	by := map[string]*count{}
	var names []string
	for _, one := range r {
		c := by[one.sig]
		if c == nil {
			c = &count{}
			by[one.sig] = c
			names = append(names, one.sig)
		}
		if one.passed {
			c.passed++
		} else {
			c.failed++
		}
	}
	slices.Sort(names)
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(w, "SIG\tpassed\tfailed\t")
	for _, sig := range names {
		fmt.Fprintf(w, "%s\t%d\t%d\t\n", sig, by[sig].passed, by[sig].failed)
	}
	fmt.Fprintf(w, "all\t%d\t%d\t\n", r.passed(), r.failed())
	_ = w.Flush() // a strings.Builder takes all
	for _, one := range r {
		if !one.passed {
			fmt.Fprintf(&b, "\n%s\n    %s", one.name, one.why)
		}
	}
	return b.String()
}

// opener opens a file each time it is called.
func opener(path string) func() (io.ReadCloser, error) {
	return func() (io.ReadCloser, error) { return os.Open(path) }
}
