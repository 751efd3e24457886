package main

import (
	"bytes"
	"flag"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/clusterd/clusterd/cmd/docstest"
)

var update = flag.Bool("update", false, "rewrite docs/configuration.md")

const referenceFile = "../../docs/configuration.md"

// TestReference keeps docs/configuration.md as the code is: each key of
// config.yaml with its flag, default and comment, and each command's flags.
func TestReference(t *testing.T) {
	got := reference(t)
	if *update {
		if err := os.WriteFile(referenceFile, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(referenceFile)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("docs/configuration.md is not as the code is; run: go test ./cmd/clusterd -run TestReference -update\n%s", diff)
	}
}

func reference(t *testing.T) []byte {
	t.Helper()
	var out bytes.Buffer
	out.WriteString(`# Configuration

<!-- Made from cmd/clusterd/config*.go: go test ./cmd/clusterd -run TestReference -update -->

Defaults come first, then ` + "`DATA/config.yaml`" + `, then the file of ` + "`--config FILE`" + `, then environment variables (` + "`CLUSTERD_MAX_PODS` for `--max-pods`" + `), then flags. ` + "`clusterd init` and `clusterd join`" + ` write the file,
so that ` + "`clusterd run`" + ` needs no flag but ` + "`--data`" + `. Unknown keys are refused.
Sizes are written as ` + "`64Mi`" + `, durations as ` + "`30s`" + `.

## config.yaml

| key | flag | default | |
|---|---|---|---|
`)
	comments := fieldComments(t)
	cfg := defaultConfig()
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	cfg.addFlags(flags)
	cfg.addClusterFlags(flags)
	byAddress := map[uintptr]*pflag.Flag{}
	flags.VisitAll(func(f *pflag.Flag) { byAddress[reflect.ValueOf(f.Value).Pointer()] = f })
	keys := 0
	var fields func(v reflect.Value)
	fields = func(v reflect.Value) {
		for i := range v.NumField() {
			field := v.Type().Field(i)
			key, _, _ := strings.Cut(field.Tag.Get("json"), ",")
			if field.Anonymous {
				fields(v.Field(i))
				continue
			}
			if key == "-" {
				continue
			}
			keys++
			name := "" // some are of the file alone
			if f := byAddress[v.Field(i).Addr().Pointer()]; f != nil {
				name = "`--" + f.Name + "`"
			}
			comment := comments[v.Type().Name()+"."+field.Name]
			if comment == "" {
				t.Errorf("%s.%s has no comment, which is its help", v.Type().Name(), field.Name)
			}
			fmt.Fprintf(&out, "| `%s` | %s | %s | %s |\n", key, name, defaultOf(v.Field(i)), docstest.Cell(describe(field.Name, comment)))
		}
	}
	fields(reflect.ValueOf(&cfg).Elem())
	if keys < 30 {
		t.Errorf("only %d keys were found", keys)
	}
	out.WriteString("\n## Commands\n\nThe flags that set a key of the file are left out here: " +
		"`init`, `join`, `run`, `dev`, `standalone` and `doctor` have those as well where they apply.\n")
	docstest.Reference(&out, rootCommand(), func(f *pflag.Flag) bool {
		return flags.Lookup(f.Name) != nil && f.Name != "data" && f.Name != "config" && f.Name != "peer"
	})
	return out.Bytes()
}

// describe is the comment of a field without the field's name, which the row has as its
// key: "MaxPods is how many …" is "How many …".
func describe(field, comment string) string {
	rest, ok := strings.CutPrefix(comment, field+" ")
	if !ok {
		return comment
	}
	for _, verb := range []string{"is ", "are ", "holds ", "says "} {
		if after, ok := strings.CutPrefix(rest, verb); ok {
			rest = after
			break
		}
	}
	return strings.ToUpper(rest[:1]) + rest[1:]
}

func defaultOf(v reflect.Value) string {
	if v.IsZero() {
		return "–"
	}
	if d, ok := v.Interface().(Duration); ok {
		return "`" + d.String() + "`"
	}
	return fmt.Sprintf("`%v`", v.Interface())
}

// fieldComments are the comments of the fields of this package's structs, by
// TYPE.FIELD. Fields that stand together share the first one's.
func fieldComments(t *testing.T) map[string]string {
	t.Helper()
	files, err := filepath.Glob("config*.go")
	if err != nil {
		t.Fatal(err)
	}
	comments := map[string]string{}
	for _, name := range files {
		p, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ParseComments)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(p, func(n ast.Node) bool {
			spec, ok := n.(*ast.TypeSpec)
			if !ok {
				return true
			}
			body, ok := spec.Type.(*ast.StructType)
			if !ok {
				return true
			}
			last := ""
			for _, f := range body.Fields.List {
				if f.Doc != nil {
					last = f.Doc.Text()
				}
				for _, name := range f.Names {
					comments[spec.Name.Name+"."+name.Name] = last
				}
			}
			return true
		})
	}
	return comments
}
