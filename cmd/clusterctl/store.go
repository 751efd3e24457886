package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	"k8s.io/kubectl/pkg/util/templates"
)

func newStoreCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "store",
		Short: "Inspect the replicated store",
		Run:   cmdutil.DefaultSubCommandRun(streams.ErrOut),
	}
	cmd.AddCommand(newStoreStatusCommand(f, streams), newStoreTopCommand(f, streams))
	return cmd
}

func newStoreStatusCommand(f cmdutil.Factory, streams genericiooptions.IOStreams) *cobra.Command {
	var out output
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the state of the store on the contacted server",
		Long: templates.LongDesc(`
			Show the state of the replicated store on the contacted server: its role, the applied
			index, size and history, and the same of the other servers as they report it. Stores
			that have applied the same entries have the same hash. It works without a leader.`),
		Example: templates.Examples(`
			# Show the store of the server in the kubeconfig
			clusterctl store status

			# Ask another server
			clusterctl store status --server https://n2:6443`),
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var raw json.RawMessage
			return show(cmd.Context(), f, streams, out, "state of the store", pathOf("store"), &raw, nil, func(w io.Writer) error { return storeTable(w, raw) })
		},
	}
	cmd.Flags().StringVarP((*string)(&out), "output", "o", "", "One of: json, yaml")
	return cmd
}

// storeTable shows every field of the server's answer about its store, in the
// server's order, so that a newer server may send more: scalars as lines, lists
// of objects as tables.
func storeTable(w io.Writer, raw json.RawMessage) error {
	fields, err := fieldsOf(raw)
	if err != nil {
		return fmt.Errorf("state of the store: %w", err)
	}
	var rows [][]string
	var tables []field
	for _, f := range fields {
		switch {
		case isList(f.value):
			tables = append(tables, f)
		default:
			rows = append(rows, []string{title(f.name) + ":", shown(f.name, f.value)})
		}
	}
	if err := printTable(w, nil, rows); err != nil {
		return err
	}
	for _, t := range tables {
		if err := listTable(w, t); err != nil {
			return err
		}
	}
	return nil
}

func listTable(w io.Writer, f field) error {
	var items []json.RawMessage
	if err := json.Unmarshal(f.value, &items); err != nil {
		return err
	}
	if len(items) == 0 {
		return nil
	}
	var header []string
	var rows [][]string
	for _, item := range items {
		fields, err := fieldsOf(item)
		if err != nil { // a list of plain values
			rows, header = append(rows, []string{shown(f.name, item)}), []string{"VALUE"}
			continue
		}
		cells := map[string]string{}
		for _, c := range fields {
			column := strings.ToUpper(title(c.name))
			if !slices.Contains(header, column) {
				header = append(header, column)
			}
			cells[column] = shown(c.name, c.value)
		}
		var row []string
		for _, column := range header {
			row = append(row, orNone(cells[column]))
		}
		rows = append(rows, row)
	}
	fmt.Fprintf(w, "\n%s:\n", title(f.name))
	return printTable(w, header, rows)
}

// field is one member of a JSON object.
type field struct {
	name  string
	value json.RawMessage
}

// fieldsOf are the members of an object in the order in which they came; those
// of objects inside follow under both names.
func fieldsOf(raw json.RawMessage) ([]field, error) {
	dec := json.NewDecoder(bytes.NewReader(raw))
	if t, err := dec.Token(); err != nil || t != json.Delim('{') {
		return nil, fmt.Errorf("the server sent no JSON object (%v)", err)
	}
	var fields []field
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return nil, err
		}
		var value json.RawMessage
		if err := dec.Decode(&value); err != nil {
			return nil, err
		}
		f := field{fmt.Sprint(key), value}
		inner, err := fieldsOf(value)
		if err != nil {
			fields = append(fields, f)
			continue
		}
		for _, i := range inner {
			fields = append(fields, field{f.name + upperFirst(i.name), i.value})
		}
	}
	return fields, nil
}

func isList(v json.RawMessage) bool { return len(v) > 0 && v[0] == '[' }

// shown is a value as a reader wants it: text without quotes, sizes, spans and
// times in units, which the end of the field's name tells.
func shown(name string, v json.RawMessage) string {
	var text string
	if json.Unmarshal(v, &text) == nil {
		return orNone(text)
	}
	if string(v) == "null" {
		return orNone("")
	}
	var n int64
	if json.Unmarshal(v, &n) == nil {
		for end, format := range units {
			if hasUnit(name, end) {
				return format(n)
			}
		}
	}
	return string(v)
}

var units = map[string]func(n int64) string{
	"Bytes":       size,
	"Nanoseconds": func(n int64) string { return time.Duration(n).Round(time.Millisecond).String() },
	"Time":        func(n int64) string { return time.UnixMilli(n).UTC().Format(time.RFC3339) },
}

func hasUnit(name, unit string) bool { return strings.HasSuffix(upperFirst(name), unit) }

// title is what a table calls a field: the unit that shown has used is left
// out of its name.
func title(name string) string {
	switch {
	case hasUnit(name, "Bytes"):
		name = strings.TrimSuffix(upperFirst(name), "Bytes") + "Size"
	case hasUnit(name, "Nanoseconds"):
		name = strings.TrimSuffix(upperFirst(name), "Nanoseconds")
	}
	return words(name)
}

// words makes words of a field's name: lastLogIndex becomes Last log index.
func words(name string) string {
	var b strings.Builder
	runes := []rune(name)
	for i, r := range runes {
		upper := unicode.IsUpper(r)
		starts := upper && i > 0 && (!unicode.IsUpper(runes[i-1]) || i+1 < len(runes) && unicode.IsLower(runes[i+1]))
		switch {
		case i == 0:
			b.WriteRune(unicode.ToUpper(r))
		case r == '_':
			b.WriteByte(' ')
		case starts && i+1 < len(runes) && unicode.IsUpper(runes[i+1]):
			b.WriteByte(' ')
			b.WriteRune(r)
		case starts:
			b.WriteByte(' ')
			b.WriteRune(unicode.ToLower(r))
		default:
			b.WriteRune(r)
		}
	}
	return b.String()
}

func upperFirst(s string) string {
	if s == "" {
		return s
	}
	return strings.ToUpper(s[:1]) + s[1:]
}
