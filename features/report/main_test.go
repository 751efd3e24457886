package main

import (
	"os"
	"slices"
	"strings"
	"testing"
)

func TestTheListsAreWhole(t *testing.T) {
	for name, want := range map[string]struct{ rows, areas int }{"features": {304, 20}, "conformance": {462, 10}} {
		text, err := os.ReadFile("../../" + lists[name].docs)
		if err != nil {
			t.Fatal(err)
		}
		areas, err := parse(string(text))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		n := 0
		for _, a := range areas {
			n += len(a.rows)
		}
		if n != want.rows || len(areas) != want.areas {
			t.Errorf("%s: %d rows in %d areas, want %d in %d", name, n, len(areas), want.rows, want.areas)
		}
	}
}

// TestPackages: the packages whose tests name rows are found, and no others.
func TestPackages(t *testing.T) {
	t.Chdir("../..")
	for name, l := range lists {
		got, err := packagesOf(t.Context(), l)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if !slices.Contains(got, module+"e2e/kubectl") || slices.Contains(got, module+"gossip") || slices.Contains(got, module+"features") {
			t.Errorf("%s: %v", name, got)
		}
	}
}

const module = "github.com/clusterd/clusterd/"

const table = `# title
| Area | Rows |
|---|---:|
| A. One | 2 |

## A. One

| # | System | Texts | Shows it |
|---:|---|---|---|
| 1 | first | 000 | x |
| 2 | second | 000 | y |

## B. Two
| # | System | Texts | Shows it |
| 3 | third | 000 | z |
| 4 | fourth | 000 | z |
| 5 | fifth | 000 | z |
| 6 | sixth | 000 | z |
| 7 | seventh | 000 | z |
## Where the texts disagree
`

func TestReport(t *testing.T) {
	areas, err := parse(table)
	if err != nil {
		t.Fatal(err)
	}
	shown, err := readRecord(strings.Join([]string{
		"1\tTestA\tskipped", // in a run without root
		"1\tTestA\tbegan", "1\tTestA\tpassed",
		"1\tTestF\tbegan", "1\tTestF\tpassed with doubles",
		"3\tTestB\tbegan", "3\tTestB\tpassed",
		"4\tTestB\tbegan", "4\tTestB\tpassed", "4\tTestC\tbegan", "4\tTestC\tfailed",
		"5\tTestB\tbegan", "5\tTestB\tpassed", "5\tTestD\tbegan", // its process died
		"6\tTestF\tbegan", "6\tTestF\tpassed with doubles",
		"7\tTestB\tbegan", "7\tTestB\tpassed", "7\tTestG\tbegan", "7\tTestG\tskipped", "",
	}, "\n"))
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	if err := report(&b, areas, shown); err != nil {
		t.Fatal(err)
	}
	const want = `rows shown: 2 of 7

A. One: 1 of 2
  missing   2  second

B. Two: 1 of 5
  missing   4  fourth  (did not pass: TestC)
  missing   5  fifth  (did not pass: TestD)
  missing   6  sixth  (with doubles only: TestF)
  missing   7  seventh  (did not pass: TestG)
`
	if b.String() != want {
		t.Fatalf("got\n%s\nwant\n%s", b.String(), want)
	}
	shown[99] = evidence{passed: []string{"TestC"}}
	if err := report(&b, areas, shown); err == nil || !strings.Contains(err.Error(), "TestC names row 99") {
		t.Errorf("an unknown row: %v", err)
	}
}

func TestBadInput(t *testing.T) {
	for _, text := range []string{"", strings.Replace(table, "| 2 | second", "| 5 | second", 1)} {
		if _, err := parse(text); err == nil {
			t.Errorf("parse passed: %q", text)
		}
	}
	for _, text := range []string{"x\tTestA\tpassed\n", "1 TestA\n", "1\tTestA\n", "1\tTestA\tmaybe\n"} {
		if _, err := readRecord(text); err == nil {
			t.Errorf("readRecord passed: %q", text)
		}
	}
}
