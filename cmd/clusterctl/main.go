// Command clusterctl is the command line of a clusterd cluster: every command
// of kubectl, made of the same packages, and a few of our own for what
// Kubernetes has no words for: images on nodes, members, the store, join tokens.
package main

import (
	"os"

	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/component-base/cli"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
)

func main() {
	speakPlainly()
	streams := genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr}
	if err := cli.RunNoErrOutput(newRoot(streams, places())); err != nil {
		cmdutil.CheckErr(err)
	}
}
