package main

import (
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/component-base/term"
)

// groupFlags makes --help of root's commands show flags by area. Commands without
// flags of Config keep the library's help.
func groupFlags(root *cobra.Command) {
	plain := root.HelpFunc()
	root.SetHelpFunc(func(cmd *cobra.Command, args []string) {
		areas := flagAreas(cmd)
		if len(areas.Order) < 2 {
			plain(cmd, args)
			return
		}
		out := cmd.OutOrStdout()
		cols, _, _ := term.TerminalSize(out) // zero: lines are not wrapped
		printHelp(out, cmd, areas, cols)
	})
}

// printHelp writes what cobra would, with the flags in sections.
func printHelp(out io.Writer, cmd *cobra.Command, areas cliflag.NamedFlagSets, cols int) {
	about := cmd.Long
	if about == "" {
		about = cmd.Short
	}
	fmt.Fprintf(out, "%s\n\nUsage:\n  %s\n", strings.TrimSpace(about), cmd.UseLine())
	if cmd.HasExample() {
		fmt.Fprintf(out, "\nExamples:\n%s\n", cmd.Example)
	}
	cliflag.PrintSections(out, areas, cols)
}

// flagAreas groups the flags of a command that help shows: its own first, then those
// of Config by area.
func flagAreas(cmd *cobra.Command) cliflag.NamedFlagSets {
	cmd.InitDefaultHelpFlag()
	var areas cliflag.NamedFlagSets
	areas.FlagSet(cmd.Name())
	order := []string{areaNode, areaPods, areaEviction, areaImages, areaNetwork, areaScheduling, areaStore, areaAPI, areaAudit, areaKeys, areaLogs, areaCluster}
	found := map[string][]*pflag.Flag{}
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) {
		area := cmd.Name()
		if of := f.Annotations[flagArea]; len(of) > 0 {
			area = of[0]
		}
		if !f.Hidden {
			found[area] = append(found[area], f)
		}
	})
	for _, area := range append([]string{cmd.Name()}, order...) {
		for _, f := range found[area] {
			areas.FlagSet(area).AddFlag(f)
		}
	}
	return areas
}

// showOnly hides all flags of Config but those that a command uses. The others stay
// accepted, as scripts may pass all of a node's flags to each command.
func showOnly(cmd *cobra.Command, used ...string) {
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if len(f.Annotations[flagArea]) > 0 && !slices.Contains(used, f.Name) {
			f.Hidden = true
		}
	})
}
