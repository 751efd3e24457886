package main

import (
	"fmt"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"k8s.io/cli-runtime/pkg/genericclioptions"
	"k8s.io/cli-runtime/pkg/genericiooptions"
	"k8s.io/cli-runtime/pkg/printers"
	"k8s.io/client-go/rest"
	cliflag "k8s.io/component-base/cli/flag"
	"k8s.io/klog/v2"
	cmdutil "k8s.io/kubectl/pkg/cmd/util"
	"k8s.io/kubectl/pkg/util/completion"
	"k8s.io/kubectl/pkg/util/templates"
)

const name = "clusterctl"

// newRoot builds the whole command tree. It reads nothing before a command
// runs.
func newRoot(streams genericiooptions.IOStreams, search kubeconfigSearch) *cobra.Command {
	warnings := rest.NewWarningWriter(streams.ErrOut, rest.WarningWriterOptions{Deduplicate: true, Color: printers.AllowsColorOutput(streams.ErrOut)})
	warningsAsErrors := false
	back := &lookBack{}
	flags := genericclioptions.NewConfigFlags(true).WithDiscoveryBurst(300).WithDiscoveryQPS(50).WithWarningPrinter(streams)
	root := &cobra.Command{
		Use:   name,
		Short: "clusterctl controls a clusterd cluster",
		Long: templates.LongDesc(`
			clusterctl controls a clusterd cluster.

			It has kubectl's commands, with the same flags and output, and adds commands for the
			history of objects, the images on nodes, the members of the cluster, its CAs, its
			store, its users and join tokens.

			The cluster is found through --kubeconfig, $KUBECONFIG, ~/.kube/config or, on
			a server node, ` + dataKubeconfig + `.`),
		Run:           func(cmd *cobra.Command, _ []string) { _ = cmd.Help() },
		SilenceErrors: true,
		PersistentPreRun: func(*cobra.Command, []string) {
			quieten()
			rest.SetDefaultWarningHandler(warnings)
			search.apply(flags)
			back.apply(flags)
		},
		PersistentPostRunE: func(*cobra.Command, []string) error {
			if n := warnings.WarningCount(); warningsAsErrors && n > 0 {
				return fmt.Errorf("%d warnings received from the server", n)
			}
			return nil
		},
	}
	root.SetIn(streams.In)
	root.SetOut(streams.Out)
	root.SetErr(streams.ErrOut)
	root.SetGlobalNormalizationFunc(cliflag.WordSepNormalizeFunc)
	root.PersistentFlags().BoolVar(&warningsAsErrors, "warnings-as-errors", false, "Treat warnings received from the server as errors and exit with a non-zero exit code")
	flags.AddFlags(root.PersistentFlags())
	matched := cmdutil.NewMatchVersionFlags(flags)
	matched.AddFlags(root.PersistentFlags())
	f := cmdutil.NewFactory(matched)

	kubectl := kubectlCommands(f, streams)
	kubectl.Add(root)
	for _, c := range root.Commands() {
		if c.Name() == "get" || c.Name() == "describe" {
			back.addFlag(c)
		}
	}
	root.AddCommand(otherCommands(f, streams)...)
	for _, c := range root.Commands() {
		rename(c)
	}
	own := ownCommands(f, streams)
	own.Add(root)
	for _, group := range own {
		for _, c := range group.Commands {
			shortenUseLine(c)
		}
	}
	templates.ActsAsRootCommand(root, []string{"options"}, append(own, kubectl...)...)
	completeGlobalFlags(root, f)
	return root
}

// shortenUseLine leaves "[flags]" out of usage lines, which end in "[options]".
func shortenUseLine(cmd *cobra.Command) {
	cmd.DisableFlagsInUseLine = true
	for _, c := range cmd.Commands() {
		shortenUseLine(c)
	}
}

// quieten drops what the libraries log on the way to an error that the command
// reports anyway, unless the user has asked for logs with -v.
func quieten() {
	if !klog.V(1).Enabled() {
		klog.SetLogger(logr.Discard())
	}
}

// ownCommands are those that kubectl does not have.
func ownCommands(f cmdutil.Factory, streams genericiooptions.IOStreams) templates.CommandGroups {
	return templates.CommandGroups{{
		Message: "History Commands:",
		Commands: []*cobra.Command{
			newHistoryCommand(f, streams),
			newUndoCommand(f, streams),
		},
	}, {
		Message: "Cluster Commands:",
		Commands: []*cobra.Command{
			newCACommand(f, streams),
			newImageCommand(f, streams),
			newMembersCommand(f, streams),
			newNetCommand(f, streams),
			newRecoverCommand(f, streams),
			newSnapshotCommand(f, streams),
			newStoreCommand(f, streams),
			newTokenCommand(f, streams),
			newTokenKeysCommand(f, streams),
			newUpgradeCommand(f, streams),
			newUserCommand(f, streams),
		},
	}}
}

func completeGlobalFlags(root *cobra.Command, f cmdutil.Factory) {
	completion.SetFactoryForCompletion(f)
	for flag, values := range map[string]func(toComplete string) []string{
		"namespace": func(s string) []string { return completion.CompGetResource(f, "namespace", s) },
		"context":   completion.ListContextsInConfig,
		"cluster":   completion.ListClustersInConfig,
		"user":      completion.ListUsersInConfig,
	} {
		cmdutil.CheckErr(root.RegisterFlagCompletionFunc(flag, func(_ *cobra.Command, _ []string, toComplete string) ([]string, cobra.ShellCompDirective) {
			return values(toComplete), cobra.ShellCompDirectiveNoFileComp
		}))
	}
}
