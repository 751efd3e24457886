package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/duration"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/cli-runtime/pkg/printers"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	"sigs.k8s.io/yaml"
)

// output is the value of -o for our own commands.
type output string

func (o output) validate() error {
	switch o {
	case "", "json", "yaml":
		return nil
	}
	return fmt.Errorf("--output must be json or yaml, not %q", string(o))
}

// print writes v as json or yaml if that is asked for, and calls table if not.
func (o output) print(w io.Writer, v any, table func(w io.Writer) error) error {
	switch o {
	case "json":
		b, err := json.MarshalIndent(v, "", "    ")
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(w, string(b))
		return err
	case "yaml":
		b, err := yaml.Marshal(v)
		if err != nil {
			return err
		}
		_, err = w.Write(b)
		return err
	}
	return table(w)
}

// printTable writes aligned columns under a header, which may be nil.
func printTable(w io.Writer, header []string, rows [][]string) error {
	tw := printers.GetNewTabWriter(w)
	if header != nil {
		fmt.Fprintln(tw, strings.Join(header, "\t"))
	}
	for _, row := range rows {
		fmt.Fprintln(tw, strings.Join(row, "\t"))
	}
	return tw.Flush()
}

// orNone is what a table shows for s.
func orNone(s string) string {
	if s == "" {
		return "<none>"
	}
	return s
}

// age is the time since t as kubectl shows it.
func age(t, now time.Time) string {
	if t.IsZero() {
		return "<unknown>"
	}
	return duration.HumanDuration(now.Sub(t))
}

// size is a number of bytes in the largest unit that leaves at least one.
func size(n int64) string {
	const units = "KMGTPE"
	if n < 1024 {
		return fmt.Sprintf("%d B", n)
	}
	v, unit := float64(n)/1024, 0
	for v >= 1024 && unit < len(units)-1 {
		v, unit = v/1024, unit+1
	}
	return fmt.Sprintf("%.1f %ciB", v, units[unit])
}

// show reads what path answers with into v, and prints it as out asks. none says in
// the place of a table that there is nothing; "", or a nil none: print the table. what
// is what an error says could not be done.
func show(ctx context.Context, f cmdutil.Factory, streams genericiooptions.IOStreams, out output, what, path string, v any, none func() string, table func(w io.Writer) error) error {
	if err := out.validate(); err != nil {
		return err
	}
	a, err := newAPI(f)
	if err != nil {
		return err
	}
	if err := a.do(ctx, http.MethodGet, path, nil, v); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	if out == "" && none != nil {
		if text := none(); text != "" {
			fmt.Fprintln(streams.ErrOut, text)
			return nil
		}
	}
	return out.print(streams.Out, v, table)
}
