package main

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericiooptions"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func testRoot(out *bytes.Buffer) *cobra.Command {
	return newRoot(genericiooptions.IOStreams{In: &bytes.Buffer{}, Out: out, ErrOut: out}, kubeconfigSearch{})
}

// ours are the commands that kubectl does not have, and those below them, without the
// program's name; and version, which kubectl has and we replace.
func ours(root *cobra.Command) []string {
	names := []string{"version"}
	var visit func(c *cobra.Command)
	visit = func(c *cobra.Command) {
		if c.Hidden {
			return
		}
		names = append(names, strings.TrimPrefix(c.CommandPath(), name+" "))
		for _, sub := range c.Commands() {
			visit(sub)
		}
	}
	for _, group := range ownCommands(nil, genericiooptions.IOStreams{}) {
		for _, own := range group.Commands {
			c, _, err := root.Find([]string{own.Name()})
			if err == nil {
				visit(c)
			}
		}
	}
	return names
}

// The help of the program and of our own verbs is read like code.
func TestHelp(t *testing.T) {
	commands := append([]string{""}, ours(testRoot(&bytes.Buffer{}))...)
	if len(commands) < 50 {
		t.Errorf("only %d commands of our own", len(commands))
	}
	goldens, err := filepath.Glob(filepath.Join("testdata", "help", "*.txt"))
	if err != nil || len(goldens) > len(commands) {
		t.Errorf("%d golden files of %d commands, %v: remove those of commands that are gone", len(goldens), len(commands), err)
	}
	for _, command := range commands {
		t.Run(strings.TrimSpace("clusterctl "+command), func(t *testing.T) {
			var out bytes.Buffer
			root := testRoot(&out)
			root.SetArgs(append(strings.Fields(command), "--help"))
			if err := root.Execute(); err != nil {
				t.Fatal(err)
			}
			golden := filepath.Join("testdata", "help", strings.ReplaceAll(strings.TrimSpace("clusterctl "+command), " ", "-")+".txt")
			if *update {
				if err := os.MkdirAll(filepath.Dir(golden), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(golden, out.Bytes(), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatalf("%v (run with -update)", err)
			}
			if diff := cmp.Diff(string(want), out.String()); diff != "" {
				t.Errorf("help changed (-want +got); if that is right, run with -update:\n%s", diff)
			}
		})
	}
}

// Every command has a line in the list, and our own have examples.
func TestCommandsAreDescribed(t *testing.T) {
	var out bytes.Buffer
	var check func(c *cobra.Command, ours bool)
	check = func(c *cobra.Command, ours bool) {
		if c.Short == "" {
			t.Errorf("%s has no description", c.CommandPath())
		}
		if ours && c.RunE != nil && c.Example == "" {
			t.Errorf("%s has no example", c.CommandPath())
		}
		for _, sub := range c.Commands() {
			check(sub, ours)
		}
	}
	root := testRoot(&out)
	own := ours(root)
	for _, c := range root.Commands() {
		check(c, slices.Contains(own, c.Name()))
	}
}

// No help may tell the user to run another program.
func TestHelpSpeaksOfClusterctl(t *testing.T) {
	var out bytes.Buffer
	var check func(c *cobra.Command)
	check = func(c *cobra.Command) {
		for _, w := range strings.Fields(c.Use + " " + c.Short + " " + c.Long + " " + c.Example) {
			if strings.Trim(w, "'`\"().,:$<") == "kubectl" {
				t.Errorf("%s: help speaks of %q", c.CommandPath(), w)
			}
		}
		for _, sub := range c.Commands() {
			check(sub)
		}
	}
	for _, c := range testRoot(&out).Commands() {
		check(c)
	}
}

// TestHelpWords: help speaks the field's language (HOUSE.md, section 6).
func TestHelpWords(t *testing.T) {
	avoided := regexp.MustCompile(`(?i)\b(folders?|anew|processors?|tells?|told|whoever|nobody|goes on|sealed|exchanged?|strangers?)\b`)
	root := testRoot(&bytes.Buffer{})
	for _, name := range ours(root) {
		c, _, err := root.Find(strings.Fields(name))
		if err != nil {
			t.Fatal(err)
		}
		text := c.Use + "\n" + c.Short + "\n" + c.Long + "\n" + c.Example + "\n" + c.LocalFlags().FlagUsages()
		for _, word := range avoided.FindAllString(text, -1) {
			t.Errorf("clusterctl %s: %q in its help", name, word)
		}
	}
}

func TestRenameText(t *testing.T) {
	for in, want := range map[string]string{
		"kubectl get pods":                              "clusterctl get pods",
		"'kubectl' and kubectl.":                        "'clusterctl' and clusterctl.",
		"source <(kubectl completion bash)":             "source <(clusterctl completion bash)",
		"/etc/bash_completion.d/kubectl":                "/etc/bash_completion.d/clusterctl",
		"completions/kubectl.fish":                      "completions/clusterctl.fish",
		"kubectl.kubernetes.io/last-applied":            "kubectl.kubernetes.io/last-applied",
		"kubectl-client-side-apply":                     "kubectl-client-side-apply",
		"see https://kubernetes.io/docs/kubectl/ first": "see https://kubernetes.io/docs/kubectl/ first",
	} {
		if got := renameText(in); got != want {
			t.Errorf("renameText(%q) = %q, want %q", in, got, want)
		}
	}
}

func TestCompletion(t *testing.T) {
	s := newServer(t)
	s.answers("GET /clusterd/v1/members", 200, twoMembers)
	s.answers("GET /clusterd/v1/tokens", 200, `{"tokens":[{"id":"abc"},{"id":"xyz"}]}`)
	s.answers("GET /api/v1/nodes", 200, threeNodes)
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"members", "rm", ""}, "n2\nn1\n:4\n"},
		{[]string{"token", "rm", "a"}, "abc\n:4\n"},
		{[]string{"image", "ls", "--node", ""}, "n1\nn2\nn3\n:4\n"},
		{[]string{"snap"}, "snapshot\tSave the cluster to one encrypted file, verify or restore it\n:4\n"},
	} {
		var out, errOut bytes.Buffer
		root := newRoot(genericiooptions.IOStreams{In: &bytes.Buffer{}, Out: &out, ErrOut: &errOut}, kubeconfigSearch{})
		root.SetArgs(append([]string{"__complete", "--server", s.URL, "--cache-dir", t.TempDir()}, tt.args...))
		if err := root.Execute(); err != nil {
			t.Fatal(err)
		}
		if got := out.String(); got != tt.want {
			t.Errorf("completing %q: got %q, want %q", tt.args, got, tt.want)
		}
	}
	for _, shell := range []string{"bash", "zsh", "fish", "powershell"} {
		var out bytes.Buffer
		root := testRoot(&out)
		root.SetArgs([]string{"completion", shell})
		if err := root.Execute(); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(out.String(), "clusterctl") || strings.Contains(out.String(), "kubectl") {
			t.Errorf("completion for %s does not fit clusterctl", shell)
		}
	}
}
