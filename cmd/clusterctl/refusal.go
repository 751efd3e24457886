package main

import (
	"fmt"
	"os"
	"regexp"
	"strings"

	cmdutil "k8s.io/kubectl/pkg/cmd/util"
)

// hint is what kubectl's packages say of a kind that the server does not know.
// They take for granted that all but custom kinds are served everywhere.
const hint = "ensure CRDs are installed first"

// unreadable is client-go's word for a kubeconfig of another user, of which it keeps
// the text alone.
var unreadable = regexp.MustCompile(`error loading config file "([^"]+)": open [^\n]*: permission denied`)

// plainly says instead what is the case.
func plainly(message string) string {
	message = unreadable.ReplaceAllStringFunc(message, func(found string) string {
		return forbidden(unreadable.FindStringSubmatch(found)[1])
	})
	return strings.ReplaceAll(message, hint,
		"clusterd does not serve this kind (see `clusterctl api-resources`); if it is a custom kind, apply its CustomResourceDefinition first")
}

// speakPlainly has all commands end through plainly.
func speakPlainly() {
	cmdutil.BehaviorOnFatal(func(message string, code int) {
		if message = plainly(message); message != "" {
			fmt.Fprintln(os.Stderr, strings.TrimSuffix(message, "\n"))
		}
		os.Exit(code)
	})
}
