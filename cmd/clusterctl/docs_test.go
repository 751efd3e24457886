package main

import (
	"bytes"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"

	"github.com/clusterd/clusterd/cmd/docstest"
)

const referenceFile = "../../docs/clusterctl.md"

// TestReference keeps docs/clusterctl.md as the code is: our own commands with their flags.
func TestReference(t *testing.T) {
	var out bytes.Buffer
	out.WriteString(`# clusterctl

<!-- Made from cmd/clusterctl: go test ./cmd/clusterctl -run TestReference -update -->

` + "`clusterctl` has every command of `kubectl`, with the same flags and output; `clusterctl help` lists them. Below are those that are its own, beside `--at` of `get` and `describe`" + `
(the objects as they were, see ` + "`clusterctl history`" + `). All take the flags of ` + "`clusterctl options`" + `, such as ` + "`--kubeconfig` and `--namespace`" + `;
` + "`clusterctl COMMAND --help`" + ` shows examples. [Configuration](configuration.md) has the flags of clusterd.
`)
	root := testRoot(&out)
	var streams genericiooptions.IOStreams
	for _, group := range ownCommands(cmdutil.NewFactory(genericclioptions.NewConfigFlags(true)), streams) {
		for _, own := range group.Commands {
			for _, c := range root.Commands() { // there it is a part of the tree, by whose path it is called
				if c.Name() == own.Name() {
					docstest.Section(&out, c, func(*pflag.Flag) bool { return false })
				}
			}
		}
	}
	if *update {
		if err := os.WriteFile(referenceFile, out.Bytes(), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(referenceFile)
	if err != nil {
		t.Fatalf("%v (run with -update)", err)
	}
	if diff := cmp.Diff(string(want), out.String()); diff != "" {
		t.Errorf("docs/clusterctl.md is not as the code is; run: go test ./cmd/clusterctl -run TestReference -update\n%s", diff)
	}
}

// TestCommandsInDocs: each clusterctl and kubectl command that a page shows is one, with
// these flags.
func TestCommandsInDocs(t *testing.T) {
	shown := docstest.Commands(t, docstest.Pages(t, "../.."), "clusterctl", "kubectl")
	if len(shown) < 60 {
		t.Errorf("only %d commands were found", len(shown))
	}
	for _, s := range shown {
		if err := docstest.Resolve(testRoot(&bytes.Buffer{}), s.Args); err != nil {
			t.Errorf("%s: %v", s, err)
		}
	}
}
