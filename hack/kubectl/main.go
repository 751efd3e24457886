// Command kubectl is kubectl of the version that this project's API server is
// of, so that the tests' client and server never differ in it: the program of
// k8s.io/kubernetes/cmd/kubectl is these lines around the k8s.io/kubectl module.
package main

import (
	"os"

	_ "k8s.io/client-go/plugin/pkg/client/auth"
	"k8s.io/component-base/cli"
	"k8s.io/kubectl/pkg/cmd"
	"k8s.io/kubectl/pkg/cmd/util"
)

func main() {
	if err := cli.RunNoErrOutput(cmd.NewDefaultKubectlCommand()); err != nil {
		util.CheckErr(err)
	}
	os.Exit(0)
}
