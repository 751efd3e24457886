// Command promparse reads a page of metrics as Prometheus does when it scrapes
// one, and prints how many families and series there are. It ends with 1 at what
// Prometheus would not take, and at what it takes and should not be there: a
// series twice, a family of two types or without one.
//
//	promparse CONTENT-TYPE <page
package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/prometheus/prometheus/model/labels"
	"github.com/prometheus/prometheus/model/textparse"
)

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "promparse: one argument, the content type, is needed")
		os.Exit(2)
	}
	page, err := io.ReadAll(os.Stdin)
	if err == nil {
		var families, series int
		if families, series, err = parse(page, os.Args[1]); err == nil {
			fmt.Println(families, series)
			return
		}
	}
	fmt.Fprintln(os.Stderr, "promparse:", err)
	os.Exit(1)
}

func parse(page []byte, contentType string) (families, series int, err error) {
	p, err := textparse.New(page, contentType, nil, textparse.ParserOptions{})
	if err != nil {
		return 0, 0, err
	}
	types, seen := map[string]string{}, map[string]bool{}
	for {
		entry, err := p.Next()
		if errors.Is(err, io.EOF) {
			return len(types), len(seen), nil
		}
		if err != nil {
			return 0, 0, err
		}
		switch entry {
		case textparse.EntryType:
			name, kind := p.Type()
			if was, ok := types[string(name)]; ok {
				return 0, 0, fmt.Errorf("%s is a %s and a %s", name, was, kind)
			}
			types[string(name)] = string(kind)
		case textparse.EntrySeries:
			var l labels.Labels
			p.Labels(&l)
			text := l.String()
			if seen[text] {
				return 0, 0, fmt.Errorf("%s is there twice", text)
			}
			seen[text] = true
			if !typed(types, l.Get(labels.MetricName)) {
				return 0, 0, fmt.Errorf("%s has no type", text)
			}
		}
	}
}

// typed says whether the family of a series has a type.
func typed(types map[string]string, name string) bool {
	if _, ok := types[name]; ok {
		return true
	}
	for _, suffix := range []string{"_bucket", "_sum", "_count"} {
		if base, ok := strings.CutSuffix(name, suffix); ok {
			if kind := types[base]; kind == "histogram" || kind == "summary" {
				return true
			}
		}
	}
	return false
}
