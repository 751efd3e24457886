package main

import (
	"regexp"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// rename makes the help of kubectl's commands speak of clusterctl.
func rename(cmd *cobra.Command) {
	for _, text := range []*string{&cmd.Use, &cmd.Short, &cmd.Long, &cmd.Example, &cmd.Deprecated} {
		*text = renameText(*text)
	}
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) { f.Usage = renameText(f.Usage) })
	for _, c := range cmd.Commands() {
		rename(c)
	}
}

var word = regexp.MustCompile(`\S+`)

// renameText replaces kubectl where it is the program's name, and leaves it
// where it is part of another: an address, an annotation, a field manager.
func renameText(text string) string {
	return word.ReplaceAllStringFunc(text, func(w string) string {
		if strings.Contains(w, "://") || strings.Contains(w, "kubectl.kubernetes.io") || fieldManager.MatchString(w) {
			return w
		}
		return strings.ReplaceAll(w, "kubectl", name)
	})
}

// fieldManager matches names such as kubectl-client-side-apply.
var fieldManager = regexp.MustCompile(`kubectl-[a-z]`)
