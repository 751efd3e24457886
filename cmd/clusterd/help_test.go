package main

import (
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
