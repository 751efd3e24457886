package main

import (
	"os"
	"strings"
	"testing"
)

func TestTheListIsWhole(t *testing.T) {
	text, err := os.ReadFile("../../../docs/FEATURES.md")
	if err != nil {
		t.Fatal(err)
	}
	areas, err := parse(string(text))
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, a := range areas {
		n += len(a.rows)
	}
	if n != 304 || len(areas) != 20 {
		t.Fatalf("%d rows in %d areas, want 304 in 20", n, len(areas))
	}
}

const list = `# title
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
## Where the texts disagree
`

func TestReport(t *testing.T) {
	areas, err := parse(list)
	if err != nil {
		t.Fatal(err)
	}
	shown, err := readRecord("1\tTestA\n1\tTestA\n3\tTestB\n")
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	if err := report(&b, areas, shown); err != nil {
		t.Fatal(err)
	}
	const want = `rows shown: 2 of 3

A. One: 1 of 2
  missing   2  second

B. Two: 1 of 1
`
	if b.String() != want {
		t.Fatalf("got\n%s\nwant\n%s", b.String(), want)
	}
	shown[99] = []string{"TestC"}
	if err := report(&b, areas, shown); err == nil || !strings.Contains(err.Error(), "TestC names row 99") {
		t.Errorf("an unknown row: %v", err)
	}
}

func TestBadInput(t *testing.T) {
	for _, text := range []string{"", strings.Replace(list, "| 2 | second", "| 5 | second", 1)} {
		if _, err := parse(text); err == nil {
			t.Errorf("parse passed: %q", text)
		}
	}
	for _, text := range []string{"x\tTestA\n", "1 TestA\n"} {
		if _, err := readRecord(text); err == nil {
			t.Errorf("readRecord passed: %q", text)
		}
	}
}
