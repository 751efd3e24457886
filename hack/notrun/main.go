// Command notrun reads what "go test -json" said in several runs and prints the
// tests that ran in none of them, with the reasons that they gave.
//
//	go run ./hack/notrun FILE...
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"regexp"
	"slices"
	"strings"
)

// event is one line of test2json (go doc test2json).
type event struct {
	Action, Package, Test, Output string
}

type test struct{ pkg, name string }

// where begins each line of output of a test: the file and the line that
// called Skip.
var where = regexp.MustCompile(`^[\w.-]+\.go:\d+: `)

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "notrun:", err)
		os.Exit(1)
	}
}

func run(files []string, out io.Writer) error {
	ran, reasons := map[test]bool{}, map[test]string{}
	for _, file := range files {
		f, err := os.Open(file)
		if err != nil {
			return err
		}
		err = errors.Join(read(f, ran, reasons), f.Close())
		if err != nil {
			return fmt.Errorf("%s: %w", file, err)
		}
	}
	byReason := map[string][]string{}
	total := 0
	for t, why := range reasons {
		if ran[t] {
			continue
		}
		total++
		pkg := strings.TrimPrefix(t.pkg, "github.com/clusterd/clusterd/")
		byReason[why] = append(byReason[why], pkg+"."+t.name)
	}
	why := make([]string, 0, len(byReason))
	for r := range byReason {
		why = append(why, r)
	}
	slices.Sort(why)
	fmt.Fprintf(out, "%d tests ran in no tier\n", total)
	for _, r := range why {
		slices.Sort(byReason[r])
		fmt.Fprintf(out, "  %s\n    %s\n", r, strings.Join(byReason[r], "\n    "))
	}
	return nil
}

// read notes which tests ran, and the reasons of those that were skipped.
func read(r io.Reader, ran map[test]bool, reasons map[test]string) error {
	said := map[test]string{} // the last line of each test under way
	for d := json.NewDecoder(r); ; {
		var e event
		switch err := d.Decode(&e); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		t := test{e.Package, e.Test}
		switch e.Action {
		case "output":
			line := strings.TrimSpace(e.Output)
			if where.MatchString(line) {
				said[t] = where.ReplaceAllString(line, "")
			}
			continue
		case "pass", "fail":
			ran[t] = true
		case "skip":
			if e.Test != "" { // else a package without tests
				reasons[t] = said[t]
			}
		}
		delete(said, t)
	}
}
