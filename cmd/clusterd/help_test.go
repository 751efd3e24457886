package main

import (
	"regexp"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// TestHelp: the help of a flag says its default once, and has no marks that
// were meant for something else.
func TestHelp(t *testing.T) {
	flags := 0
	var visit func(c *cobra.Command)
	visit = func(c *cobra.Command) {
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			flags++
			// pflag takes a word in backquotes for the name of the value.
			if strings.Contains(f.Usage, "`") {
				t.Errorf("%s --%s: backquotes in %q", c.CommandPath(), f.Name, f.Usage)
			}
			zero := f.DefValue == "" || f.DefValue == "0" || f.DefValue == "0s" || f.DefValue == "false" || f.DefValue == "[]"
			if !zero && strings.Contains(f.Usage, "default:") {
				t.Errorf("%s --%s: two defaults, %q and %q", c.CommandPath(), f.Name, f.Usage, f.DefValue)
			}
		})
		for _, sub := range c.Commands() {
			visit(sub)
		}
	}
	visit(rootCommand())
	if flags < 50 {
		t.Errorf("only %d flags seen", flags)
	}
}

// TestHelpGroupsFlags: help shows the flags of Config by area, each flag in one, and of
// commands that use few of them no others.
func TestHelpGroupsFlags(t *testing.T) {
	help := func(args ...string) string {
		t.Helper()
		var out strings.Builder
		root := rootCommand()
		root.SetOut(&out)
		root.SetArgs(append(args, "--help"))
		if err := root.Execute(); err != nil {
			t.Fatal(err)
		}
		return out.String()
	}
	init := help("init")
	for _, want := range []string{"\nInit flags:\n", "\nNode flags:\n", "\nStore flags:\n", "\nCluster-wide (fixed at init) flags:\n", "\nExamples:\n", "\nUsage:\n  clusterd init [flags]\n"} {
		if !strings.Contains(init, want) {
			t.Errorf("clusterd init --help lacks %q:\n%s", want, init)
		}
	}
	initCmd, _, err := rootCommand().Find([]string{"init"})
	if err != nil {
		t.Fatal(err)
	}
	initCmd.Flags().VisitAll(func(f *pflag.Flag) {
		if !f.Hidden && !strings.Contains(init, " --"+f.Name+" ") {
			t.Errorf("clusterd init --help does not show --%s", f.Name)
		}
	})
	for _, args := range [][]string{{"keys", "status"}, {"keys", "show"}, {"keys", "write"}, {"keys", "unseal"}, {"reset"}} {
		out := help(args...)
		if !strings.Contains(out, "--data ") || strings.Contains(out, "--max-pods") {
			t.Errorf("clusterd %s --help:\n%s", strings.Join(args, " "), out)
		}
	}
	if out := help("containers"); !strings.Contains(out, "\nFlags:\n") {
		t.Errorf("clusterd containers --help:\n%s", out)
	}
}

// TestHelpWords: help speaks the field's language (HOUSE.md, section 6).
func TestHelpWords(t *testing.T) {
	avoided := regexp.MustCompile(`(?i)\b(folders?|anew|processors?|tells?|told|whoever|nobody|goes on|sealed|exchanged?|strangers?)\b`)
	flagName := regexp.MustCompile(`--[a-z-]+`) // names stay
	var visit func(c *cobra.Command)
	visit = func(c *cobra.Command) {
		if c.Hidden {
			return
		}
		text := c.Use + "\n" + c.Short + "\n" + c.Long + "\n" + c.Example + "\n" + c.LocalFlags().FlagUsages()
		for _, word := range avoided.FindAllString(flagName.ReplaceAllString(text, ""), -1) {
			t.Errorf("%s: %q in its help", c.CommandPath(), word)
		}
		for _, sub := range c.Commands() {
			visit(sub)
		}
	}
	visit(rootCommand())
}

// TestHiddenFlagsAreAccepted: a script may pass a node's flags to each command.
func TestHiddenFlagsAreAccepted(t *testing.T) {
	c, rest, err := rootCommand().Find([]string{"keys", "status", "--max-pods", "7"})
	if err != nil {
		t.Fatal(err)
	}
	if err := c.ParseFlags(rest); err != nil {
		t.Error(err)
	}
}
