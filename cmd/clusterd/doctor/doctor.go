// Package doctor checks a machine before it becomes a node, and a running cluster, and
// suggests a fix for each finding. The checks are functions of values (machine.go,
// cluster.go); look.go gathers those of the machine.
package doctor

import (
	"fmt"
	"io"
	"strings"
)

// Level is how bad a finding is.
type Level string

// The levels, the worst last.
const (
	OK      Level = "ok"
	Warning Level = "warning" // it works, and will hurt
	Problem Level = "problem" // a node does not work, or the cluster stands still
)

// Finding is the result of a check: what was seen, and how to fix it.
type Finding struct {
	Check string `json:"check"` // one or two words: "clock", "port"
	Level Level  `json:"level"`
	Says  string `json:"says"`
	Fix   string `json:"cure,omitempty"` // "" when all is well
}

// findings gathers what checks say.
type findings []Finding

func (f *findings) ok(check, format string, args ...any) {
	*f = append(*f, Finding{check, OK, fmt.Sprintf(format, args...), ""})
}

func (f *findings) warn(check, cure, format string, args ...any) {
	*f = append(*f, Finding{check, Warning, fmt.Sprintf(format, args...), cure})
}

func (f *findings) problem(check, cure, format string, args ...any) {
	*f = append(*f, Finding{check, Problem, fmt.Sprintf(format, args...), cure})
}

// Count is how many findings are of a level.
func Count(all []Finding, level Level) (n int) {
	for _, f := range all {
		if f.Level == level {
			n++
		}
	}
	return n
}

// Print writes findings as text, each with its fix below it.
func Print(w io.Writer, title string, all []Finding) {
	fmt.Fprintf(w, "%s\n", title)
	marks := map[Level]string{OK: "ok     ", Warning: "WARNING", Problem: "PROBLEM"}
	for _, f := range all {
		fmt.Fprintf(w, "  %s  %-9s  %s\n", marks[f.Level], f.Check, strings.ReplaceAll(f.Says, "\n", " "))
		if f.Fix != "" {
			fmt.Fprintf(w, "           %-9s  → %s\n", "", f.Fix)
		}
	}
}
